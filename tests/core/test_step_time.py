"""The model against machines whose true costs are known: without noise it finds them, and jitter averages out."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, product
from statistics import mean

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evenflow.core import step_costs
from evenflow.core.least_squares import Matrix, Vector, fit_nonnegative
from evenflow.core.plan import StepShape
from evenflow.core.step_time import StepTimeModel
from evenflow.errors import InvalidInput

Cost = Callable[[StepShape], float]
JITTER = (0.0, 1.0, -1.0, 0.5, -0.5)  # in turn: adds up to nothing, and no step is like the one before
WIDEST = 3.001
BUCKETS = tuple(1 << power for power in range(14))


def shape(
    chunks: Sequence[tuple[int, int]] = (), contexts: Sequence[int] = (), *, is_padded: bool = False
) -> StepShape:
    """Chunks as (start, length), decodes by their contexts."""
    prefill_rows = sum(length for _, length in chunks)
    rows = prefill_rows + len(contexts)
    return StepShape(
        total_rows=rows,
        padded_rows=next(bucket for bucket in BUCKETS if bucket >= rows) if is_padded else rows,
        prefill_rows=prefill_rows,
        prefill_attention=sum(length * start + length * (length + 1) // 2 for start, length in chunks),
        decode_sequences=len(contexts),
        decode_context=sum(contexts),
        attention_calls=len(chunks) + (1 if contexts else 0),
        logit_rows=len(contexts) + len(chunks) // 2,
    )


def sum_of_costs(s: StepShape) -> float:
    """1 ms and up: a small model on a GPU that no one of its limits rules."""
    rows = 2e-5 * s.padded_rows + 1e-5 * s.prefill_rows + 5e-5 * s.decode_sequences + 1e-5 * s.logit_rows
    return 1e-3 + rows + 2e-9 * s.prefill_attention + 2e-8 * s.decode_context + 2e-4 * s.attention_calls


def rows_bound_by_memory_or_compute(s: StepShape) -> float:
    """8B on a GPU: weights are read once, or rows are multiplied; attention comes on top."""
    attention = 1.3e-9 * s.prefill_attention + 4e-8 * s.decode_context + 2e-5 * s.attention_calls
    return 1e-3 + max(5e-3, 2.7e-5 * s.padded_rows) + attention


def step_bound_by_memory_or_compute(s: StepShape) -> float:
    """One roofline over all: what attention reads and multiplies counts on either side."""
    return max(5e-3 + 4e-8 * s.decode_context, 2.7e-5 * s.padded_rows + 1.3e-9 * s.prefill_attention)


def small_cpu(s: StepShape) -> float:
    """60 ms to 20 s: bound by compute from 25 rows on."""
    attention = 3e-7 * s.prefill_attention + 2e-7 * s.decode_context + 1e-3 * s.attention_calls
    return 0.02 + max(0.04, 1.6e-3 * s.padded_rows) + attention + 2e-4 * s.logit_rows


MACHINES = [sum_of_costs, rows_bound_by_memory_or_compute, step_bound_by_memory_or_compute, small_cpu]
each_machine = pytest.mark.parametrize("cost", MACHINES)


class Machine:
    """Runs steps at a true cost, times a speed. The seed only chooses which steps."""

    def __init__(self, cost: Cost, seed: int = 0, *, is_padded: bool = False, jitter: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.cost = cost
        self.slowness = 1.0
        self.is_padded = is_padded
        self._jitter = cycle(1 + jitter * factor for factor in JITTER)

    def seconds(self, s: StepShape) -> float:
        return self.cost(s) * self.slowness * next(self._jitter)

    def log_uniform(self, low: float, high: float) -> int:
        return int(math.exp(self.rng.uniform(math.log(low), math.log(high))))

    def step(self, *, mixed: bool | None = None, max_rows: int = 2048, max_context: int = 30_000) -> StepShape:
        mixed = self.rng.random() < 0.6 if mixed is None else mixed
        num_decodes = self.rng.choice([1, 2, 4, 6, 8, 16, 24, 64] if mixed else [0, 1, 2, 4, 6, 8, 16, 24, 64])
        chunks = []
        if mixed or not num_decodes:
            chunks = [
                (self.rng.choice([0, self.rng.randrange(max_context)]), self.log_uniform(16, max_rows))
                for _ in range(self.rng.choice([1, 1, 1, 2, 3]))
            ]
        contexts = [self.log_uniform(20, max_context / 4) for _ in range(num_decodes)]
        return shape(chunks, contexts, is_padded=self.is_padded and sum(n for _, n in chunks) + num_decodes <= 8192)

    def teach(self, model: StepTimeModel, num_steps: int, *, mixed: bool | None = None) -> None:
        for _ in range(num_steps):
            s = self.step(mixed=mixed)
            model.observe(s, self.seconds(s))


def taught(
    cost: Cost, num_steps: int = 60, seed: int = 0, *, is_padded: bool = False, jitter: float = 0.0
) -> tuple[StepTimeModel, Machine]:
    model, machine = StepTimeModel(), Machine(cost, seed, is_padded=is_padded, jitter=jitter)
    machine.teach(model, num_steps)
    return model, machine


def errors_of(model: StepTimeModel, cost: Cost, shapes: Sequence[StepShape]) -> list[float]:
    """|predicted - true| / true, in ascending order."""
    return sorted(abs(model.predict(s) / cost(s) - 1) for s in shapes)


# ---- accuracy ----


@each_machine
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mixed_steps_are_predicted_after_sixty(cost: Cost, is_padded: bool, seed: int) -> None:
    model, machine = taught(cost, 60, seed, is_padded=is_padded)
    errors = errors_of(model, cost, [machine.step(mixed=True) for _ in range(200)])
    assert mean(errors) < 0.02
    assert errors[190] < 0.03


@each_machine
def test_after_hundreds_of_steps_costs_are_known_to_a_thousandth(cost: Cost) -> None:
    model, machine = taught(cost, 600)
    assert model.error < 0.001
    assert mean(errors_of(model, cost, [machine.step(mixed=True) for _ in range(200)])) < 0.002


@each_machine
@pytest.mark.parametrize("jitter", [0.05, 0.15])
def test_jitter_averages_out_of_the_costs_and_is_what_remains_as_error(cost: Cost, jitter: float) -> None:
    model, machine = taught(cost, 600, jitter=jitter)
    assert mean(errors_of(model, cost, [machine.step(mixed=True) for _ in range(200)])) < jitter / 3
    perfect = mean(abs(1 / (1 + jitter * factor) - 1) for factor in JITTER)  # of a model that knows the costs
    assert model.error < 1.3 * perfect


@each_machine
def test_a_short_warm_up_is_enough_for_a_start(cost: Cost) -> None:
    machine, model = Machine(cost), StepTimeModel()
    decodes = [shape(contexts=[context] * count) for count, context in ((1, 64), (4, 512), (8, 2000), (32, 512))]
    alone = [shape([(0, rows)]) for rows in (32, 128, 512, 2048)]
    beside = [shape([(start, rows)], [512] * 4) for start, rows in ((0, 16), (0, 64), (0, 256), (0, 1024))]
    late = [shape([(4000, rows)], [512] * 4) for rows in (16, 128, 512)]
    for s in decodes + alone + beside + late:
        model.observe(s, machine.seconds(s))
    assert model.is_calibrated
    tests = [
        shape([(machine.rng.randrange(4000), machine.log_uniform(16, 2048))], [machine.log_uniform(50, 3000)] * 8)
        for _ in range(200)
    ]
    assert mean(errors_of(model, cost, tests)) < 0.04
    assert all(model.upper(s) >= cost(s) for s in tests)


def test_long_contexts_and_large_steps() -> None:
    machine, model = Machine(small_cpu), StepTimeModel()
    shapes = [machine.step(max_rows=8192, max_context=100_000) for _ in range(300)]
    for s in shapes:
        model.observe(s, machine.seconds(s))
    assert max(s.padded_rows for s in shapes) == model.largest_rows_known > 8000
    tests = [machine.step(mixed=True, max_rows=8192, max_context=100_000) for _ in range(200)]
    assert errors_of(model, small_cpu, tests)[-1] < 0.02


@each_machine
def test_ten_thousand_decode_steps_do_not_wash_out_what_is_known_of_mixed_ones(cost: Cost) -> None:
    model, machine = taught(cost, 60)
    for step in range(10_000):
        s = shape(contexts=[100 + step % 3000] * 8)
        model.observe(s, machine.seconds(s))
    for chunk in ((0, 64), (0, 512), (3000, 256), (20_000, 1024)):
        s = shape([chunk], [1000] * 8)
        assert model.predict(s) == pytest.approx(cost(s), rel=0.01)


def test_prefill_after_a_start_with_decodes_alone_is_learned_as_a_cost() -> None:
    machine, model = Machine(small_cpu), StepTimeModel()
    for step in range(500):
        s = shape(contexts=[100 + step] * (1 + step % 8))
        model.observe(s, machine.seconds(s))
    assert not model.is_calibrated
    for step in range(40):
        s = shape([(64 * step, 16 << step % 5)], [600] * 4)
        model.observe(s, machine.seconds(s))
    assert model.is_calibrated
    for s in (shape(contexts=[600] * 4), shape([(1000, 128)], [600] * 4)):
        assert model.predict(s) == pytest.approx(small_cpu(s), rel=0.01)


# ---- speed ----


@each_machine
@pytest.mark.parametrize("slowness", [2.0, 0.5, 1.3])
def test_a_lasting_change_of_speed_is_followed_within_ten_steps_and_back(cost: Cost, slowness: float) -> None:
    s = shape([(500, 256)], [400] * 6)
    soon: list[float] = []
    later: list[float] = []
    for seed in range(2):
        model, machine = taught(cost, 120, seed)
        for factor in (slowness, 1.0, slowness, 1.0):
            machine.slowness = factor
            for errors, num_steps, mixed in ((soon, 10, True), (later, 40, None)):
                machine.teach(model, num_steps, mixed=mixed)
                errors.append(abs(model.predict(s) / (cost(s) * factor) - 1))
    assert max(soon) < 0.02
    assert max(later) < 0.02


def test_decodes_alone_that_costs_do_not_fit_are_not_taken_for_another_speed() -> None:
    """As with graphs of decodes alone: beside prefill, and from the seventh stream on, all takes longer."""

    def with_graphs(s: StepShape) -> float:
        penalty = 4e-3 if s.prefill_rows else 4e-3 * (s.decode_sequences > 6)
        return rows_bound_by_memory_or_compute(s) + penalty

    model, machine = StepTimeModel(), Machine(with_graphs)
    machine.teach(model, 60)
    first_of_prompt: list[float] = []
    for prompt in range(12):
        for step in range(40):
            s = shape(contexts=[500 + step] * (6 + prompt % 2))
            model.observe(s, machine.seconds(s))
        for start in range(0, 4096, 512):
            s = shape([(start, 512)], [600] * 6)
            seconds = machine.seconds(s)
            if start <= 1024 and prompt >= 2:
                first_of_prompt.append(model.predict(s) / seconds - 1)
            model.observe(s, seconds)
    assert max(map(abs, first_of_prompt)) < 0.01


def test_a_lasting_change_makes_no_sample_stale() -> None:
    """Large steps are predicted at the new speed although only small ones have run at it."""
    model, machine = taught(small_cpu, 120)
    machine.slowness = 2.0
    for step in range(200):
        s = shape([(32 * step, 32)], contexts=[500 + step] * 6)
        model.observe(s, machine.seconds(s))
    for chunk in ((0, 256), (2000, 512), (10_000, 1024)):
        s = shape([chunk], [700] * 6)
        assert model.predict(s) == pytest.approx(2 * small_cpu(s), rel=0.03)


def test_a_lasting_change_does_not_widen_the_margin() -> None:
    model, machine = taught(small_cpu, 200)
    s = shape([(500, 256)], [400] * 6)
    before = model.margin(s)
    machine.slowness = 2.0
    machine.teach(model, 30)
    assert model.margin(s) <= before


@each_machine
def test_a_single_outlier_changes_next_to_nothing(cost: Cost) -> None:
    model, machine = taught(cost, 120)
    s = shape([(500, 256)], [400] * 6)
    before = model.predict(s)
    model.observe(s, 5 * cost(s))
    assert model.predict(s) == pytest.approx(before, rel=1e-6)
    for _ in range(40):
        machine.teach(model, 1)
        assert model.predict(s) == pytest.approx(before, rel=0.002)


def test_prefill_alone_becoming_slower_is_learned_as_a_cost() -> None:
    """No one speed explains it, so the samples have to give way: after each kind of step ran four times, they have."""

    def slower_prefill(s: StepShape) -> float:
        return small_cpu(s) + 1.6e-3 * s.prefill_rows

    kinds = [
        shape([(start, rows)] if rows else [], [context] * num_decodes)
        for rows, start, num_decodes, context in product((0, 32, 128, 512, 2048), (0, 4000), (1, 6, 24), (200, 2000))
    ]
    in_turn = [kinds[7 * place % len(kinds)] for place in range(len(kinds))]  # unlike after unlike
    model = StepTimeModel()
    for cost, rounds in ((small_cpu, 2), (slower_prefill, 4)):
        for s in in_turn * rounds:
            model.observe(s, cost(s))
    for s in (shape(contexts=[600] * 6), shape([(500, 128)], [600] * 6), shape([(5000, 512)], [600] * 6)):
        assert model.predict(s) == pytest.approx(slower_prefill(s), rel=0.01)


# ---- margins ----


@each_machine
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_margins_cover_every_mixed_step_and_come_down_to_what_untried_shapes_deserve(cost: Cost, seed: int) -> None:
    model, machine = taught(cost, 150, seed)
    for _ in range(200):
        s = machine.step(mixed=True)
        assert cost(s) <= model.upper(s)
        model.observe(s, machine.seconds(s))
    assert model.margin(shape([(500, 256)], [400] * 6)) < 1.03


@each_machine
def test_margins_are_as_wide_as_the_jitter(cost: Cost) -> None:
    s = shape([(500, 256)], [400] * 6)
    margins = []
    for jitter in (0.0, 0.05, 0.1, 0.2):
        model = taught(cost, 300, jitter=jitter)[0]
        margins.append(model.margin(s))
        assert margins[-1] >= 1 + jitter
    assert margins == sorted(margins)


def test_margins_are_wider_where_less_is_known() -> None:
    model, machine = StepTimeModel(), Machine(rows_bound_by_memory_or_compute)
    for _ in range(100):
        s = machine.step(max_rows=256, max_context=2000)
        model.observe(s, machine.seconds(s))
    near = model.margin(shape([(500, 128)], [400] * 6))
    more_rows = model.margin(shape([(500, 2 * model.largest_rows_known)], [400] * 6))
    longer_context = model.margin(shape([(100_000, 64)], [400] * 6))
    assert near < 1.1
    assert more_rows >= 2 * near  # twice the rows may take twice as long, for all that is known
    assert longer_context > 1.2 * near
    assert StepTimeModel().margin(shape([(0, 16)])) == pytest.approx(3)


# ---- what holds always ----

MODELS = [taught(cost, 80)[0] for cost in MACHINES]
figures = st.builds(
    StepShape,
    total_rows=st.integers(1, 8192),
    padded_rows=st.integers(1, 8192),
    prefill_rows=st.integers(0, 8192),
    prefill_attention=st.integers(0, 800_000_000),
    decode_sequences=st.integers(0, 1024),
    decode_context=st.integers(0, 100_000_000),
    attention_calls=st.integers(0, 17),
    logit_rows=st.integers(0, 8192),
)
FIELDS = sorted(StepShape.__dataclass_fields__)


@given(st.sampled_from(MODELS), figures, st.sampled_from(FIELDS), st.integers(1, 10_000))
def test_more_of_anything_never_takes_less(model: StepTimeModel, s: StepShape, field: str, more: int) -> None:
    larger = replace(s, **{field: getattr(s, field) + more})
    assume(bool(s.prefill_rows) == bool(larger.prefill_rows))  # speeds may differ with prefill and without
    assert 0 <= model.predict(s) <= model.predict(larger)
    assert 1 <= model.margin(s) <= WIDEST
    assert model.upper(s) == model.predict(s) * model.margin(s)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(figures, st.floats(1e-3, 20)), max_size=40))
def test_any_observations_leave_a_model_that_answers(steps: list[tuple[StepShape, float]]) -> None:
    model = StepTimeModel()
    for s, seconds in steps:
        model.observe(s, seconds)
        assert 0 <= model.predict(s) < math.inf
        assert 1 <= model.margin(s) <= WIDEST


def test_a_step_whose_parts_were_all_free_so_far_is_taken_in() -> None:
    """Samples that attention explains whole leave rows without a cost; then a step without attention runs."""
    model = StepTimeModel()
    for size in range(1, 40):
        s = StepShape(0, 0, size, 1000 * size * size, 0, 0, 0, 0)
        model.observe(s, 1e-6 * s.prefill_attention)
    bare = StepShape(1, 1, 0, 0, 1, 1, 1, 1)
    for _ in range(20):
        model.observe(bare, 0.01)
    assert model.predict(bare) > 0


def test_nothing_is_learned_from_steps_without_duration() -> None:
    model = StepTimeModel()
    for seconds in (0.0, -1.0, math.inf, math.nan):
        model.observe(shape([(0, 16)]), seconds)
    assert model.to_record() == StepTimeModel().to_record()
    assert model.predict(shape([(0, 16)])) == 0
    assert model.error == 0


def test_the_same_observations_give_the_same_model() -> None:
    assert taught(small_cpu, 200)[0].to_record() == taught(small_cpu, 200)[0].to_record()


# ---- records ----


@each_machine
def test_a_record_gives_the_model_back(cost: Cost) -> None:
    model, machine = taught(cost, 150)
    record = json.loads(json.dumps(model.to_record()))
    again = StepTimeModel.from_record(record)
    assert again.to_record() == record
    assert again.is_calibrated
    assert again.largest_rows_known == model.largest_rows_known
    assert again.error == pytest.approx(model.error)
    for _ in range(50):
        s = machine.step(mixed=True)
        assert again.predict(s) == pytest.approx(model.predict(s), rel=0.04)
        assert again.margin(s) == pytest.approx(model.margin(s), rel=0.04)


def test_a_record_is_of_the_machine_as_fast_as_it_is_now() -> None:
    model, machine = taught(small_cpu, 150)
    machine.slowness = 2.0
    machine.teach(model, 60)
    s = shape([(500, 256)], [400] * 6)
    assert StepTimeModel.from_record(model.to_record()).predict(s) == pytest.approx(2 * small_cpu(s), rel=0.01)


def test_an_empty_record_is_an_empty_model() -> None:
    assert not StepTimeModel.from_record(StepTimeModel().to_record()).is_calibrated


def test_other_versions_are_refused() -> None:
    with pytest.raises(InvalidInput, match="version 7 but expected 4"):
        StepTimeModel.from_record({"version": 7})


# ---- cost ----


def test_a_step_gives_time_for_one_candidate_and_asking_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit takes about a millisecond, between two steps: all the candidates at once would hold up a device."""
    num_fits = 0

    def counted(columns: Sequence[Vector], targets: Vector, ridge: float) -> tuple[list[float], Matrix]:
        nonlocal num_fits
        num_fits += 1
        return fit_nonnegative(columns, targets, ridge)

    monkeypatch.setattr(step_costs, "fit_nonnegative", counted)
    model, machine = taught(rows_bound_by_memory_or_compute, 100)
    fits_of_step = []
    for _ in range(320):
        s = machine.step()
        num_fits = 0
        model.predict(s)
        model.margin(s)
        assert num_fits == 0
        model.observe(s, machine.seconds(s))
        fits_of_step.append(num_fits)
    assert max(fits_of_step) == 2  # a candidate of two bounds
    assert sum(fits_of_step) > 20


def test_launched_steps_have_a_cost_of_their_own() -> None:
    """One row more than the largest graph may double a step's time; steps that replay one do not pay for that."""
    model = StepTimeModel()
    rng = random.Random(5)
    for _ in range(200):
        rows = rng.choice([64, 128, 256, 384, 512, 640, 800, 1024, 2048])
        step = replace(shape([(rng.randrange(4000), rows)]), is_launched=rows > 512)
        model.observe(step, max(0.03 * (rows > 512), 0.005 + 2e-5 * rows))
    below, above = (replace(shape([(0, rows)]), is_launched=rows > 512) for rows in (512, 520))
    assert model.predict(below) == pytest.approx(0.0152, rel=0.1)
    assert model.predict(above) > 1.4 * model.predict(below)
