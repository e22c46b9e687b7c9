"""The model against machines whose true costs are known: it comes near them, and jitter averages out."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import mean
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evenflow.core import step_costs
from evenflow.core.least_squares import Vector, fit_nonnegative
from evenflow.core.plan import StepShape
from evenflow.core.step_costs import NUM_FIGURES, Sample, StepCosts, figures_of
from evenflow.core.step_time import StepTimeModel
from evenflow.errors import InvalidInput

Cost = Callable[[StepShape], float]
JITTER = (0.0, 1.0, -1.0, 0.5, -0.5)  # in turn: adds up to nothing, and no step is like the one before
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
    rows = 2e-5 * s.padded_rows + 5e-5 * s.decode_sequences + 1e-5 * s.logit_rows
    return 1e-3 + rows + 2e-9 * s.prefill_attention + 2e-8 * s.decode_context + 2e-4 * s.attention_calls


def bound_by_memory_or_compute(s: StepShape) -> float:
    """8B on a GPU: weights are read once, or rows are multiplied; attention comes on top."""
    attention = 1.3e-9 * s.prefill_attention + 4e-8 * s.decode_context + 2e-5 * s.attention_calls
    return 1e-3 + max(5e-3, 2.7e-5 * s.padded_rows) + attention


def small_cpu(s: StepShape) -> float:
    """60 ms to 20 s: bound by compute from 25 rows on."""
    attention = 3e-7 * s.prefill_attention + 2e-7 * s.decode_context + 1e-3 * s.attention_calls
    return 0.02 + max(0.04, 1.6e-3 * s.padded_rows) + attention + 2e-4 * s.logit_rows


MACHINES = [sum_of_costs, bound_by_memory_or_compute, small_cpu]
each_machine = pytest.mark.parametrize("cost", MACHINES)
# What a data sheet would say of `bound_by_memory_or_compute`: 20% too fast, and nothing of its overheads.
DATA_SHEET = StepCosts(step=4e-3, row=2.2e-5, attention=1e-9, context=3.2e-8, knee=180)
A_MIXED_STEP = shape([(500, 256)], [400] * 6)


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
    cost: Cost,
    num_steps: int = 60,
    seed: int = 0,
    *,
    is_padded: bool = False,
    jitter: float = 0.0,
    prior: StepCosts | None = None,
) -> tuple[StepTimeModel, Machine]:
    model, machine = StepTimeModel(prior), Machine(cost, seed, is_padded=is_padded, jitter=jitter)
    machine.teach(model, num_steps)
    return model, machine


def errors_of(model: StepTimeModel, machine: Machine, num_steps: int = 200) -> list[float]:
    """|predicted - true| / true of further mixed steps, in ascending order."""
    steps = (machine.step(mixed=True) for _ in range(num_steps))
    return sorted(abs(model.predict(s) / machine.cost(s) - 1) for s in steps)


# ---- accuracy ----


@each_machine
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(("num_steps", "most"), [(60, 0.08), (120, 0.05)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mixed_steps_are_predicted(cost: Cost, is_padded: bool, num_steps: int, most: float, seed: int) -> None:
    assert mean(errors_of(*taught(cost, num_steps, seed, is_padded=is_padded))) < most


@each_machine
def test_after_hundreds_of_steps_few_predictions_are_far_off(cost: Cost) -> None:
    model, machine = taught(cost, 600)
    assert model.error < 0.02
    assert errors_of(model, machine)[190] < 0.06


@each_machine
@pytest.mark.parametrize("jitter", [0.05, 0.15])
def test_jitter_averages_out_of_the_costs_and_is_what_remains_as_error(cost: Cost, jitter: float) -> None:
    model, machine = taught(cost, 600, jitter=jitter)
    assert mean(errors_of(model, machine)) < max(0.03, jitter / 3)
    perfect = mean(abs(1 / (1 + jitter * factor) - 1) for factor in JITTER)  # of a model that knows the costs
    assert perfect / 2 < model.error < 1.3 * perfect


def test_large_steps_and_long_contexts() -> None:
    machine, model = Machine(small_cpu), StepTimeModel()
    shapes = [machine.step(max_rows=8192, max_context=100_000) for _ in range(300)]
    for s in shapes:
        model.observe(s, machine.seconds(s))
    assert max(s.padded_rows for s in shapes) == model.largest_rows_known > 8000
    for s in (machine.step(mixed=True, max_rows=8192, max_context=100_000) for _ in range(200)):
        assert model.predict(s) == pytest.approx(small_cpu(s), rel=0.05)


@each_machine
def test_ten_thousand_decode_steps_do_not_wash_out_what_is_known_of_prefill(cost: Cost) -> None:
    model, machine = taught(cost, 60)
    for step in range(10_000):
        s = shape(contexts=[100 + step % 3000] * 8)
        model.observe(s, machine.seconds(s))
    for chunk in ((0, 64), (0, 512), (3000, 256), (20_000, 1024)):
        s = shape([chunk], [1000] * 8)
        assert model.predict(s) == pytest.approx(cost(s), rel=0.1)


def test_prefill_after_a_start_with_decodes_alone_is_learned() -> None:
    machine, model = Machine(small_cpu), StepTimeModel()
    for step in range(500):
        s = shape(contexts=[100 + step] * (1 + step % 8))
        model.observe(s, machine.seconds(s))
    assert not model.is_calibrated
    for step in range(80):  # a fit tries one knee
        s = shape([(64 * step, 16 << step % 5)], [600] * 4)
        model.observe(s, machine.seconds(s))
    assert model.is_calibrated
    for s in (shape(contexts=[600] * 4), shape([(1000, 128)], [600] * 4)):
        assert model.predict(s) == pytest.approx(small_cpu(s), rel=0.05)


# ---- steps that the host launches op by op ----


def launched(start: int, rows: int) -> StepShape:
    return shape([(start, rows)])._replace(is_launched=rows > 512)


def device_that_waits_for_its_host(rows: int, launch: float) -> float:
    return max(0.005 + 2e-5 * rows, launch if rows > 512 else 0.0)


def taught_launches(
    model: StepTimeModel, choices: Sequence[int], launch: float, num_steps: int, together: int = 1
) -> None:
    rng = random.Random(5)
    for _ in range(num_steps):
        rows = [rng.choice(choices) for _ in range(together)]
        shapes = [launched(rng.randrange(4000), number) for number in rows]
        launches = [launch if one.is_launched else 0.002 for one in shapes]
        for one, seconds in zip(shapes, launches, strict=True):
            model.observe_launch(one, seconds)
        model.observe(shapes, sum(device_that_waits_for_its_host(number, launch) for number in rows), launches)


def test_a_launched_step_takes_no_less_than_its_launch() -> None:
    """One row more than the largest graph may double a step's time, which many more rows then do not add to."""
    model = StepTimeModel()
    taught_launches(model, [64, 128, 256, 384, 512, 640, 800, 1024, 1600, 2048], 0.03, 200)
    for rows, seconds in ((512, 0.0152), (520, 0.03), (1200, 0.03), (1800, 0.041), (3000, 0.065)):
        assert model.predict(launched(0, rows)) == pytest.approx(seconds, rel=0.05), rows


