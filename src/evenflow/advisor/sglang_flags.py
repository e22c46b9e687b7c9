"""evenflow's settings as flags of SGLang, which has most of them under other names. Needs no SGLang."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

PACKAGES = ("sglang",)
KNOWN_VERSION = "0.5.16"

_NAMES = {
    "max_num_batched_tokens": "chunked-prefill-size",
    "max_num_seqs": "max-running-requests",
    "max_model_len": "context-length",
    "gpu_memory_utilization": "mem-fraction-static",
    "tensor_parallel_size": "tp-size",
    "pipeline_parallel_size": "pp-size",
    "data_parallel_size": "dp-size",
}
_UNCHUNKED_BUDGET = "max-prefill-tokens"  # of whole prompts in a step; a longer one runs alone
# Flags of vLLM in advice, and what SGLang calls them.
_RENAMED = {
    **{f"--{name.replace('_', '-')}": f"--{flag}" for name, flag in _NAMES.items()},
    "--no-enable-prefix-caching": "--disable-radix-cache",
}
_IF_OFF = {
    "enable_prefix_caching": ["--disable-radix-cache"],
    "enable_chunked_prefill": ["--chunked-prefill-size", "-1"],
}


class SglangFlags(NamedTuple):
    flags: list[str]
    unknown: list[str]  # settings that SGLang has not


def command_flags(settings: Mapping[str, Any]) -> SglangFlags:
    """Settings as flags of SGLang's server. What SGLang does anyway needs no flag."""
    found = SglangFlags([], [])
    names = dict(_NAMES)
    if settings.get("enable_chunked_prefill") is False:
        names["max_num_batched_tokens"] = _UNCHUNKED_BUDGET
    for name, value in settings.items():
        if name in names:
            found.flags.extend((f"--{names[name]}", str(value)))
        elif name in _IF_OFF:
            found.flags.extend([] if value else _IF_OFF[name])
        elif value:
            found.unknown.append(name)
    return found


def in_sglangs_words(advice: str) -> str:
    """Advice with vLLM's flags, with SGLang's instead."""
    for flag, other in _RENAMED.items():
        advice = advice.replace(flag, other)
    return advice


def command_line(model: str, settings: Mapping[str, Any]) -> str:
    """The command to start SGLang with these settings, decodes mixed into each step of prefill."""
    flags = [*command_flags(settings).flags, "--enable-mixed-chunk"]
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", model, *flags])
