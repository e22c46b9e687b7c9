"""The target of an engine that was given none."""

from __future__ import annotations

import pytest

from evenflow.core.default_target import READER_S, default_target, target_reason
from evenflow.core.plan import ExecutorCaps
from evenflow.core.policy import FLOOR_TOKENS
from evenflow.core.step_time import StepTimeModel

CAPS = ExecutorCaps()


def machine(step_s: float, row_s: float) -> StepTimeModel:
    """A model that has seen steps of many shapes on a machine with these costs."""
    model = StepTimeModel()
    for repeat in range(4):
        for num_decodes in (1, 4, 8):
            for chunk in (0, 16, 64, 256):
                chunks = [(512 * repeat, chunk)] if chunk else []
                shape = CAPS.step_shape(num_decodes=num_decodes, decode_context=512 * num_decodes, chunks=chunks)
                model.observe(shape, step_s + row_s * (num_decodes + chunk))
    return model


def test_it_leaves_room_above_the_least_feasible_one() -> None:
    least_feasible = 0.040 + (8 + FLOOR_TOKENS) * 0.005
    target = default_target(machine(0.040, 0.005), CAPS, max_num_seqs=256)
    assert target == pytest.approx(1.5 * least_feasible, rel=0.1)
    assert 100 * target == pytest.approx(round(100 * target))  # in steps of 10 ms


def test_it_is_no_less_than_a_reader_needs() -> None:
    assert default_target(machine(0.004, 0.00001), CAPS, max_num_seqs=256) == READER_S


def test_fewer_streams_can_have_a_lower_one() -> None:
    slow = machine(0.040, 0.005)
    assert default_target(slow, CAPS, max_num_seqs=1) < default_target(slow, CAPS, max_num_seqs=256)


def test_a_disturbed_machine_gets_room_for_its_slower_steps() -> None:
    model = machine(0.040, 0.005)
    shape = CAPS.step_shape(num_decodes=8, decode_context=8 * 512, chunks=[(512, FLOOR_TOKENS)])
    for slowness in (1.0, 1.1, 1.9, 1.0, 2.1, 1.2) * 8:
        model.observe(shape, slowness * 0.16)
    calm, disturbed = (default_target(model, CAPS, 256, is_disturbed=one) for one in (False, True))
    assert disturbed == pytest.approx(calm * model.margin(shape), rel=0.1)
    assert disturbed > 1.3 * calm
    assert "beside the other programs" in target_reason(disturbed, is_disturbed=True)
    assert "while it does nothing else" in target_reason(calm)


def test_an_engine_that_knows_nothing_serves_readers() -> None:
    assert default_target(StepTimeModel(), CAPS, max_num_seqs=256) == READER_S
