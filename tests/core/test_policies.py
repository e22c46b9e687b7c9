"""The notation of policies: what each text means, how it is written back, and what a change of target makes of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core import policies
from evenflow.core.deadlines import Pacing
from evenflow.core.policies import (
    DEFAULT_BUDGET,
    DEFAULT_POLICY,
    DEFAULT_TARGET_BUDGET,
    PolicySpec,
    parse_policies,
    policy_forms,
    register_policy,
)
from evenflow.core.policy import Argument, Policy, PolicyKind
from evenflow.core.rule_policies import Adaptive, Alternate, Budgeted, ByLoad, ByPromptLength, Unchunked
from evenflow.core.target_policy import Target
from evenflow.duration import MAX_TARGET_S, MIN_TARGET_S, format_duration, parse_target
from evenflow.errors import InvalidConfig
from evenflow.executors.recorded import policy_record, read_policy


@pytest.mark.parametrize(
    ("text", "kind", "budget"),
    [
        ("unchunked", Unchunked, DEFAULT_BUDGET),
        ("alternate:64", Alternate, 64),
        ("fixed:512", Budgeted, 512),
        ("load", ByLoad, DEFAULT_BUDGET),
        ("adaptive", Adaptive, DEFAULT_BUDGET),
        ("adaptive:80ms", Adaptive, DEFAULT_BUDGET),
        ("prompt-length", ByPromptLength, DEFAULT_BUDGET),
        ("target:50ms", Target, DEFAULT_TARGET_BUDGET),
        ("target:50ms,paced", Target, DEFAULT_TARGET_BUDGET),
    ],
)
def test_each_form_builds_its_policy_with_its_budget(text: str, kind: type[Policy], budget: int) -> None:
    spec = PolicySpec.parse(text)
    assert str(spec) == text
    policy = spec.build()
    assert type(policy) is kind
    assert policy.max_step_tokens == spec.budget == budget
    assert policy.pacing == spec.pacing
    assert (spec.target is None) == (spec.pacing is None) == (kind is not Target)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05),
        ("50 ms", 0.05),
        ("0.05s", 0.05),
        ("2.5ms", 0.0025),
        ("0.5ms", 0.0005),
        ("33.3ms", 0.0333),
        ("2s", 2.0),
        ("0.1ms", MIN_TARGET_S),
        ("3600s", MAX_TARGET_S),
    ],
)
def test_a_target_in_milliseconds_or_seconds(text: str, seconds: float) -> None:
    spec = PolicySpec.parse(f"target:{text}")
    assert spec.target == seconds
    assert spec.pacing == Pacing(seconds)
    assert PolicySpec.parse(f"target:{text},paced").pacing == Pacing(seconds, is_paced=True)
    assert PolicySpec.parse(f"adaptive:{text}").seconds == seconds


def test_specs_that_mean_the_same_are_equal_and_each_is_echoed_as_written() -> None:
    texts = ("target:50ms", "target:0.05s")
    specs = [PolicySpec.parse(text) for text in texts]
    assert set(specs) == {PolicySpec.for_target(0.05)}
    assert [str(spec) for spec in specs] == list(texts)
    assert PolicySpec.parse("fixed:2048") == DEFAULT_POLICY
    assert PolicySpec.parse("target:2s") == PolicySpec.parse("target:2000ms")


@pytest.mark.parametrize("other", ["target:51ms", "target:50ms,paced", "adaptive:50ms", "fixed:50"])
def test_specs_that_differ_are_unequal(other: str) -> None:
    assert PolicySpec.parse("target:50ms") != PolicySpec.parse(other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "fixed",
        "fixed:",
        "fixed:0",
        "fixed:-3",
        "fixed:1.5",
        "fixed:many",
        "alternate",
        "alternate:0",
        "adaptive:x",
        "adaptive:0ms",
        "load:3",
        "unchunked:2",
        "prompt-length:5",
        "target",
        "target:",
        "target:0ms",
        "target:-50",
        "target:50ms,",
        "target:50ms,strict",
        "target:50ms,paced,paced",
        "target:0.09ms",
        "target:3601s",
        " target:50ms",
        "Target:50",
    ],
)
def test_a_bad_policy_is_named(text: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        PolicySpec.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("policy", ["target", "adaptive"])
def test_a_bare_number_is_refused_with_what_to_write(policy: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        PolicySpec.parse(f"{policy}:200")
    assert str(caught.value) == (
        f"Got policy='{policy}:200', which is 200 seconds; write \"{policy}:200ms\" or {policy}:0.2, or "
        f'"{policy}:200s" if you mean it.'
    )
    assert PolicySpec.parse(f"{policy}:0.2") == PolicySpec.parse(f"{policy}:200ms")


@pytest.mark.parametrize("argument", ["soon", "2m", "1.2.3", "1.", ".5", "50msec", "5e1", "50ms\n"])
@pytest.mark.parametrize("name", ["target", "adaptive"])
def test_a_bad_duration_is_told_what_one_looks_like(name: str, argument: str) -> None:
    with pytest.raises(InvalidConfig, match=r"Got policy=.* but expected a duration such as 50ms or 0\.3s"):
        PolicySpec.parse(f"{name}:{argument}")


def test_an_unknown_policy_is_told_every_form() -> None:
    with pytest.raises(InvalidConfig, match=r"unchunked, alternate:N, fixed:N, load, adaptive\[:TIME\], "):
        PolicySpec.parse("nonsense")


@pytest.mark.parametrize(
    "text", ["unchunked", "load", "adaptive", "adaptive:80ms", "prompt-length", "target:50ms,paced"]
)
def test_a_bound_is_kept_beside_the_text(text: str) -> None:
    spec = PolicySpec.parse(text).bounded(300)
    assert (str(spec), spec.budget, spec.build().max_step_tokens) == (text, 300, 300)
    assert spec.bounded(400).budget == 400


@pytest.mark.parametrize("text", ["fixed:64", "alternate:64"])
def test_a_policy_that_names_its_budget_keeps_it(text: str) -> None:
    spec = PolicySpec.parse(text)
    assert spec.bounded(300).budget == 64
    assert spec.names_budget


# ---- a policy of one's own ----


@pytest.mark.parametrize("argument", list(Argument))
def test_a_registered_policy_is_read_and_written_like_the_others(
    argument: Argument, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "_KINDS", dict(policies._KINDS))
    own = PolicyKind(
        name="own", argument=argument, examples={}, build=lambda spec: Budgeted(spec.budget), default_seconds=0.05
    )
    with pytest.raises(InvalidConfig):
        PolicySpec.parse("own")
    register_policy(own)
    figures = {"STEPS": "4", "PERCENT": "40", "N": "64", "TIME": "80ms", "[": "", "]": ""}
    text = argument.value
    for name, figure in figures.items():
        text = text.replace(name, figure)
    text = "own" + text
    spec = PolicySpec.parse(text)
    assert replace(spec, written="") == spec
    assert str(replace(spec, written="")) == str(spec) == text
    assert (spec.kind, type(spec.build())) == (own, Budgeted)
    assert own.form in policy_forms()
    assert (spec.target is not None) == (argument is Argument.TARGET)


def test_two_policies_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="'fixed'"):
        register_policy(PolicySpec.parse("fixed:8").kind)


# ---- another target ----


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.05, "50ms"), (0.0025, "2.5ms"), (0.0005, "0.5ms"), (2, "2000ms"), ("3600s", "3600000ms")]
)
def test_a_new_target_is_written_in_milliseconds(seconds: float | str, text: str) -> None:
    for base in ("fixed:512", "target:70ms"):
        spec = PolicySpec.parse(base).with_target(seconds)
        assert str(spec) == f"target:{text}"
        assert spec.target == parse_target(seconds)
        assert PolicySpec.parse(str(spec)) == spec


@given(st.floats(MIN_TARGET_S, MAX_TARGET_S), st.booleans())
def test_every_target_comes_back_from_its_text_exactly(seconds: float, is_paced: bool) -> None:
    spec = PolicySpec.parse("load").with_target(format_duration(seconds), is_paced)
    assert spec.target == pytest.approx(seconds, abs=1e-9)
    assert PolicySpec.parse(str(spec)) == spec
    assert read_policy(json.loads(json.dumps(policy_record(spec)))) == spec.bounded(spec.budget)


def test_a_new_target_is_paced_as_before_unless_stated() -> None:
    paced, strict = PolicySpec.parse("target:50ms,paced"), PolicySpec.parse("target:50ms")
    assert str(paced.with_target(0.07)) == "target:70ms,paced"
    assert str(strict.with_target(0.07)) == "target:70ms"
    assert str(paced.with_target(0.07, is_paced=False)) == "target:70ms"
    assert str(strict.with_target(0.07, is_paced=True)) == "target:70ms,paced"
    assert str(PolicySpec.parse("load").with_target(0.07)) == "target:70ms"
    assert str(PolicySpec.parse("load").with_target(0.07, is_paced=True)) == "target:70ms,paced"


def test_a_new_target_keeps_the_budget_of_the_old_one_but_not_that_of_another_policy() -> None:
    assert PolicySpec.parse("target:50ms").bounded(700).with_target(0.1).budget == 700
    assert PolicySpec.parse("fixed:64").with_target(0.1).budget == DEFAULT_TARGET_BUDGET


def test_without_a_target_the_policy_before_it_comes_back() -> None:
    base = PolicySpec.parse("adaptive:80ms").bounded(700)
    back = base.with_target(0.05).with_target(0.07).with_target(None)
    assert (back, str(back)) == (base, "adaptive:80ms")
    assert base.with_target(None) is base


@pytest.mark.parametrize("text", ["fixed:64", "load", "unchunked", "target:50ms"])
def test_no_change_of_target_loses_a_setting(text: str) -> None:
    spec = PolicySpec.parse(text).bounded(512)
    budget = spec.budget
    for _ in range(2):
        spec = spec.with_target(0.1, is_paced=True).with_target(0.2)
        assert (str(spec), spec.budget) == ("target:200ms,paced", 512)
        spec = spec.with_target(None)
        assert spec.budget == (512 if text == "target:50ms" else budget)
        assert str(spec) == ("fixed:512" if text == "target:50ms" else text)
        assert spec.pacing is None
    assert str(spec.with_target(0.3)) == "target:300ms,paced"


def test_a_target_from_the_start_gives_way_to_the_default() -> None:
    back = PolicySpec.parse("target:50ms").with_target(None)
    assert (str(back), back.budget) == ("fixed:2048", 2048)
    assert PolicySpec.for_target(0.05).with_target(0.1).with_target(None) == DEFAULT_POLICY


@pytest.mark.parametrize("seconds", [0, -1, 0.00009, 10**8, math.nan, math.inf, "3601s"])
def test_a_bad_target_is_named_with_its_range(seconds: float | str) -> None:
    for change in (PolicySpec.for_target, PolicySpec.parse("target:50ms").with_target, DEFAULT_POLICY.with_target):
        with pytest.raises(InvalidConfig) as caught:
            change(seconds)
        assert str(caught.value) == f"Got tbt_target={seconds!r} but expected 0.0001 to 3600 seconds."


def test_a_list_of_policies_may_hold_paced_targets() -> None:
    text = "unchunked,target:200ms,paced,adaptive,target:50ms,fixed:8,prompt-length,target:9ms,paced"
    assert [str(spec) for spec in parse_policies(text)] == [
        "unchunked",
        "target:200ms,paced",
        "adaptive",
        "target:50ms",
        "fixed:8",
        "prompt-length",
        "target:9ms,paced",
    ]


@pytest.mark.parametrize("text", ["", "fixed:8,", ",fixed:8", "paced", "fixed:8,strict"])
def test_a_list_with_a_bad_policy_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="expected one of"):
        parse_policies(text)
