"""Policies as users write them, and as objects everywhere else.

`PolicySpec.parse` is the only reader of the notation and `str(spec)` its only writer. `spec.build()` gives the
stateful `Policy` that plans steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from evenflow.core.deadlines import Pacing
from evenflow.core.policy import Policy
from evenflow.core.rule_policies import Adaptive, Alternate, Budgeted, ByLoad, ByPromptLength, Unchunked
from evenflow.core.target_policy import Target
from evenflow.duration import format_duration, parse_target
from evenflow.errors import InvalidConfig

DEFAULT_BUDGET = 2048
DEFAULT_TARGET_BUDGET = 8192  # with a target, the budget only bounds memory
POLICY_FORMS = (
    "unchunked",
    "alternate:N",
    "fixed:N",
    "load",
    "adaptive[:TIME]",
    "prompt-length",
    "target:TIME[,paced]",
)
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
    max_step_tokens: int | None = None  # the policy's own budget; None: it has none
    seconds: float | None = None  # of `target` and `adaptive`
    is_paced: bool = False  # of `target`; another policy keeps it for the next target
    max_num_batched_tokens: int | None = None  # the engine's setting, which outlasts a change of target
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
            return cls(name, seconds=_seconds(name, text, argument) if argument else _DEFAULT_LATENCY_S, written=text)
        target, comma, mode = argument.partition(",")
        if name == "target" and (mode == "paced" or not comma):
            return cls(name, seconds=_seconds(name, text, target), is_paced=mode == "paced", written=text)
        raise InvalidConfig(f"Got policy={text!r} but expected one of: {', '.join(POLICY_FORMS)}.")

    @classmethod
    def for_target(cls, target: float | str, is_paced: bool = False) -> PolicySpec:
        return cls("target", seconds=parse_target(target), is_paced=is_paced)

    def __str__(self) -> str:
        if self.written:
            return self.written
        figure = "" if self.name in _WITHOUT_ARGUMENT else f":{self.max_step_tokens}"
        if self.seconds is not None:
            figure = f":{format_duration(self.seconds)}"
        return self.name + figure + ",paced" * (self.is_paced and self.name == "target")

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
        default = DEFAULT_TARGET_BUDGET if self.target else DEFAULT_BUDGET
        return self.max_step_tokens or self.max_num_batched_tokens or default

    @property
    def names_budget(self) -> bool:
        """Is the budget part of its written form?"""
        return self.name in ("fixed", "alternate")

    def bounded(self, max_num_batched_tokens: int | None) -> PolicySpec:
        """With this budget, unless it has its own."""
        return replace(self, max_num_batched_tokens=max_num_batched_tokens)

    def with_target(self, target: float | str | None, is_paced: bool | None = None) -> PolicySpec:
        """This policy with another target, paced as before unless stated. None: the policy from before the target."""
        most = self.max_num_batched_tokens
        if target is None and self.target is None:
            return self
        if target is None:
            base = self.base or PolicySpec("fixed", most or DEFAULT_BUDGET).bounded(most)
            return replace(base, is_paced=self.is_paced)
        paced = self.is_paced if is_paced is None else is_paced
        if self.target is None:
            return replace(self.for_target(target, paced).bounded(most), base=self)
        return replace(self, seconds=parse_target(target), is_paced=paced, written="")

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
    """The parts of a comma-separated list; `target:50ms,paced` contains a comma."""
    return re.split(r", *(?!paced(?:,|$))", text)


def parse_policies(text: str) -> list[PolicySpec]:
    return [PolicySpec.parse(one) for one in split_policies(text)]


def _seconds(name: str, policy: str, argument: str) -> float:
    return parse_target(argument, InvalidConfig, f"Got policy={policy!r}", f"{name}:")
