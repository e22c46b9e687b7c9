"""One rule for the units of a latency target, and one range, wherever it is given."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from pydantic import ValidationError
from typer import BadParameter

from evenflow import EngineConfig, SamplingParams
from evenflow.cli.options import _parse_duration, _parse_target
from evenflow.core.policies import PolicySpec
from evenflow.core.service_classes import DEFAULT_CLASSES, ServiceClass
from evenflow.duration import format_duration, parse_target
from evenflow.errors import InvalidInput
from evenflow.hosts.settings import check_setting
from evenflow.server.api.request_models import ChatBody, TargetBody


def _of_class(target: float | str) -> float | None:
    return ServiceClass(name="one", rank=0, share=1, tbt_target=target).tbt_seconds


def _over_http(target: float | str) -> float:
    return parse_target(TargetBody.model_validate({"tbt_target": target}).tbt_target)


def _over_http_as(name: str, target: float | str) -> SamplingParams:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], name: target})
    return SamplingParams(**body.targets)


def _in_a_request(target: float | str) -> float | None:
    return _over_http_as("tbt_target", target).tbt_seconds


ENTRANCES: list[Callable[[float | str], float | None]] = [
    lambda target: SamplingParams(tbt_target=target).tbt_seconds,
    lambda target: EngineConfig(tbt_target=target).spec.target,  # type: ignore[union-attr]
    lambda target: PolicySpec.parse("load").with_target(target).target,
    lambda target: check_setting("tbt_target", target, DEFAULT_CLASSES),
    lambda target: SamplingParams(ttft_target=target).ttft_seconds,
    lambda target: SamplingParams(deadline=target).deadline_seconds,
    lambda target: ServiceClass(name="one", rank=0, share=1, ttft_target=target).ttft_seconds,
    lambda target: check_setting("ttft_target", target, DEFAULT_CLASSES),
    *(_of_class, _over_http, _in_a_request),
    lambda target: _over_http_as("ttft_target", target).ttft_seconds,
    lambda target: _over_http_as("deadline", target).deadline_seconds,
    lambda target: PolicySpec.parse(f"target:{target}").target,
    lambda target: parse_target(_parse_target(str(target))),
]


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_bare_numbers_are_seconds_and_texts_may_have_units_everywhere(
    entrance: Callable[[float | str], float | None],
) -> None:
    targets = {
        0.05: 0.05,
        "50ms": 0.05,
        "0.3s": 0.3,
        9.9: 9.9,
        "9.9": 9.9,
        "20s": 20.0,
        0.0001: 0.0001,
        "3600s": 3600.0,
    }
    for target, seconds in targets.items():
        assert entrance(target) == seconds


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    "target",
    [0, -1, 0.00009, "0.09ms", "3601s", "soon", "", "5e1", "50ms\n", math.nan, 10**400, "9" * 400, "9" * 400 + "ms"],
)
def test_what_no_stream_could_mean_is_refused_everywhere(
    entrance: Callable[[float | str], float | None], target: float | str
) -> None:
    with pytest.raises((InvalidInput, ValidationError, BadParameter)):
        entrance(target)


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("target", [300, "300", 10])
def test_a_number_that_must_be_milliseconds_is_refused_with_what_to_write(
    entrance: Callable[[float | str], float | None], target: float | str
) -> None:
    pattern = rf', which is {target} seconds; write "(target:)?{target}ms" or (target:)?{float(target) / 1000:g}'
    with pytest.raises((InvalidInput, ValidationError, BadParameter), match=pattern):
        entrance(target)


def test_a_command_lines_durations_have_the_same_rule() -> None:
    assert [_parse_duration(text) for text in ("0s", "0.5", "90s")] == [0, 0.5, 90]
    with pytest.raises(BadParameter, match=r"""Got '30', which is 30 seconds; write "30ms" or 0.03, or "30s" if you"""):
        _parse_duration("30")


@pytest.mark.parametrize("seconds", [0.0001, 0.0333, 1 / 30, 2.0, 9.999999999])
def test_a_target_is_read_as_it_is_written(seconds: float) -> None:
    assert parse_target(format_duration(parse_target(seconds))) == parse_target(seconds)
