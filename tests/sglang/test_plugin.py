"""The plug-in on SGLang's own scheduler, batches and model, on the test's clock."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenflow.core.plan import ChunkReason
from evenflow.core.policies import PolicySpec
from evenflow.core.report import StepReport
from evenflow.hosts.policy_file import PolicyFile
from evenflow.hosts.reporter import Reporter
from evenflow.hosts.settings import Settings
from evenflow.sglang.launch import SglangLaunch
from tests.sglang.driving import CHUNK, ROW_S, STEP_S, Driver, SeenStep, request
from tests.sglang.importing import VARIABLE

pytestmark = pytest.mark.filterwarnings("ignore")

TARGET_S = 0.02
LAUNCH_S = 0.004
MOST_ROWS = int((TARGET_S - STEP_S) / ROW_S)


def stall_script() -> list[list[Any]]:
    """A stream decodes, then a long prompt arrives."""
    return [[request("stream", 20, 60)], [], [], [request("long", 1500, 3, first_token=1)]]


def steps_beside(steps: list[SeenStep], request_id: str) -> list[SeenStep]:
    return [step for step in steps if request_id in step.chunks]


def abort(request_id: str) -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=request_id)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_target_changes_steps_and_no_token(driver: Driver, overlap: bool) -> None:
    driver.steer(None)
    plain = driver.run(stall_script(), overlap=overlap)
    expected = {name: list(tokens) for name, tokens in driver.outputs.items()}
    assert [step.decodes for step in steps_beside(plain, "long")] == [[], [], []]
    driver.steer("20ms")
    driver.run(stall_script(), overlap=overlap)  # learns
    steps = driver.run(stall_script(), overlap=overlap)
    assert {name: list(tokens) for name, tokens in driver.outputs.items()} == expected
    chunked = steps_beside(steps, "long")
    assert all(step.decodes == ["stream"] for step in chunked)
    lengths = [step.num_prefill_tokens for step in chunked]
    assert MOST_ROWS / 2 < max(lengths) <= MOST_ROWS
    assert sum(lengths) == 1500
    assert driver.scheduler.chunked_prefill_size == CHUNK
    assert not driver.scheduler.is_mixed_chunk


@pytest.mark.parametrize("overlap", [True, False])
def test_reports_hold_every_token(driver: Driver, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    driver.steer("20ms")
    reports: list[Any] = []
    core = driver.scheduler.evenflow.core
    monkeypatch.setattr(core._reporter, "report", reports.append)
    driver.run(stall_script(), overlap=overlap)
    tokens: dict[str, list[int]] = {}
    for report in reports:
        for request_id, new in zip(report.ids, report.tokens, strict=True):
            tokens.setdefault(request_id, []).extend(new)
    assert tokens == {name: list(output) for name, output in driver.outputs.items()}
    assert sum(chunk.length for report in reports for chunk in report.chunks) == 1520
    assert all(report.seconds > 0 for report in reports)
    assert core.num_streams == 0


@dataclass
class End:
    """The end of a batch by the device's clock, as a CUDA event has it."""

    driver: Driver
    number: int

    def synchronize(self) -> None:
        return

    def elapsed_time(self, later: End) -> float:
        ends = self.driver.device.ends
        return 1000 * (ends[later.number] - ends[self.number])


def test_the_devices_clock_counts_where_it_has_one(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang launches a step only when the one before has ended, and looks for that one's result afterwards."""
    device = driver.device

    def record_end(self: Any) -> End:
        device.now = max(device.now, device.free_at) + LAUNCH_S
        return End(driver, len(device.ends))

    driver.steer("20ms")
    monkeypatch.setattr(type(driver.scheduler.evenflow), "_record_end", record_end)
    reports: list[Any] = []
    monkeypatch.setattr(Reporter, "report", lambda self, report: reports.append(report))
    driver.run(stall_script())
    mixed = [report for report in reports if report.is_mixed]
    assert len(mixed) > 3
    for report in mixed[1:]:  # the first follows a time without work
        num_rows = report.num_decodes + report.num_prefill_tokens
        assert report.is_own_time
        assert report.seconds == pytest.approx(LAUNCH_S + STEP_S + num_rows * ROW_S)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("target", "limits"), [("20ms", True), ("none", False)])