@pytest.mark.parametrize("together", [1, 4])
def test_a_host_that_becomes_slow_is_not_taken_for_a_slow_device(together: int) -> None:
    """Steps of any size take as long as their launches then; graphs and much larger steps take what they took."""
    model = StepTimeModel(StepCosts(step=0.005, row=2e-5, launch=0.025))
    taught_launches(model, [64, 256, 512, 1600, 2048], 0.025, 40)
    taught_launches(model, range(600, 1600), 0.044, 60, together)
    for rows, seconds in ((512, 0.0152), (520, 0.044), (1600, 0.044), (2500, 0.055), (4000, 0.085)):
        assert model.predict(launched(0, rows)) == pytest.approx(seconds, rel=0.06), rows


def test_a_device_that_becomes_slow_is_not_taken_for_its_host() -> None:
    model = StepTimeModel()
    taught_launches(model, [64, 256, 512, 1024, 2048], 0.03, 60)
    for _ in range(8):
        step = launched(0, 1024)
        model.observe_launch(step, 0.03)
        model.observe(step, 2 * device_that_waits_for_its_host(1024, 0.0), [0.03])
    assert model.predict(launched(0, 1024)) == pytest.approx(0.051, rel=0.05)


# ---- steps that are known only together ----


@pytest.mark.parametrize("together", [2, 4])
@each_machine
def test_steps_timed_together_teach_the_same_costs(cost: Cost, together: int) -> None:
    model, machine = StepTimeModel(), Machine(cost)
    for _ in range(120):
        shapes = [machine.step() for _ in range(together)]
        model.observe(shapes, sum(map(machine.seconds, shapes)))
    assert mean(errors_of(model, machine)) < 0.05


