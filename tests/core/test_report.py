"""Where a step's time went: its parts add up to its seconds, and causes to the time since the step before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenflow.core.deadlines import LateToken
from evenflow.core.plan import ChunkReason, ExecutorCaps, StepShape
from evenflow.core.report import Attribution, Cause, CauseKind, ChunkReport, Ended, StepReport
from evenflow.core.step_time import StepTimeModel

CAPS = ExecutorCaps()


class Costs(StepTimeModel):
    """Knows what a step costs: by default 1 s, 2 s a decode and 0.5 s a prefill token."""

    def __init__(self, per_step: float = 1.0, per_decode: float = 2.0, per_token: float = 0.5) -> None:
        super().__init__()
        self._costs_of = (per_step, per_decode, per_token)

    def predict(self, shape: StepShape) -> float:
        per_step, per_decode, per_token = self._costs_of
        return per_step + per_decode * shape.decode_sequences + per_token * shape.prefill_rows


def shapes_of(num_decodes: int, lengths: list[int]) -> list[StepShape]:
    """The step without chunks, with the first one, with the first two, and so on."""
    return [
        CAPS.step_shape(num_decodes=num_decodes, chunks=[(0, length) for length in lengths[:count]])
        for count in range(len(lengths) + 1)
    ]


def split(
    attribution: Attribution,
    at: float,
    seconds: float,
    predicted: float,
    num_decodes: int,
    lengths: list[int],
    gc_seconds: float = 0.0,
) -> StepReport:
    chunks = [
        ChunkReport(f"c{index}", 0, length, ChunkReason.BUDGET, 0.0, gave_token=False)
        for index, length in enumerate(lengths)
    ]
    report = make_report(at=at, seconds=seconds, predicted_seconds=predicted, chunks=chunks)
    return attribution.split(report, shapes_of(num_decodes, lengths), gc_seconds)


def chunk_seconds(report: StepReport) -> list[float]:
    return [chunk.seconds for chunk in report.chunks]


def test_decodes_alone_take_the_whole_step() -> None:
    times = split(Attribution(Costs()), 10.0, 5.0, 5.0, 2, [])
    assert (times.decode_seconds, times.chunks, times.causes) == (5.0, [], (Cause(CauseKind.DECODES, 5.0),))


def test_each_chunk_takes_what_it_adds_to_the_prediction() -> None:
    times = split(Attribution(Costs()), 10.0, 16.0, 8.0, 2, [2, 4])  # predicted: 5 s, 1 s and 2 s
    assert (times.decode_seconds, chunk_seconds(times)) == (10.0, [2.0, 4.0])
    assert times.causes == (
        Cause(CauseKind.DECODES, 5.0),
        Cause(CauseKind.PREFILL, 1.0, "c0", 2),
        Cause(CauseKind.PREFILL, 2.0, "c1", 4),
        Cause(CauseKind.UNEXPLAINED, 8.0),
    )


def test_a_step_of_chunks_alone_is_all_theirs() -> None:
    times = split(Attribution(Costs()), 10.0, 4.0, 4.0, 0, [2, 4])  # predicted: 1 s, 1 s and 2 s
    assert (times.decode_seconds, chunk_seconds(times)) == (0.0, [2.0, 2.0])
    assert [cause.kind for cause in times.causes] == [CauseKind.PREFILL] * 2


def test_before_anything_is_learned_time_is_split_by_rows() -> None:
    times = split(Attribution(StepTimeModel()), 10.0, 8.0, 0.0, 2, [4, 2])
    assert (times.decode_seconds, chunk_seconds(times)) == (2.0, [4.0, 2.0])
    assert times.causes == (Cause(CauseKind.UNEXPLAINED, 8.0),)


def test_a_chunk_that_is_predicted_to_save_time_costs_nothing() -> None:
    times = split(Attribution(Costs(per_token=-0.5)), 10.0, 4.0, 4.0, 2, [2])
    assert (times.decode_seconds, chunk_seconds(times)) == (4.0, [0.0])


def test_time_between_steps_is_the_hosts() -> None:
    attribution = Attribution(Costs())
    split(attribution, 10.0, 5.0, 5.0, 2, [])
    assert split(attribution, 18.0, 5.0, 5.0, 2, []).causes == (
        Cause(CauseKind.DECODES, 5.0),
        Cause(CauseKind.HOST, 3.0),
    )


def test_a_step_that_overlapped_the_one_before_counts_from_its_end() -> None:
    attribution = Attribution(Costs())
    split(attribution, 10.0, 5.0, 5.0, 2, [])
    times = split(attribution, 13.0, 5.0, 5.0, 2, [])
    assert times.decode_seconds == 5.0
    assert times.causes == (Cause(CauseKind.DECODES, 3.0),)


@pytest.mark.parametrize(
    ("gc_seconds", "unexplained", "host", "collected"),
    [(0.0, 2.0, 3.0, 0.0), (1.5, 0.5, 3.0, 1.5), (4.0, 0.0, 1.0, 4.0), (9.0, 0.0, 0.0, 5.0)],
)
def test_garbage_collection_explains_what_nothing_else_does(
    gc_seconds: float, unexplained: float, host: float, collected: float
) -> None:
    attribution = Attribution(Costs())
    split(attribution, 10.0, 5.0, 5.0, 2, [])
    times = split(attribution, 20.0, 7.0, 5.0, 2, [], gc_seconds)
    found = {cause.kind: cause.seconds for cause in times.causes}
    assert found.pop(CauseKind.DECODES) == 5.0
    expected = {
        CauseKind.UNEXPLAINED: unexplained,
        CauseKind.HOST: host,
        CauseKind.GARBAGE_COLLECTION: collected,
    }
    assert found == {kind: seconds for kind, seconds in expected.items() if seconds}


def test_a_step_that_failed_took_no_time_of_its_own() -> None:
    attribution = Attribution(Costs())
    split(attribution, 10.0, 5.0, 5.0, 2, [])
    times = split(attribution, 12.0, 0.0, 6.0, 2, [2])
    assert (times.decode_seconds, chunk_seconds(times)) == (0.0, [0.0])
    assert times.causes == (Cause(CauseKind.HOST, 2.0),)


step_figures = st.tuples(
    st.floats(0, 10),  # between commits, beyond the step's own seconds where positive
    st.floats(0, 10),  # seconds
    st.floats(0, 10),  # predicted
    st.integers(0, 5),  # decodes
    st.lists(st.integers(1, 50), max_size=4),  # chunks
    st.floats(0, 3),  # garbage collection
)


@given(st.lists(step_figures, min_size=1, max_size=8), st.tuples(*[st.floats(0, 2)] * 3))
@example([(0.0, 1.5, 0.0, 0, [1], 0.0)], (0.0, 0.0, 5e-324))  # costs that vanish when they are multiplied
def test_parts_add_up_to_the_seconds_and_causes_to_the_time_since_the_last_step(
    steps: list[tuple[float, float, float, int, list[int], float]], costs: tuple[float, float, float]
) -> None:
    attribution, at, is_first = Attribution(Costs(*costs)), 100.0, True
    for wait, seconds, predicted, num_decodes, lengths, gc_seconds in steps:
        if not num_decodes and not lengths:
            num_decodes = 1
        before, at = at, at + wait
        times = split(attribution, at, seconds, predicted, num_decodes, lengths, gc_seconds)
        assert times.decode_seconds + sum(chunk_seconds(times)) == pytest.approx(seconds)
        assert len(chunk_seconds(times)) == len(lengths)
        assert min([times.decode_seconds, *chunk_seconds(times)]) >= 0
        assert all(cause.seconds > 0 for cause in times.causes)
        since_last = seconds if is_first else at - before
        assert sum(cause.seconds for cause in times.causes) == pytest.approx(since_last, abs=1e-9)
        is_first = False


# ---- the report ----


def make_report(**changes: Any) -> StepReport:
    report = StepReport(
        step_id=7,
        at=50.0,
        seconds=4.0,
        predicted_seconds=5.0,
        decode_seconds=3.0,
        num_decodes=2,
        chunks=[ChunkReport("c", 0, 8, ChunkReason.BUDGET, 1.0, gave_token=True)],
        admissions=[],
        causes=(Cause(CauseKind.DECODES, 1.0), Cause(CauseKind.PREFILL, 3.0, "c", 8), Cause(CauseKind.HOST, 2.0)),
        late=[],
        policy="target:50ms",
        budget=8192,
        target_s=0.05,
        feasible_target_s=None,
        num_running=3,
        num_waiting=0,
        kv_cache_usage=0.5,
        ids=["a", "b", "c"],
        tokens=[(1,), (2, 3), (4,)],
        num_decoded=2,
        ended={1: Ended("stop", None)},
    )
    return report._replace(**changes)


def test_the_causes_of_a_stall_come_largest_first_and_add_up_to_its_gap() -> None:
    stall = make_report(late=[LateToken("a", 6.0, 0.5)]).explain(LateToken("a", 6.0, 0.5))
    assert [cause.kind for cause in stall.causes] == [CauseKind.PREFILL, CauseKind.HOST, CauseKind.DECODES]
    assert sum(cause.seconds for cause in stall.causes) == stall.gap_s == 6.0
    assert (stall.step_id, stall.at, stall.request_id, stall.num_late_streams) == (7, 50.0, "a", 1)
    assert stall.late_s == 0.5


def test_steps_that_ran_without_the_stream_are_waiting_for_kv_memory() -> None:
    stall = make_report().explain(LateToken("a", 10.0, 9.0))
    assert stall.causes[0] == Cause(CauseKind.KV_MEMORY, 4.0)
    assert sum(cause.seconds for cause in stall.causes) == stall.gap_s
    assert len(stall.causes) == 4


def test_a_rounding_error_is_no_cause() -> None:
    stall = make_report().explain(LateToken("a", 6.0 + 1e-12, 0.5))
    assert CauseKind.KV_MEMORY not in {cause.kind for cause in stall.causes}


def test_the_stall_of_a_step_is_its_longest_gap() -> None:
    assert make_report().stall is None
    late = [LateToken("a", 6.0, 5.0), LateToken("b", 7.0, 0.5)]
    stall = make_report(late=late).stall
    assert stall is not None
    assert (stall.request_id, stall.gap_s, stall.num_late_streams) == ("b", 7.0, 2)


def test_what_a_report_derives() -> None:
    report = make_report()
    assert report.started_at == 46.0
    assert report.num_prefill_tokens == 8
    assert report.num_output_tokens == 4
    assert report.decoded == ["a", "b"]
    assert report.is_mixed
    assert not make_report(num_decodes=0).is_mixed
    assert not make_report(chunks=[]).is_mixed


def test_the_prediction_is_judged_where_both_figures_are_the_steps_own() -> None:
    assert make_report().prediction_error == 0.25
    assert make_report(predicted_seconds=0.0).prediction_error is None
    assert make_report(seconds=0.0).prediction_error is None
    assert make_report(is_own_time=False).prediction_error is None
