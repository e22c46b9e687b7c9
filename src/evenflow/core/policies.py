"""The policies there are, and their notation. A new one is a file with its PolicyKind, and a line in `_KINDS`.

`PolicySpec.parse` is the only reader of the notation and `str(spec)` its only writer. `spec.build()` gives the
stateful `Policy` that plans steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from evenflow.core.deadlines import Pacing
from evenflow.core.policy import Argument, Policy, PolicyKind
from evenflow.core.rule_policies import ADAPTIVE, ALTERNATE, FIXED, LOAD, PROMPT_LENGTH, UNCHUNKED
from evenflow.core.target_policy import TARGET
from evenflow.duration import format_duration, parse_target
from evenflow.errors import InvalidConfig

DEFAULT_BUDGET = 2048
DEFAULT_TARGET_BUDGET = 8192  # with a target, the budget only bounds memory
_KINDS: dict[str, PolicyKind] = {}


def register_policy(kind: PolicyKind) -> PolicyKind:
    """Let users choose this policy by its name, in this process."""
    if kind.name in _KINDS:
        raise InvalidConfig(f"Got a policy named {kind.name!r}, but there is one: give it another name.")
    _KINDS[kind.name] = kind
    return kind


def forget_policy(kind: PolicyKind) -> None:
    """Undo `register_policy`."""
    del _KINDS[kind.name]


for _kind in (UNCHUNKED, ALTERNATE, FIXED, LOAD, ADAPTIVE, PROMPT_LENGTH, TARGET):
    register_policy(_kind)


def policy_kinds() -> Iterable[PolicyKind]:
    return _KINDS.values()


def policy_forms(kinds: Iterable[PolicyKind] | None = None) -> str:
    """How policies are written, as a list."""
    return ", ".join(kind.form for kind in kinds or policy_kinds())


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Which policy, and its figures. Specs that mean the same are equal, however they were written."""

    name: str
    max_step_tokens: int | None = None  # the policy's own budget; None: it has none
    seconds: float | None = None  # of `target` and `adaptive`
    number: int | None = None  # an interval's steps, or a share's percent
    is_paced: bool = False  # of `target`; another policy keeps it for the next target
    max_num_batched_tokens: int | None = None  # the engine's setting, which outlasts a change of target
    written: str = field(default="", compare=False)  # as the user wrote it
    base: PolicySpec | None = field(
        default=None, compare=False
    )  # the policy that a target replaced; restored by with_target(None)

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        name, _, argument = text.partition(":")
        kind = _KINDS.get(name)
        time, comma, mode = argument.partition(",")
        match kind and kind.argument:
            case Argument.NOTHING if not argument:
                return cls(name, written=text)
            case Argument.BUDGET:
                return cls(name, _whole(text, argument), written=text)
            case Argument.INTERVAL:
                return cls(name, number=_whole(text, argument), written=text)
            case Argument.SHARE:
                return cls(name, number=_whole(text, argument, most=100), written=text)
            case Argument.OPTIONAL_TIME:
                assert kind is not None
                seconds = _seconds(name, text, argument) if argument else kind.default_seconds
                return cls(name, seconds=seconds, written=text)
            case Argument.TARGET if mode == "paced" or not comma:
                return cls(name, seconds=_seconds(name, text, time), is_paced=mode == "paced", written=text)
        raise InvalidConfig(f"Got policy={text!r} but expected one of: {policy_forms()}.")

    @classmethod
    def for_target(cls, target: float | str, is_paced: bool = False) -> PolicySpec:
        return cls("target", seconds=parse_target(target), is_paced=is_paced)

    def __str__(self) -> str:
        if self.written:
            return self.written
        if self.seconds is not None:
            return f"{self.name}:{format_duration(self.seconds)}" + ",paced" * (self.is_paced and self.keeps_target)
        number = self.max_step_tokens if self.names_budget else self.number
        return self.name if number is None else f"{self.name}:{number}"

    @property
    def kind(self) -> PolicyKind:
        return _KINDS[self.name]

    @property
    def keeps_target(self) -> bool:
        return self.kind.argument is Argument.TARGET

    @property
    def names_budget(self) -> bool:
        """Is the budget part of its written form?"""
        return self.kind.argument is Argument.BUDGET

    @property
    def cuts_prompts(self) -> bool:
        return self.kind.cuts_prompts

    @property
    def target(self) -> float | None:
        return self.seconds if self.keeps_target else None

    @property
    def pacing(self) -> Pacing | None:
        """None: this policy has no target."""
        return Pacing(self.target, self.is_paced) if self.target else None

    @property
    def budget(self) -> int:
        """Upper bound of a step's tokens."""
        default = DEFAULT_TARGET_BUDGET if self.target else DEFAULT_BUDGET
        return self.max_step_tokens or self.max_num_batched_tokens or default

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
        return self.kind.build(self)


WHOLE_PROMPTS = PolicySpec("unchunked")
DEFAULT_POLICY = PolicySpec("fixed", DEFAULT_BUDGET)


def split_policies(text: str) -> list[str]:
    """The parts of a comma-separated list; `target:50ms,paced` contains a comma."""
    return re.split(r", *(?!paced(?:,|$))", text)


def parse_policies(text: str) -> list[PolicySpec]:
    return [PolicySpec.parse(one) for one in split_policies(text)]


def _whole(policy: str, argument: str, most: int | None = None) -> int:
    number = int(argument) if argument.isdecimal() else 0
    if number < 1 or (most is not None and number > most):
        allowed = ">= 1" if most is None else f"from 1 to {most}"
        raise InvalidConfig(f"Got policy={policy!r} but expected a whole number {allowed} after the colon.")
    return number


def _seconds(name: str, policy: str, argument: str) -> float:
    return parse_target(argument, InvalidConfig, f"Got policy={policy!r}", f"{name}:")