def test_short_steps_timed_together_are_not_long_ones() -> None:
    """The margin is that of longer steps: if these are as predicted, errors of short ones do not matter."""
    model = taught(small_cpu, 120)[0]
    short, long = shape([(0, 64)], [600] * 4), shape([(0, 128)], [600] * 4)
    for step in range(64):
        model.observe(long, small_cpu(long))
        model.observe([short] * 4, 4 * small_cpu(short) * (1.5 if step % 2 else 0.7))
    assert 4 * small_cpu(short) > small_cpu(long)
    assert model.margin(long) < 1.2


def test_a_wide_margin_narrows_although_it_makes_steps_shorter() -> None:
    """After a bad start the longest steps remain the oldest, until no error of theirs is kept."""
    model = StepTimeModel()
    long, shorter = shape([(0, 128)], [600] * 4), shape([(0, 80)], [600] * 4)
    for step in range(40):
        model.observe(long, small_cpu(long) * (1.6 if step % 4 == 3 else 1.0))
    assert model.margin(shorter) > 1.3
    for _ in range(128):
        model.observe(shorter, small_cpu(shorter))
    assert model.margin(shorter) < 1.1


def test_a_step_alone_is_an_observation_of_one() -> None:
    apart, alone = StepTimeModel(), StepTimeModel()
    machine = Machine(small_cpu)
    for _ in range(40):
        s = machine.step()
        apart.observe(s, small_cpu(s))
        alone.observe([s], small_cpu(s))
    assert apart.to_record() == alone.to_record()
    assert apart.predict(A_MIXED_STEP) == alone.predict(A_MIXED_STEP) > 0


# ---- a prior ----


def test_a_prior_answers_at_once_and_the_first_steps_pull_it_in() -> None:
    model = StepTimeModel(DATA_SHEET)
    first = bound_by_memory_or_compute(A_MIXED_STEP) / model.predict(A_MIXED_STEP)
    assert 1.1 < first < 1.5
    assert not model.is_calibrated
    for _ in range(3):
        model.observe(A_MIXED_STEP, bound_by_memory_or_compute(A_MIXED_STEP))
    assert model.predict(A_MIXED_STEP) == pytest.approx(bound_by_memory_or_compute(A_MIXED_STEP), rel=0.02)


def test_a_first_step_that_is_small_and_slow_says_little_of_large_ones() -> None:
    """Kernels are loaded at their first use: a prompt of 8 tokens took three times as long as it should."""
    model, large = StepTimeModel(DATA_SHEET), shape([(0, 1024)])
    before = model.predict(large)
    for small in (shape([(0, 8)]), shape(contexts=[9])):
        model.observe(small, 3 * model.predict(small))
        assert model.predict(large) < 2.5 * before
    assert model.predict(shape([(0, 8)])) > 2 * StepTimeModel(DATA_SHEET).predict(shape([(0, 8)]))


def test_first_steps_that_are_small_do_not_make_larger_ones_free() -> None:
    """Up to 512 rows, all took the same. A knee of 512 fits that as well as any beyond."""
    samples = [Sample((figures_of(shape([(0, rows)])),), 0.008) for rows in (200, 300, 400, 512)]
    for knees in ((DATA_SHEET.knee, 2048), (DATA_SHEET.knee, 512), (DATA_SHEET.knee, 512, 2048)):
        fitted = step_costs.fit_costs(samples, DATA_SHEET, DATA_SHEET, knees)
        assert fitted.knee <= 512
        assert fitted.seconds(figures_of(shape([(0, 2000)]))) > 0.6 * DATA_SHEET.seconds(figures_of(shape([(0, 2000)])))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_good_prior_makes_the_start_better_and_the_end_no_worse(seed: int) -> None:
    def error(num_steps: int, prior: StepCosts | None) -> float:
        return mean(errors_of(*taught(bound_by_memory_or_compute, num_steps, seed, prior=prior)))

    assert error(3, DATA_SHEET) < 0.7 * error(3, None)
    assert error(120, DATA_SHEET) < 0.04


