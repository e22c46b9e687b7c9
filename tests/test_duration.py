"""One rule for the units of a latency target, and one range, wherever it is given."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from typer import BadParameter

from evenflow import EngineConfig, SamplingParams
from evenflow.cli.options import _parse_target
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


def _in_a_request(target: float | str) -> float | None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], "tbt_target": target})
    return SamplingParams(**body.targets).tbt_seconds


ENTRANCES: list[Callable[[float | str], float | None]] = [
    lambda target: SamplingParams(tbt_target=target).tbt_seconds,
    lambda target: EngineConfig(tbt_target=target).spec.target,  # type: ignore[union-attr]
    lambda target: PolicySpec.parse("load").with_target(target).target,
    lambda target: check_setting("tbt_target", target, DEFAULT_CLASSES),
    *(_of_class, _over_http, _in_a_request),
]


def _in_a_policy(target: str) -> float | None:
    return PolicySpec.parse(f"target:{target}").target


def _on_the_command_line(target: str) -> float | None:
    return parse_target(_parse_target(target))


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_numbers_are_seconds_and_texts_have_units_everywhere(entrance: Callable[[float | str], float | None]) -> None:
    targets = {0.05: 0.05, "50ms": 0.05, "0.3s": 0.3, 9.9: 9.9, "20s": 20.0, 0.0001: 0.0001, "3600s": 3600.0}
    for target, seconds in targets.items():
        assert entrance(target) == seconds


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    "target", [0, -1, 0.00009, "0.09ms", "3601s", "soon", "50", "0.3", "", "5e1", math.nan, 10**400]
)
def test_what_no_stream_could_mean_is_refused_everywhere(
    entrance: Callable[[float | str], float | None], target: float | str
) -> None:
    with pytest.raises(ValueError, match="tbt_target"):
        entrance(target)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_number_that_must_be_milliseconds_is_refused_with_what_to_write(
    entrance: Callable[[float | str], float | None],
) -> None:
    with pytest.raises(ValueError, match=r', which is 300 seconds; write "300ms"'):
        entrance(300)


@pytest.mark.parametrize("entrance", [_in_a_policy, _on_the_command_line])
def test_texts_alone(entrance: Callable[[str], float | None]) -> None:
    assert [entrance(text) for text in ("50ms", "0.3s", "20s")] == [0.05, 0.3, 20.0]
    for text in ("0ms", "3601s", "soon", "300", "", "9" * 400, "9" * 400 + "ms"):
        with pytest.raises((InvalidInput, BadParameter)):
            entrance(text)


def test_a_bare_number_on_the_command_line_is_seconds() -> None:
    assert _on_the_command_line("0.3") == 0.3
    with pytest.raises(BadParameter, match='write "300ms"'):
        _on_the_command_line("300")


@pytest.mark.parametrize("seconds", [0.0001, 0.0333, 1 / 30, 2.0, 9.999999999])
def test_a_target_is_read_as_it_is_written(seconds: float) -> None:
    assert parse_target(format_duration(parse_target(seconds))) == parse_target(seconds)