def test_attention_is_told_whether_a_batch_with_chunks_is_limited(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, target: str, limits: bool, overlap: bool
) -> None:
    seen: list[bool] = []
    run_batch = type(driver).run_batch

    def run(self: Driver, inner: Any, batch: Any) -> Any:
        if batch.forward_mode.is_extend():
            seen.append(self.scheduler.evenflow.limits_prefill)
        return run_batch(self, inner, batch)

    monkeypatch.setattr(type(driver), "run_batch", run)
    driver.steer(target)
    driver.run(stall_script(), overlap=overlap)
    assert set(seen) == {limits}


def test_short_prompts_pass_waiting_long_ones(driver: Driver) -> None:
    driver.steer("20ms")
    long, short = request("long", 1500, 3, first_token=1), request("short", 30, 3, first_token=2)
    steps = driver.run([[request("stream", 20, 60)], [], [long, short]])
    order = [request_id for step in steps for request_id in step.chunks]
    assert order.index("short") < order.index("long")


def test_short_prompts_pass_one_that_was_begun(driver: Driver) -> None:
    def script() -> list[list[Any]]:
        long = request("long", 6000, 3, first_token=1)  # 0.6 s, of which the last 0.2 s would not be interrupted
        shorts = [request("short", 30, 3, first_token=2), request("other", 40, 3, first_token=3)]
        return [[request("stream", 20, 60)], [], [], [long], [], shorts]

    driver.steer(None)
    driver.run(script())
    expected = {name: list(tokens) for name, tokens in driver.outputs.items()}
    driver.steer("20ms")
    driver.run(script())
    steps = driver.run(script())
    assert {name: list(tokens) for name, tokens in driver.outputs.items()} == expected
    (passing,) = steps_beside(steps, "short")
    assert passing.chunks == {"short": (0, 30), "other": (0, 40)}
    assert steps.index(passing) < steps.index(steps_beside(steps, "long")[-1])
    assert sum(step.num_prefill_tokens for step in steps_beside(steps, "long")) == 6000
    assert driver.scheduler.evenflow.core.num_streams == 0


def test_refused_requests_do_not_stop_the_prompt_begun(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    driver.steer("20ms")
    add = PrefillAdder.add_one_req

    def refuse(adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            AddReqResult.OTHER
            if req.rid == "short" and driver.scheduler.chunked_req is None
            else add(adder, req, *args, **kwargs)
        )

    driver.run(stall_script())
    monkeypatch.setattr(PrefillAdder, "add_one_req", refuse)
    long = request("long", 1500, 3, first_token=1)
    more = [[request("short", 30, 3, first_token=2)], *[[]] * 40, [abort("short")]]
    driver.scheduler.ipc_channels.send_to_tokenizer.send_output = lambda *args: None
    steps = driver.run([[request("stream", 20, 90)], [], [], [long], [], *more])
    assert sum(step.num_prefill_tokens for step in steps_beside(steps, "long")) == 1500


def test_other_orders_are_sglangs_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.scheduler, "enable_priority_scheduling", True)
    driver.steer("20ms")
    long, short = request("long", 600, 3, first_token=1), request("short", 30, 3, first_token=2)
    steps = driver.run([[request("stream", 20, 60)], [], [long, short]])
    assert next(iter(steps_beside(steps, "long")[0].chunks)) == "long"


def test_a_cached_prompt_counts_by_its_uncached_tokens(driver: Driver) -> None:
    driver.steer("20ms")
    ranks: dict[str, float] = {}
    core = driver.scheduler.evenflow.core
    add = core.add

    def keep(new: Any) -> None:
        add(new)
        ranks[new.id] = core.planner.requests[new.id].rank[0] - new.arrival_time
        if new.id == "again":
            assert new.num_cached_tokens == 799

    core.add = keep
    first = [[request("first", 800, 2, first_token=7)], *[[]] * 30]
    steps = driver.run([*first, [request("again", 800, 2, first_token=7), request("other", 300, 2, first_token=8)]])
    assert steps_beside(steps, "again")[0].chunks["again"] == (799, 1)
    assert ranks["again"] < ranks["other"]


