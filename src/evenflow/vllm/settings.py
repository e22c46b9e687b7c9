"""What the plug-in is told: from vLLM's `--additional-config`, else from the environment.

vLLM counts its additional config among what its compiled graphs depend on, so that another target there compiles anew;
the environment has no such cost. Must not know: vLLM's classes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenflow.core.policies import MIN_TARGET_S, make_policy, retarget
from evenflow.errors import InvalidConfig

CONFIG_KEY = "evenflow"
TARGET_VARIABLE = "EVENFLOW_TBT_TARGET"
SOCKET_VARIABLE = "EVENFLOW_STEP_SOCKET"
TARGET_FILE_VARIABLE = "EVENFLOW_TARGET_FILE"

_VARIABLES = {"tbt_target": TARGET_VARIABLE, "step_socket": SOCKET_VARIABLE, "target_file": TARGET_FILE_VARIABLE}


@dataclass(frozen=True, slots=True)
class Settings:
    """All of the plug-in's own settings."""

    policy: str  # target:MS[,paced]
    step_socket: str | None  # a Unix stream socket that is told of each step
    target_file: str | None  # where another target is written while vLLM runs


def read_settings(additional_config: object) -> Settings:
    """Settings from vLLM's additional config, each of them from the environment where it says nothing."""
    told = additional_config.get(CONFIG_KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(told, Mapping) or not set(told) <= set(_VARIABLES):
        raise InvalidConfig(
            f"Got {CONFIG_KEY}={told!r} in vLLM's additional config but expected some of: {', '.join(_VARIABLES)}."
        )
    found = {name: told.get(name, os.environ.get(variable)) for name, variable in _VARIABLES.items()}
    return Settings(_policy(found["tbt_target"]), found["step_socket"], found["target_file"])


def _policy(target: Any) -> str:
    if isinstance(target, int | float) and not isinstance(target, bool):
        return retarget("", target)
    if not isinstance(target, str):
        raise InvalidConfig(
            f"Got tbt_target={target!r} but expected a duration such as 50ms: set it by "
            f"""--additional-config '{{"{CONFIG_KEY}": {{"tbt_target": "50ms"}}}}' or {TARGET_VARIABLE}=50ms."""
        )
    try:
        make_policy(f"target:{target}", 1)
    except InvalidConfig:
        raise InvalidConfig(f"Got tbt_target={target!r} but expected whole milliseconds such as 50ms.") from None
    return f"target:{target}"


def own_target(extra_args: Mapping[str, Any] | None) -> float | None:
    """A request's own `tbt_target` in seconds; None where it brought none, or none that could be meant."""
    target = (extra_args or {}).get("tbt_target")
    is_meant = isinstance(target, int | float) and MIN_TARGET_S <= target < math.inf
    return float(target) if is_meant else None  # type: ignore[arg-type]
