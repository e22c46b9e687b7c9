"""evenflow's settings inside a host engine: from the host's own configuration, else from the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenflow.core.policies import PolicySpec
from evenflow.core.service_classes import DEFAULT_CLASSES, Classes, find_class
from evenflow.duration import parse_target
from evenflow.errors import InvalidConfig, InvalidInput, InvalidRequest
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
REQUEST_SETTINGS = ("tbt_target", "ttft_target", "service_class", "tenant")
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
    shares = _shares(found["shares"])
    policy = _policy(found["tbt_target"])
    return Settings(policy, found["step_socket"], found["target_file"], **shares.engine_settings)


def classes_by_environment() -> Classes:
    """The classes of service of a host engine that this process starts."""
    return _shares(os.environ.get(SHARES_VARIABLE)).classes


def _shares(path: str | None) -> Shares:
    return read_shares(Path(path)) if path else Shares()


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
    text, comma, mode = target.partition(",")
    if comma and mode != "paced":
        raise InvalidConfig(f"Got tbt_target={target!r} but expected a duration such as 50ms, or {NO_TARGET}.")
    return PolicySpec.for_target(text, is_paced=bool(comma))


def check_setting(name: str, given: object, classes: Classes) -> Any:
    """One of a request's own settings in the engine's terms; raises InvalidRequest for what it cannot mean."""
    if name in ("tbt_target", "ttft_target"):
        return parse_target(given, InvalidRequest, name=name)
    if name == "service_class":
        if isinstance(given, str):
            return find_class(classes, given).name
        raise InvalidRequest(f"Got service_class={repr(given)[:100]} but expected a text.")
    if isinstance(given, str) and len(given) <= _MAX_TENANT_CHARACTERS:
        return given
    raise InvalidRequest(f"Got tenant={repr(given)[:100]} but expected a text of at most {_MAX_TENANT_CHARACTERS}.")


class RequestSettings:
    """Reads requests' own settings in a host, which takes any: a senseless one is ignored, and logged once per name."""

    def __init__(self, classes: Classes, logger: logging.Logger) -> None:
        self._classes = classes
        self._logger = logger
        self._warned: set[str] = set()

    def read(self, given: object, priority: int = 0) -> dict[str, Any]:
        """Fields of a `HostRequest`. Without a class of its own, a request has that of its priority."""
        found: dict[str, Any] = {"service_class": find_class(self._classes, priority=priority).name}
        if given is not None and not isinstance(given, Mapping):
            self._warn("own settings", f"Got {repr(given)[:100]} but expected an object.")
            return found
        for name in REQUEST_SETTINGS:
            if given and given.get(name) is not None:
                try:
                    found[name] = check_setting(name, given[name], self._classes)
                except InvalidInput as error:
                    self._warn(name, str(error))
        return found

    def _warn(self, name: str, why: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            self._logger.warning("evenflow: a request's %s is ignored, as are others without sense: %s", name, why)
