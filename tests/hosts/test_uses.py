from __future__ import annotations

from dataclasses import dataclass

import pytest

from evenflow.errors import MissingDependency
from evenflow.hosts.uses import Uses
from evenflow.sglang.launch import SGLANG
from evenflow.vllm.launch import VLLM


@dataclass
class Scheduler:
    running: list[str]

    def schedule(self, num_tokens: int) -> None: ...


def uses(*attributes: str, **methods: set[str]) -> Uses:
    return Uses("host.core.scheduler:Scheduler", attributes, methods)


def test_all_that_is_used_is_there() -> None:
    VLLM.check_methods(uses(schedule={"num_tokens"}), Scheduler)
    VLLM.check_attributes(uses("running", "schedule"), Scheduler([]))
    SGLANG.check_attributes(uses("running"), Scheduler)  # a class: its annotations count


def test_a_renamed_attribute_is_found_under_either_name() -> None:
    VLLM.check_attributes(uses("active|running"), Scheduler([]))
    VLLM.check_methods(Uses("host:Scheduler", methods={"plan|schedule": {"num_tokens"}}), Scheduler)


@pytest.mark.parametrize("missing", ["waiting", "waiting|queue"])
def test_a_missing_attribute_is_named(missing: str) -> None:
    with pytest.raises(MissingDependency) as refusal:
        VLLM.check_attributes(uses("running", missing), Scheduler([]))
    assert f"relies on: Scheduler.{missing}. " in str(refusal.value)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"step": set[str]()}, r"Scheduler.step\(\)"),
        ({"schedule": {"num_tokens", "deadline"}}, r"Scheduler.schedule\(deadline, num_tokens\)"),
    ],
)
def test_a_missing_method_or_parameter_is_named(methods: dict[str, set[str]], message: str) -> None:
    with pytest.raises(MissingDependency, match=message):
        VLLM.check_methods(uses(**methods), Scheduler)
