"""evenflow's settings inside a host engine: from the host's own configuration, else from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenflow.core.policies import MAX_TARGET_S, MIN_TARGET_S, PolicySpec
from evenflow.core.service_classes import DEFAULT_CLASSES, Classes, find_class
from evenflow.errors import InvalidConfig
from evenflow.hosts.policy_file import NO_TARGET
from evenflow.shares_file import Shares, read_shares

CONFIG_KEY = "evenflow"
TARGET_VARIABLE = "EVENFLOW_TBT_TARGET"
SOCKET_VARIABLE = "EVENFLOW_STEP_SOCKET"
TARGET_FILE_VARIABLE = "EVENFLOW_TARGET_FILE"
SHARES_VARIABLE = "EVENFLOW_SHARES"

_VARIABLES = {
    "tbt_target": TARGET_VARIABLE,
    "step_socket": SOCKET_VARIABLE,
    "target_file": TARGET_FILE_VARIABLE,
    "shares": SHARES_VARIABLE,
}
_MAX_TENANT_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    policy: PolicySpec | None  # None: the host is left to its own budget, and its steps are only reported
    step_socket: str | None  # a Unix stream socket that receives each step's report
    target_file: str | None  # another target can be written here while the host runs
    classes: Classes = DEFAULT_CLASSES
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


def read_settings(additional_config: object) -> Settings:
    """Settings from the host's configuration; those missing there come from the environment."""
    given = additional_config.get(CONFIG_KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping) or not set(given) <= set(_VARIABLES):
        raise InvalidConfig(
            f"Got {CONFIG_KEY}={given!r} in vLLM's additional config but expected some of: {', '.join(_VARIABLES)}."
        )
    found = {name: given.get(name, os.environ.get(variable)) for name, variable in _VARIABLES.items()}
    shares = read_shares(Path(found["shares"])) if found["shares"] else Shares()
    policy = _policy(found["tbt_target"])
    return Settings(policy, found["step_socket"], found["target_file"], **shares.engine_settings)


def _policy(target: Any) -> PolicySpec | None:
    if target == NO_TARGET:
        return None
    if isinstance(target, int | float) and not isinstance(target, bool):
        return PolicySpec.for_target(target)
    if not isinstance(target, str):
        raise InvalidConfig(
            f"Got tbt_target={target!r} but expected a duration such as 50ms: set it by "
            f"""--additional-config '{{"{CONFIG_KEY}": {{"tbt_target": "50ms"}}}}' or {TARGET_VARIABLE}=50ms; with """
            f"{NO_TARGET!r} steps are only reported."
        )
    try:
        return PolicySpec.parse(f"target:{target}")
    except InvalidConfig:
        raise InvalidConfig(
            f"Got tbt_target={target!r} but expected milliseconds such as 50ms, or {NO_TARGET}."
        ) from None


def own_target(extra_args: Mapping[str, Any] | None, name: str = "tbt_target") -> float | None:
    """A request's own target in seconds; None if it has none, or none that makes sense."""
    target = (extra_args or {}).get(name)
    if isinstance(target, bool) or not isinstance(target, int | float) or not MIN_TARGET_S <= target <= MAX_TARGET_S:
        return None
    return float(target)


def own_class(extra_args: Mapping[str, Any] | None, priority: int, classes: Classes) -> str:
    """The class that a request names, else that of its priority. A name that does not exist counts as none."""
    named = (extra_args or {}).get("service_class")
    found = next((one for one in classes if one.name == named), None)
    return (found or find_class(classes, priority=priority)).name


def own_tenant(extra_args: Mapping[str, Any] | None) -> str:
    tenant = (extra_args or {}).get("tenant")
    return tenant[:_MAX_TENANT_CHARACTERS] if isinstance(tenant, str) else ""
