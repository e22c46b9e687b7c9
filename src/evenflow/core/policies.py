"""Policies as users write them, and as objects everywhere else.

`PolicySpec.parse` is the only reader of the notation and `str(spec)` its only writer. `spec.build()` gives the
stateful `Policy` that plans steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from evenflow.core.deadlines import Pacing
from evenflow.core.policy import Policy
from evenflow.core.rule_policies import Adaptive, Alternate, Budgeted, ByLoad, ByPromptLength, Unchunked
from evenflow.core.target_policy import Target
from evenflow.duration import DURATION_PATTERN, format_duration, parse_duration
from evenflow.errors import InvalidConfig

MIN_TARGET_S, MAX_TARGET_S = 0.0001, 3600.0
DEFAULT_BUDGET = 2048
DEFAULT_TARGET_BUDGET = 8192  # with a target, the budget only bounds memory
POLICY_FORMS = ("unchunked", "alternate:N", "fixed:N", "load", "adaptive[:MS]", "prompt-length", "target:MS[,paced]")
_WITHOUT_ARGUMENT: dict[str, Callable[[int], Policy]] = {
    "unchunked": Unchunked,
    "load": ByLoad,
    "prompt-length": ByPromptLength,
}
_DEFAULT_LATENCY_S = 0.05  # of `adaptive`


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Which policy, and its figures. Specs that mean the same are equal, however they were written."""

    name: str
    max_step_tokens: int | None = None  # None: the default
    seconds: float | None = None  # of `target` and `adaptive`
    is_paced: bool = False
    written: str = field(default="", compare=False)  # as the user wrote it
    base: PolicySpec | None = field(
        default=None, compare=False
    )  # the policy that a target replaced; restored by with_target(None)

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        name, _, argument = text.partition(":")
        if name in _WITHOUT_ARGUMENT and not argument:
            return cls(name, written=text)
        if name in ("fixed", "alternate"):
            if not argument.isdecimal() or int(argument) == 0:
                raise InvalidConfig(f"Got policy={text!r} but expected a whole number >= 1 after the colon.")
            return cls(name, int(argument), written=text)
        if name == "adaptive":
            return cls(name, seconds=_seconds(text, argument) if argument else _DEFAULT_LATENCY_S, written=text)
        target, comma, mode = argument.partition(",")
        if name == "target" and (mode == "paced" or not comma):
            return cls(name, seconds=_seconds(text, target), is_paced=mode == "paced", written=text)
        raise InvalidConfig(f"Got policy={text!r} but expected one of: {', '.join(POLICY_FORMS)}.")

    @classmethod
    def for_target(cls, seconds: float, is_paced: bool = False) -> PolicySpec:
        return cls("target", seconds=_as_target(seconds), is_paced=is_paced)

    def __str__(self) -> str:
        if self.written:
            return self.written
        figure = "" if self.name in _WITHOUT_ARGUMENT else f":{self.max_step_tokens}"
        if self.seconds is not None:
            figure = f":{format_duration(self.seconds)}"
        return self.name + figure + ",paced" * self.is_paced

    @property
    def pacing(self) -> Pacing | None:
        """None: this policy has no target."""
        return Pacing(self.seconds, self.is_paced) if self.name == "target" and self.seconds else None

    @property
    def target(self) -> float | None:
        return self.seconds if self.name == "target" else None

    @property
    def budget(self) -> int:
        """Upper bound of a step's tokens."""
        return self.max_step_tokens or (DEFAULT_TARGET_BUDGET if self.target else DEFAULT_BUDGET)

    @property
    def names_budget(self) -> bool:
        """Is the budget part of its written form?"""
        return self.name in ("fixed", "alternate")

    def bounded(self, max_step_tokens: int) -> PolicySpec:
        return self if self.names_budget else replace(self, max_step_tokens=max_step_tokens)

    def with_target(self, seconds: float | None, is_paced: bool | None = None) -> PolicySpec:
        """This policy with another target, paced as before unless stated. None: the policy from before the target."""
        if seconds is None:
            return self if self.target is None else self.base or DEFAULT_POLICY
        if self.target is None:
            return replace(self.for_target(seconds, bool(is_paced)), base=self)
        paced = self.is_paced if is_paced is None else is_paced
        return replace(self, seconds=_as_target(seconds), is_paced=paced, written="")

    def build(self) -> Policy:
        """A policy that has learned nothing yet."""
        if self.pacing is not None:
            return Target(self.budget, self.pacing)
        if self.name == "adaptive":
            return Adaptive(self.budget, self.seconds or _DEFAULT_LATENCY_S)
        if self.names_budget:
            return (Alternate if self.name == "alternate" else Budgeted)(self.budget)
        return _WITHOUT_ARGUMENT[self.name](self.budget)


DEFAULT_POLICY = PolicySpec("fixed", DEFAULT_BUDGET)


def split_policies(text: str) -> list[str]:
    """The parts of a comma-separated list; `target:50,paced` contains a comma."""
    return re.split(r", *(?!paced(?:,|$))", text)


def parse_policies(text: str) -> list[PolicySpec]:
    return [PolicySpec.parse(one) for one in split_policies(text)]


def _seconds(policy: str, argument: str) -> float:
    """Milliseconds unless a unit is given."""
    text = argument + "ms" * bool(re.fullmatch(r"[0-9.]+", argument))
    seconds = parse_duration(text) if re.fullmatch(DURATION_PATTERN, text) else math.nan
    if not MIN_TARGET_S <= seconds <= MAX_TARGET_S:
        raise InvalidConfig(
            f"Got policy={policy!r} but expected milliseconds such as 50ms after the colon, "
            f"from {MIN_TARGET_S:g} to {MAX_TARGET_S:g} seconds."
        )
    return seconds


def _as_target(seconds: float) -> float:
    """The target in whole nanoseconds, as `str` writes it: a recorded policy must be the one that ran."""
    if not isinstance(seconds, int | float) or not MIN_TARGET_S <= seconds <= MAX_TARGET_S:
        raise InvalidConfig(f"Got tbt_target={seconds!r} but expected {MIN_TARGET_S:g} to {MAX_TARGET_S:g} seconds.")
    return round(seconds, 9)
