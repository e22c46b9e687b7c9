"""The one notation for policies, shared by the command line, the API and results."""

from __future__ import annotations

import re

from evenflow.core.pacing import Pacing
from evenflow.core.policy import Policy
from evenflow.core.rule_policies import Adaptive, Alternate, Budgeted, ByLoad, ByPromptLength, Unchunked
from evenflow.core.target_policy import Target
from evenflow.errors import InvalidConfig

MIN_TARGET_S, MAX_TARGET_S = 0.001, 3600.0
POLICY_FORMS = ("unchunked", "alternate:N", "fixed:N", "load", "adaptive[:MS]", "prompt-length", "target:MS[,paced]")


def make_policy(text: str, max_num_batched_tokens: int) -> Policy:
    """Build the policy that `text` names; `max_num_batched_tokens` bounds those whose own text gives no bound."""
    name, _, argument = text.partition(":")
    if name == "unchunked" and not argument:
        return Unchunked(max_num_batched_tokens)
    if name == "alternate":
        return Alternate(_positive_int(text, argument))
    if name == "fixed":
        return Budgeted(_positive_int(text, argument))
    if name == "load" and not argument:
        return ByLoad(max_num_batched_tokens)
    if name == "adaptive":
        return Adaptive(max_num_batched_tokens, _seconds(text, argument) if argument else 0.05)
    if name == "prompt-length" and not argument:
        return ByPromptLength(max_num_batched_tokens)
    target, comma, mode = argument.partition(",")
    if name == "target" and (mode == "paced" or not comma):
        return Target(max_num_batched_tokens, Pacing(_seconds(text, target), is_paced=mode == "paced"))
    raise InvalidConfig(f"Got policy={text!r} but expected one of: {', '.join(POLICY_FORMS)}.")


def split_policies(text: str) -> list[str]:
    """The policies of a list with commas between them; `target:50,paced` has one inside."""
    return re.split(r",(?!paced(?:,|$))", text)


def has_target(policy: str) -> bool:
    """Whether this policy keeps latency targets."""
    return policy.startswith("target:")


def target_of(policy: str) -> float | None:
    """The seconds of the target that this policy keeps; None: it keeps none."""
    pacing = make_policy(policy, 1).pacing
    return None if pacing is None else pacing.target


def retarget(policy: str, seconds: float, paced: bool | None = None) -> str:
    """The target policy of so many seconds: paced or strict as asked for, else as `policy` was."""
    if not isinstance(seconds, int | float) or not MIN_TARGET_S <= seconds <= MAX_TARGET_S:
        raise InvalidConfig(f"Got tbt_target={seconds!r} but expected {MIN_TARGET_S} to {MAX_TARGET_S:g} seconds.")
    is_paced = policy.endswith(",paced") if paced is None else paced
    return f"target:{round(seconds * 1000)}ms" + ",paced" * is_paced


def _seconds(policy: str, argument: str) -> float:
    return _positive_int(policy, argument.removesuffix("ms"), "whole milliseconds such as 50ms") / 1000


def _positive_int(policy: str, argument: str, expected: str = "a whole number >= 1") -> int:
    if not argument.isdecimal() or int(argument) == 0:
        raise InvalidConfig(f"Got policy={policy!r} but expected {expected} after the colon.")
    return int(argument)
