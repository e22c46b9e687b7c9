"""Classes of service: how urgent a request is, its targets, and the least share of the machine that its class gets.

Plain data. `service_order` uses it to decide who is next and who yields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenflow.duration import parse_target
from evenflow.errors import InvalidConfig, InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """One class. `rank` is on the scale of vLLM's `priority`: the lower, the more urgent."""

    name: str
    rank: int
    share: float  # least share of the machine's time while requests of the class wait, however urgent the others
    tbt_target: float | str | None = None  # seconds between tokens, or 50ms, of requests without their own
    ttft_target: float | str | None = None  # to the first token, likewise
    reserve: float = 0.0  # share of the slots and of the KV cache that it leaves to the decodes of others
    refuse_late: bool = False  # refuse at once what is expected to miss its target for the first token

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidConfig(f"Got a class named {self.name!r} but expected a text of at least one character.")
        if not isinstance(self.rank, int) or isinstance(self.rank, bool):
            raise InvalidConfig(f"Got rank={self.rank!r} of class {self.name!r} but expected a whole number.")
        self._require("share", 0 < self.share <= 1, "a number in (0, 1]")
        self._require("reserve", 0 <= self.reserve < 1, "a number in [0, 1)")
        self._require("refuse_late", isinstance(self.refuse_late, bool), "true or false")
        for name in ("tbt_target", "ttft_target"):
            self._seconds(name)

    @property
    def tbt_seconds(self) -> float | None:
        return self._seconds("tbt_target")

    @property
    def ttft_seconds(self) -> float | None:
        return self._seconds("ttft_target")

    def _seconds(self, name: str) -> float | None:
        value = getattr(self, name)
        return None if value is None else parse_target(value, got=f"Got {name}={value!r} of class {self.name!r}")

    def _require(self, name: str, is_right: bool, expected: str) -> None:
        if not is_right:
            raise InvalidConfig(f"Got {name}={getattr(self, name)!r} of class {self.name!r} but expected {expected}.")


Classes = tuple[ServiceClass, ...]


def late_name(name: str) -> str:
    """The class that late prompts of this one are served under."""
    return f"{name} (late)"


DEFAULT_CLASSES: Classes = (
    ServiceClass(name="interactive", rank=-1, share=0.5),
    ServiceClass(name="standard", rank=0, share=0.1),
    ServiceClass(name="batch", rank=1, share=0.05, reserve=0.05),
)


def check_classes(classes: Sequence[ServiceClass]) -> Classes:
    """The classes, the most urgent first, or an InvalidConfig that says why they do not go together."""
    if not classes:
        raise InvalidConfig("Got no classes but expected at least one.")
    for what in ("name", "rank"):
        values = [getattr(one, what) for one in classes]
        if twice := {value for value in values if values.count(value) > 1}:
            raise InvalidConfig(f"Got two classes of {what} {min(twice)!r} but expected a {what} of its own for each.")
    names = {one.name for one in classes}
    for one in classes:
        if one.ttft_target is not None and late_name(one.name) in names:
            raise InvalidConfig(
                f"Got a class named {late_name(one.name)!r} but late prompts of {one.name!r} go by this name: give it "
                "another."
            )
    total = sum(one.share for one in classes)
    if total > 1 + 1e-9:
        raise InvalidConfig(f"Got classes whose shares add up to {total:g} but expected at most 1.")
    return tuple(sorted(classes, key=lambda one: one.rank))


def check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights of tenants; a tenant that is not listed has weight 1."""
    for tenant, weight in weights.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
            raise InvalidConfig(f"Got weight {weight!r} of tenant {tenant!r} but expected a number > 0.")
    return dict(weights)


def class_of_priority(priority: int, classes: Classes = DEFAULT_CLASSES) -> ServiceClass:
    """vLLM's `priority`, lower is more urgent: the last class whose rank it reaches, else the most urgent."""
    ordered = sorted(classes, key=lambda one: one.rank)
    return next((one for one in reversed(ordered) if one.rank <= priority), ordered[0])


def find_class(classes: Classes, name: str | None = None, priority: int | None = None) -> ServiceClass:
    """The class that a request asks for, by name or priority; with neither, that of vLLM's default priority, 0."""
    if priority is not None and (not isinstance(priority, int) or isinstance(priority, bool)):
        raise InvalidRequest(f"Got priority={priority!r} but expected a whole number; lower is more urgent.")
    by_priority = class_of_priority(priority or 0, classes)
    if name is None:
        return by_priority
    found = next((one for one in classes if one.name == name), None)
    if found is None:
        raise InvalidRequest(
            f"Got service_class={name!r} but expected one of: {', '.join(one.name for one in classes)}."
        )
    if priority is not None and found is not by_priority:
        raise InvalidRequest(
            f"Got service_class={name!r} and priority={priority}, which means {by_priority.name!r}: give one of them."
        )
    return found