def test_a_prior_that_is_wrong_gives_way() -> None:
    wrong = StepCosts(*(10 * cost for cost in DATA_SHEET[:NUM_FIGURES]), knee=16)
    assert mean(errors_of(*taught(bound_by_memory_or_compute, 120, prior=wrong))) < 0.1


# ---- speed ----


@each_machine
@pytest.mark.parametrize("slowness", [2.0, 0.5, 1.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_lasting_change_of_speed_is_followed_within_ten_steps_and_back(
    cost: Cost, slowness: float, seed: int
) -> None:
    model, machine = taught(cost, 120, seed)
    for factor in (slowness, 1.0):
        machine.slowness = factor
        for num_steps, mixed in ((10, True), (40, None)):
            machine.teach(model, num_steps, mixed=mixed)
            assert model.predict(A_MIXED_STEP) == pytest.approx(factor * cost(A_MIXED_STEP), rel=0.1)


def test_prefill_that_becomes_slower_alone_has_its_own_speed() -> None:
    model = taught(small_cpu, 120)[0]
    decodes = shape(contexts=[600] * 6)
    for step in range(20):
        mixed = shape([(64 * step, 64 << step % 3)], [600] * 6)
        model.observe(mixed, 1.5 * small_cpu(mixed))
        model.observe(decodes, small_cpu(decodes))
    assert model.predict(A_MIXED_STEP) == pytest.approx(1.5 * small_cpu(A_MIXED_STEP), rel=0.1)
    assert model.predict(decodes) == pytest.approx(small_cpu(decodes), rel=0.02)


def test_large_steps_follow_a_lasting_change_that_only_small_ones_have_shown() -> None:
    model, machine = taught(small_cpu, 120)
    machine.slowness = 2.0
    for step in range(100):
        for s in (shape([(32 * step, 32)], contexts=[500 + step] * 6), shape(contexts=[500 + step] * 6)):
            model.observe(s, machine.seconds(s))
    for chunk in ((0, 256), (2000, 512), (10_000, 1024)):
        s = shape([chunk], [700] * 6)
        assert model.predict(s) == pytest.approx(2 * small_cpu(s), rel=0.1)


@each_machine
def test_a_single_outlier_matters_little(cost: Cost) -> None:
    model, machine = taught(cost, 120)
    undisturbed, _ = taught(cost, 120)
    model.observe(A_MIXED_STEP, 5 * cost(A_MIXED_STEP))
    for _ in range(40):
        s = machine.step()
        assert model.predict(A_MIXED_STEP) == pytest.approx(undisturbed.predict(A_MIXED_STEP), rel=0.08)
        model.observe(s, cost(s))
        undisturbed.observe(s, cost(s))


# ---- margins ----


@each_machine
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_margins_cover_most_mixed_steps_and_come_down(cost: Cost, jitter: float) -> None:
    model, machine = taught(cost, 150, jitter=jitter)
    num_over = 0
    for _ in range(300):
        s = machine.step(mixed=True)
        seconds = machine.seconds(s)
        num_over += seconds > model.upper(s)
        model.observe(s, seconds)
    assert num_over <= 0.08 * 300
    assert model.margin(A_MIXED_STEP) < 1.04 + 2 * jitter


@each_machine
def test_margins_are_as_wide_as_the_jitter(cost: Cost) -> None:
    margins = []
    for jitter in (0.0, 0.05, 0.1, 0.2):
        margins.append(taught(cost, 300, jitter=jitter)[0].margin(A_MIXED_STEP))
        assert margins[-1] >= 1 + jitter
    assert margins == sorted(margins)


def test_margins_are_wider_before_anything_is_known_and_beyond_the_rows_known() -> None:
    model = StepTimeModel()
    untried = model.margin(A_MIXED_STEP)
    machine = Machine(small_cpu)
    for _ in range(100):
        s = machine.step(max_rows=256, max_context=2000)
        model.observe(s, machine.seconds(s))
    near = model.margin(shape([(500, 128)], [400] * 6))
    assert near < 0.8 * untried
    # Twice the rows may take twice as long, for all that is known.
    assert model.margin(shape([(500, 2 * model.largest_rows_known)])) == pytest.approx(2 * near)
    assert StepTimeModel(DATA_SHEET).margin(shape([(0, 8192)])) == untried  # a prior knows all rows, but not well


def test_margins_come_from_the_longer_steps() -> None:
    """Short steps that are hard to predict are far from any target."""
    model = taught(small_cpu, 200)[0]
    for step in range(120):
        short, long = shape([(0, 16)], [400]), shape([(500, 512)], [400] * 6)
        model.observe(short, small_cpu(short) * (1.5 if step % 4 == 0 else 1.0))
        model.observe(long, small_cpu(long))
    assert model.margin(A_MIXED_STEP) < 1.1


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
FIELDS = sorted(StepShape._fields)


@given(st.sampled_from(MODELS), figures, st.sampled_from(FIELDS), st.integers(1, 10_000))
def test_more_of_anything_never_takes_less(model: StepTimeModel, s: StepShape, field: str, more: int) -> None:
    larger = s._replace(**{field: getattr(s, field) + more})
    assume(bool(s.prefill_rows) == bool(larger.prefill_rows))  # speeds may differ with prefill and without
    assert 0 <= model.predict(s) <= model.predict(larger)
    assert 1 <= model.margin(s) < math.inf
    assert model.upper(s) == model.predict(s) * model.margin(s)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(figures, st.floats(1e-3, 20)), max_size=40))