def test_aborted_requests_are_forgotten(driver: Driver) -> None:
    driver.steer("20ms")
    waiting = request("waiting", 800, 3, first_token=2)
    script = [*stall_script(), [waiting], [], [abort("waiting")], [], [abort("long")]]
    driver.scheduler.ipc_channels.send_to_tokenizer.send_output = lambda *args: None
    steps = driver.run(script)
    assert not steps_beside(steps, "waiting")
    assert sum(step.num_prefill_tokens for step in steps_beside(steps, "long")) < 1500
    assert driver.scheduler.evenflow.core.num_streams == 0


def test_prefill_and_decodes_alternate_where_sglang_cannot_mix(driver: Driver) -> None:
    driver.steer("20ms")
    script = stall_script()
    script[-1] = [request("long", 1500, 3, first_token=1, return_logprob=True)]
    steps = driver.run(script)
    first = next(index for index, step in enumerate(steps) if "long" in step.chunks)
    during = steps[first : first + 8]
    assert [bool(step.chunks) for step in during] == [True, False] * 4
    assert [step.decodes for step in during] == [[], ["stream"]] * 4


def test_chunks_are_whole_pages(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a target that leaves room for less than a page, a prompt must still be started."""
    monkeypatch.setattr(driver.scheduler, "page_size", 64)
    driver.steer("3ms")
    steps = driver.run(stall_script())
    assert sum(step.num_prefill_tokens for step in steps_beside(steps, "long")) == 1500


def test_a_written_target_is_followed(driver: Driver, tmp_path: Path) -> None:
    driver.steer("20ms")
    from evenflow.sglang.steering import make_steering

    path = tmp_path / "target"
    settings = Settings(PolicySpec.parse("target:20ms"), None, str(path))
    driver.scheduler.evenflow = make_steering(driver.scheduler, settings)
    PolicyFile(path).write(None)
    steps = driver.run(stall_script())
    assert [step.num_prefill_tokens for step in steps_beside(steps, "long")] == [512, 512, 476]  # SGLang's own


@pytest.mark.parametrize(
    ("chunk", "is_mixed", "policy", "lengths"),
    [
        (None, False, "unchunked", [1500]),
        (512, True, "fixed:512", [511, 511, 478]),
        (512, False, "none", [512, 512, 476]),
    ],
)
def test_without_a_target_steps_are_sglangs_own_and_reported(
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int | None,
    is_mixed: bool,
    policy: str,
    lengths: list[int],
) -> None:
    monkeypatch.setattr(driver.scheduler, "chunked_prefill_size", chunk)
    monkeypatch.setattr(driver.scheduler, "is_mixed_chunk", is_mixed)
    driver.steer("none")
    reports: list[StepReport] = []
    monkeypatch.setattr(driver.scheduler.evenflow.core._reporter, "report", reports.append)
    steps = driver.run(stall_script())
    found = [chunk for report in reports for chunk in report.chunks if chunk.request_id == "long"]
    assert found[-1].reason == ChunkReason.END_OF_PROMPT
    assert all(chunk.reason == ChunkReason.BUDGET for chunk in found[:-1])
    assert (
        [chunk.length for chunk in found]
        == lengths
        == [step.num_prefill_tokens for step in steps_beside(steps, "long")]
    )
    assert {(report.policy, report.target_s) for report in reports} == {(policy, None)}


def test_a_target_is_not_kept_where_prompts_are_not_cut(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(driver.scheduler, "chunked_prefill_size", None)
    driver.steer("3ms")
    steps = driver.run(stall_script())
    assert [step.num_prefill_tokens for step in steps_beside(steps, "long")] == [1500]
    assert logged == ["evenflow: no latency target is kept: chunked prefill is off"]


def test_a_requests_own_target_counts(driver: Driver) -> None:
    driver.steer("50ms")
    script = stall_script()
    script[0] = [request("stream", 20, 120, custom_params={"tbt_target": 0.01})]
    driver.run(script)
    steps = driver.run(script)
    assert max(step.num_prefill_tokens for step in steps_beside(steps, "long")) <= (0.01 - STEP_S) / ROW_S


def test_every_rank_does_what_the_first_decides(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenflow.sglang import steering

    def script() -> list[list[Any]]:
        return [*stall_script(), [request("b", 400, 3, first_token=2), request("c", 30, 3, first_token=3)]]

    sent: list[Any] = []

    def send(data: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        sent.append(data[0])
        return data

    monkeypatch.setattr(steering, "broadcast_pyobj", send)
    monkeypatch.setattr(steering.versions, "tp_size", lambda: 2)
    driver.steer("20ms")
    steps = driver.run(script())
    decided = iter(sent)
    monkeypatch.setattr(steering, "broadcast_pyobj", lambda data, *args, **kwargs: [next(decided)])
    driver.scheduler.evenflow = steering._Follower(driver.scheduler)
    assert driver.run(script()) == steps
    assert next(decided, None) is None


@pytest.mark.parametrize(
    ("of_scheduler", "name", "value", "reason"),
    [
        (True, "spec_algorithm", SimpleNamespace(is_none=lambda: False), "speculative decoding"),
        (True, "truncation_align_size", 4096, "--enable-deterministic-inference"),
        (False, "pp_size", 2, "pipeline"),
        (False, "enable_dp_attention", True, "--enable-dp-attention"),
        (False, "disaggregation_mode", "prefill", "--disaggregation-mode"),
        (False, "attention_backend", "dual_chunk_flash_attn", "attention backend"),
        (False, "dsa_prefill_backend", "flashmla_sparse_q8", "--dsa-prefill-backend"),
        (False, "enable_encoder_swa_bounded_replay", True, "--enable-encoder-swa-bounded-replay"),
        (False, "enable_cp_tp_group_sharing", True, "--enable-cp-tp-group-sharing"),
    ],
)
def test_settings_that_cannot_be_steered_are_left_alone(
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
    of_scheduler: bool,
    name: str,
    value: Any,
    reason: str,
) -> None:
    from evenflow.sglang import versions
    from evenflow.sglang.steering import make_steering

    setting = versions.setting
    if of_scheduler:
        monkeypatch.setitem(vars(driver.scheduler), name, value)
    else:
        monkeypatch.setattr(versions, "setting", lambda wanted: value if wanted == name else setting(wanted))
    assert make_steering(driver.scheduler, Settings(PolicySpec.parse("target:20ms"), None, None)) is None
    assert len(logged) == 1
    assert reason in logged[0]


def test_piecewise_graphs_are_mixed_only_where_sglang_does(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenflow.sglang import steering, versions

    setting, graphs = versions.setting, SimpleNamespace(prefill=SimpleNamespace(backend="tc_piecewise"))
    monkeypatch.setattr(versions, "setting", lambda name: graphs if name == "cuda_graph_config" else setting(name))
    why: list[str | None] = []
    for version in ("0.5.18", "0.5.19"):
        monkeypatch.setattr(versions.sglang, "__version__", version)
        why.append(steering._why_not(driver.scheduler))
    assert why == [None, "--cuda-graph-backend-prefill is not `breakable`"]


def test_settings_are_those_that_sglang_resolved(driver: Driver) -> None:
    """The test names neither."""
    from evenflow.sglang.versions import setting

    assert setting("cuda_graph_config").decode.backend == "disabled"
    assert setting("dtype") == "auto"
    assert setting("no_such_argument") is None


@pytest.mark.parametrize("overlap", [True, False])
def test_intervals_between_prefills_do_not_hold_back_chunks(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """SGLang has them since 0.5.19."""
    scheduler = driver.scheduler
    if not hasattr(scheduler, "prefill_decode_interval"):
        pytest.skip("this SGLang has no --prefill-decode-interval")
    monkeypatch.setattr(scheduler, "prefill_decode_interval", 10)
    monkeypatch.setattr(scheduler, "prefill_decode_interval_min_bs", 0, raising=False)
    between: dict[str, int] = {}
    for target in ("none", "20ms"):
        driver.steer(target)
        steps = driver.run(stall_script(), overlap=overlap)
        first, second = [number for number, step in enumerate(steps) if "long" in step.chunks][:2]
        between[target] = second - first - 1
    assert between == {"none": 10, "20ms": 0}


def test_few_free_slots_do_not_hold_back_prompts(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    delayer = SimpleNamespace(should_delay=lambda *, running_bs, num_allocatable_reqs: running_bs > 0)
    monkeypatch.setattr(driver.scheduler, "min_free_slots_delayer", delayer)
    began: dict[str, bool] = {}
    for target in ("none", "20ms"):
        driver.steer(target)
        steps = driver.run(stall_script())
        began[target] = bool(steps_beside(steps, "long")[0].decodes)
    assert began == {"none": False, "20ms": True}
    assert driver.scheduler.min_free_slots_delayer is delayer


def test_step_times_are_kept_when_idle(driver: Driver, tmp_path: Path) -> None:
    driver.steer("20ms")
    driver.run(stall_script())
    driver.run(stall_script())
    assert list((tmp_path / "cache" / "step-times").iterdir())


def test_every_number_of_logit_rows_is_computed_before_the_first_request(
    driver: Driver, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGLang's own output layer, on a device that computes shapes alone."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    from evenflow.sglang.hooks import warm_up_output_layer

    processor = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.use_fp32_lm_head, processor.rl_on_policy_target = False, None
    shapes = []
    compute = processor._compute_lm_head

    def keep(*args: Any) -> Any:
        shapes.append(tuple(compute(*args).shape))

    monkeypatch.setattr(processor, "_compute_lm_head", keep)
    layer = SimpleNamespace(weight=torch.empty(512, 64, device="meta"))
    runner = SimpleNamespace(device="meta", dtype=torch.float32)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        max_running_requests=20,
        model_config=SimpleNamespace(hidden_size=64),
    )
    runner.model = SimpleNamespace(logits_processor=processor, lm_head=layer)
    warm_up_output_layer(scheduler)
    assert shapes == [(size, 512) for size in range(20, 0, -1)]
    assert any("logits of 20 batch sizes" in line for line in logged)
    runner.model = SimpleNamespace()  # of other names: nothing to do
    warm_up_output_layer(scheduler)
    assert len(shapes) == 20


def test_sglangs_server_has_the_route_that_is_called_after_the_warm_up() -> None:
    server = Path(os.environ[VARIABLE]) / "sglang" / "srt" / "entrypoints" / "http_server.py"
    assert f'"{SglangLaunch.settle_path}", methods=["GET", "POST"]' in server.read_text()


def test_another_interface_is_refused_in_one_line(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    from evenflow.sglang.plugin import load

    monkeypatch.setenv("EVENFLOW_TBT_TARGET", "50ms")
    monkeypatch.delattr(Scheduler, "get_num_allocatable_reqs")
    with pytest.raises(SystemExit, match=r"relies on: Scheduler.get_num_allocatable_reqs\(running_bs\)"):
        load()


def test_a_wrong_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenflow.sglang.plugin import load

    monkeypatch.setenv("EVENFLOW_TBT_TARGET", "soon")
    with pytest.raises(SystemExit, match="expected a duration such as 50ms"):
        load()


def test_without_a_target_sglang_is_left_alone(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    from evenflow.sglang.plugin import load

    monkeypatch.delenv("EVENFLOW_TBT_TARGET", raising=False)
    load()
    assert logged == ["evenflow: no latency target is kept: set EVENFLOW_TBT_TARGET, such as EVENFLOW_TBT_TARGET=50ms"]
