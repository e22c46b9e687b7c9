"""evenflow's settings as flags of SGLang, which has most of them under other names. Needs no SGLang.

The names are those of the releases 0.5.16 to 0.5.23, which have them all alike.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from evenflow.errors import InvalidInput

Version = tuple[int, int, int]

PACKAGES = ("sglang",)
OLDEST: Version = (0, 5, 16)
NEWEST: Version = (0, 5, 23)
OLDEST_VERSION, NEWEST_VERSION = (".".join(map(str, version)) for version in (OLDEST, NEWEST))

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
# SGLang's server arguments behind the flags that evenflow prints or passes.
FLAGS = (
    *(flag.replace("-", "_") for flag in (*_NAMES.values(), _UNCHUNKED_BUDGET)),
    *("disable_radix_cache", "enable_metrics", "enable_mixed_chunk", "host", "model_path", "port", "served_model_name"),
)


class SglangFlags(NamedTuple):
    flags: list[str]
    unknown: list[str]  # settings that SGLang has not


def parse_version(text: str) -> Version:
    """The three numbers of a version such as 0.5.23 or 0.5.22.post1."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text.strip())
    if match is None:
        raise InvalidInput(f"Got SGLang version {text!r} but expected one such as {NEWEST_VERSION}.")
    return int(match[1]), int(match[2]), int(match[3])


def check_known(text: str) -> None:
    """Refuse a version outside the known ones."""
    if not OLDEST <= parse_version(text) <= NEWEST:
        raise InvalidInput(f"Got SGLang version {text!r} but {OLDEST_VERSION} to {NEWEST_VERSION} are known.")


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