def test_any_observations_leave_a_model_that_answers(steps: list[tuple[StepShape, float]]) -> None:
    model = StepTimeModel()
    for s, seconds in steps:
        model.observe(s, seconds)
        assert 0 <= model.predict(s) < math.inf
        assert 1 <= model.margin(s) < math.inf


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
    assert json.loads(json.dumps(again.to_record())) == record
    assert again.is_calibrated
    assert again.largest_rows_known == model.largest_rows_known
    assert again.error == pytest.approx(model.error)
    for s in (machine.step(mixed=True) for _ in range(50)):
        assert again.predict(s) == pytest.approx(model.predict(s), rel=0.08)
        assert again.margin(s) == pytest.approx(model.margin(s))


def test_a_record_of_steps_timed_together_is_read_back() -> None:
    model, machine = StepTimeModel(), Machine(small_cpu)
    for _ in range(60):
        shapes = [machine.step(), machine.step()]
        model.observe(shapes, sum(map(small_cpu, shapes)))
    again = StepTimeModel.from_record(json.loads(json.dumps(model.to_record())))
    assert again.predict(A_MIXED_STEP) == pytest.approx(small_cpu(A_MIXED_STEP), rel=0.08)


def test_the_first_steps_correct_a_record_of_a_machine_that_was_faster() -> None:
    model, machine = taught(small_cpu, 150)
    again = StepTimeModel.from_record(model.to_record())
    machine.slowness = 2.0
    machine.teach(again, 3, mixed=True)
    assert again.predict(A_MIXED_STEP) == pytest.approx(2 * small_cpu(A_MIXED_STEP), rel=0.05)


def test_an_empty_record_leaves_the_prior() -> None:
    empty = StepTimeModel().to_record()
    assert not StepTimeModel.from_record(empty).is_calibrated
    with_prior = StepTimeModel.from_record(empty, DATA_SHEET)
    assert with_prior.predict(A_MIXED_STEP) == StepTimeModel(DATA_SHEET).predict(A_MIXED_STEP)


def test_other_versions_are_refused() -> None:
    with pytest.raises(InvalidInput, match="version 7 but expected 8"):
        StepTimeModel.from_record({"version": 7})


# ---- cost ----


def test_a_step_gives_time_for_two_fits_and_asking_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit takes about a millisecond, between two steps: all the candidates at once would hold up a device."""
    num_fits = 0

    def counted(columns: Sequence[Vector], *args: Any) -> list[float]:
        nonlocal num_fits
        num_fits += 1
        return fit_nonnegative(columns, *args)

    monkeypatch.setattr(step_costs, "fit_nonnegative", counted)
    model, machine = taught(bound_by_memory_or_compute, 100)
    fits_of_step, num_prefills = [], 0
    for _ in range(320):
        s = machine.step()
        num_prefills += s.prefill_rows > 0
        num_fits = 0
        model.predict(s)
        model.margin(s)
        assert num_fits == 0
        model.observe(s, machine.seconds(s))
        fits_of_step.append(num_fits)
    assert max(fits_of_step) == 2  # the knee in use and another
    assert sum(fits_of_step) == pytest.approx(2 * num_prefills / 8, abs=2)  # decodes alone spare no time for them
