"""Every figure against what the requests themselves saw, on a clock that only the fake executor moves."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from evenflow.core.blocks import Content
from evenflow.core.request import SamplingParams
from evenflow.core.tier import TierConfig
from evenflow.server.access import Caller
from evenflow.server.metrics.distributions import RecentQuantiles
from evenflow.server.metrics.observer import (
    WINDOW_S,
    EngineState,
    Listener,
    Observer,
    ServedRequest,
    router,
)
from evenflow.server.metrics.tenants import MAX_TENANTS, OTHER_TENANTS, TenantFigures
from tests.engine.fakes import fake_engine, prepare
from tests.server.stepping import ObservedEngine, step_seconds

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "metrics.md"


class Kept(Listener):
    def __init__(self) -> None:
        self.records: list[ServedRequest] = []

    def on_request_finished(self, record: ServedRequest) -> None:
        self.records.append(record)


def test_tokens_and_requests_are_counted_as_they_were_served() -> None:
    observed = ObservedEngine("fixed:32")
    observed.add("a", 40, max_tokens=5)
    observed.add("b", 20, max_tokens=3, token=2)
    observed.run()
    assert observed.figure("vllm:prompt_tokens_total") == 60
    assert observed.figure("vllm:generation_tokens_total") == 8
    assert observed.figure("vllm:request_success_total", finished_reason="length") == 2
    assert observed.figure("vllm:request_prompt_tokens_sum") == 60
    assert observed.figure("vllm:request_generation_tokens_sum") == 8
    assert observed.figure("vllm:request_params_max_tokens_sum") == 8
    assert observed.figure("vllm:request_params_n_count") == 2
    assert observed.figure("evenflow:step_tokens_total", part="prefill") == 60
    assert observed.figure("evenflow:step_tokens_total", part="decode") == 8 - 2


def test_times_are_those_that_the_requests_felt() -> None:
    observed = ObservedEngine("fixed:32", max_num_seqs=1)
    kept = Kept()
    observed.observer.listen(kept)
    observed.add("first", 40, max_tokens=4)
    observed.add("second", 10, max_tokens=1, token=2)
    observed.run()
    chunks_s, decode_s = (0.010 + 0.032) + (0.010 + 0.008), 0.0105
    first, second = kept.records
    assert first.first_token_at == pytest.approx(chunks_s)
    assert observed.figure("vllm:time_to_first_token_seconds_sum") == pytest.approx(
        chunks_s + (chunks_s + 3 * decode_s) + 0.020
    )
    assert observed.figure("vllm:inter_token_latency_seconds_count") == 3
    assert observed.figure("vllm:inter_token_latency_seconds_sum") == pytest.approx(3 * decode_s)
    assert observed.figure("vllm:inter_token_latency_seconds_bucket", le="0.01") == 0
    assert observed.figure("vllm:inter_token_latency_seconds_bucket", le="0.025") == 3
    assert observed.figure("vllm:time_per_output_token_seconds_count") == 3
    assert observed.figure("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(decode_s)
    assert observed.figure("vllm:request_queue_time_seconds_sum") == pytest.approx(chunks_s + 3 * decode_s)
    assert observed.figure("vllm:request_prefill_time_seconds_sum") == pytest.approx(chunks_s + 0.020)
    assert observed.figure("vllm:request_decode_time_seconds_sum") == pytest.approx(3 * decode_s)
    assert observed.figure("vllm:request_inference_time_seconds_sum") == pytest.approx(chunks_s + 3 * decode_s + 0.020)
    assert observed.figure("vllm:e2e_request_latency_seconds_sum") == pytest.approx(
        second.finished_at + chunks_s + 3 * decode_s
    )
    assert [len(record.chunks) for record in kept.records] == [2, 1]


def test_steps_show_their_chunks_budget_and_predictions() -> None:
    observed = ObservedEngine("fixed:32", max_model_len=3000, num_blocks=2000)
    observed.add("chat", 10, max_tokens=200)
    for number in range(20):
        observed.add(f"prompt-{number}", 70, max_tokens=1, token=2 + number)
    events = observed.run()
    num_chunks = sum(len(event.chunks) for event in events)
    assert observed.figure("evenflow:chunk_tokens_count") == num_chunks
    assert observed.figure("evenflow:chunk_tokens_sum") == 10 + 20 * 70
    assert observed.figure("evenflow:chunks_total", reason="end_of_prompt") == 21
    assert observed.figure("evenflow:chunks_total", reason="budget") == num_chunks - 21
    assert observed.figure("evenflow:request_chunks_sum") == num_chunks
    assert observed.figure("evenflow:step_budget_use_bucket", le="1.0") == len(events)
    assert observed.figure("evenflow:step_budget_use_sum") == pytest.approx((10 + 20 * 70 + 199) / 32)
    assert observed.figure("vllm:iteration_tokens_total_count") == len(events)
    assert observed.figure("evenflow:step_seconds_sum") == pytest.approx(sum(event.seconds for event in events))
    decode_s = observed.figure("evenflow:step_part_seconds_total", part="decode")
    prefill_s = observed.figure("evenflow:step_part_seconds_total", part="prefill")
    assert decode_s is not None
    assert prefill_s is not None
    assert decode_s + prefill_s == pytest.approx(sum(event.seconds for event in events))
    assert prefill_s == pytest.approx(1.41, rel=0.2)
    errors, known = (observed.figure(f"evenflow:step_prediction_error_{part}") for part in ("sum", "count"))
    assert errors is not None
    assert known is not None
    assert known > 100
    assert errors / known < 0.05


def test_the_prefix_cache_and_preemptions() -> None:
    observed = ObservedEngine(num_blocks=9, max_num_seqs=2, max_model_len=140)
    observed.add("a", 40, max_tokens=60)
    observed.add("b", 40, max_tokens=60)
    admissions = [admission for event in observed.run() for admission in event.admissions]
    assert observed.figure("vllm:num_preemptions_total") == 1
    assert observed.figure("vllm:request_num_preemptions_sum") == 1
    assert observed.figure("vllm:prefix_cache_queries_total") == sum(a.num_tokens for a in admissions)
    assert observed.figure("vllm:prefix_cache_hits_total") == sum(a.num_cached_tokens for a in admissions)
    assert observed.figure("vllm:prompt_tokens_total") == 80
    assert observed.figure("vllm:prompt_tokens_cached_total") == 32
    assert observed.figure("vllm:prompt_tokens_by_source_total", source="local_compute") == 48
    assert observed.figure("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert observed.figure("vllm:request_prefill_kv_computed_tokens_sum") == 48
    # What was generated before the preemption is not generated again, and the gap that it made is a gap.
    assert observed.figure("vllm:generation_tokens_total") == 120
    assert observed.figure("vllm:inter_token_latency_seconds_count") == 118


def test_the_queue_is_shown_while_it_lasts() -> None:
    observed = ObservedEngine(max_num_seqs=2)
    for number in range(5):
        observed.add(f"request-{number}", 20, token=2 + number)
    event = observed.step()
    assert observed.figure("vllm:num_requests_running") == 2
    assert observed.figure("vllm:num_requests_waiting") == 3
    assert observed.figure("vllm:kv_cache_usage_perc") == event.kv_cache_usage > 0
    for number in range(5):
        observed.abort(f"request-{number}")
    assert not observed.engine.has_work
    assert observed.figure("vllm:num_requests_running") == 0
    assert observed.figure("vllm:num_requests_waiting") == 0
    assert observed.figure("vllm:kv_cache_usage_perc") == 0
    assert observed.figure("vllm:request_success_total", finished_reason="abort") == 5


def test_late_tokens_stalls_and_the_target() -> None:
    slow: list[int] = []
    observed = ObservedEngine("target:40ms", cost=lambda shape: 0.9 if slow else step_seconds(shape))
    observed.add("one", 10, max_tokens=29)
    observed.add("two", 10, max_tokens=29, token=2)
    for _ in range(20):
        observed.step()
    assert observed.figure("evenflow:tbt_target_seconds") == 0.04
    assert observed.figure("evenflow:late_tokens_total") == 0
    slow.append(1)
    observed.step()
    assert observed.figure("evenflow:late_tokens_total") == 2
    assert observed.figure("evenflow:stalls_total") == 1
    seconds = [
        observed.figure("evenflow:stall_seconds_total", cause=cause) or 0.0
        for cause in ("unexplained", "decodes", "host")
    ]
    assert sum(seconds) == pytest.approx(0.9)
    assert observed.figure("evenflow:tbt_p99_seconds") == pytest.approx(0.9, rel=0.02)
    assert observed.figure("evenflow:tbt_p50_seconds") == pytest.approx(0.011, rel=0.02)


def test_without_a_target_there_is_none_to_show() -> None:
    observed = ObservedEngine("fixed:32")
    observed.add("one", 10)
    observed.run()
    target = observed.figure("evenflow:tbt_target_seconds")
    assert target is not None
    assert math.isnan(target)


def test_made_up_tenants_share_one_label_and_displace_no_real_one() -> None:
    """Before, the first hundred names kept their labels, and a real tenant that came later had none."""
    observed = ObservedEngine()
    for number in range(MAX_TENANTS + 20):
        observed.add(f"request-{number}", 3, max_tokens=2, tenant=f"tenant-{number}" + "x" * 1000)
        observed.run()
    observed.add("real", 50, max_tokens=8, tenant="real")
    observed.run()
    for number in range(MAX_TENANTS + 20):
        observed.add(f"again-{number}", 3, max_tokens=2, tenant=f"again-{number}")
        observed.run()
    assert observed.figure("evenflow:tenant_requests_total", tenant="real", key="") == 1
    assert observed.figure("evenflow:tenant_prompt_tokens_total", tenant="real", key="") == 50
    assert observed.figure("evenflow:tenant_generation_tokens_total", tenant="real", key="") == 8
    requests = 2 * (MAX_TENANTS + 20) + 1
    others = observed.figure("evenflow:tenant_requests_total", tenant=OTHER_TENANTS, key="")
    assert others == requests - MAX_TENANTS
    observed.add("long", 3, max_tokens=2, tenant="x" * 1000)
    observed.run()
    assert observed.figure("evenflow:tenant_requests_total", tenant="x" * 64, key="") == 1


def test_a_tenants_name_cannot_harm_the_figures_of_others() -> None:
    figures = TenantFigures({})
    for number in range(MAX_TENANTS):
        figures.count("", f"tenant-{number}", 5, 5, 0.0)
    names = {
        OTHER_TENANTS: rf"\{OTHER_TENANTS}",
        "a\nb\r": r"a\nb\r",
        "\x00\x1b[2J\u2028": r"\x00\x1b[2J\u2028",
        "\ud800": r"\ud800",
        "Zoë 🙂": "Zoë 🙂",
    }
    for name in names:
        figures.count("", name, 100, 100, 0.0)
    requests = next(figures.collect())
    found = {sample.labels["tenant"]: sample.value for sample in requests.samples}
    assert {label: found[label] for label in names.values()} == dict.fromkeys(names.values(), 1)
    assert found[OTHER_TENANTS] == len(names)
    collectors = CollectorRegistry()
    collectors.register(figures)
    lines = generate_latest(collectors).decode().splitlines()
    assert all(line.startswith(("#", "evenflow:")) for line in lines)


def test_an_engine_that_dies_is_seen() -> None:
    observer = Observer("a-model")
    labels = {"model_name": "a-model", "engine": "0"}

    def read(name: str) -> float | None:
        return observer.collectors.get_sample_value(name, labels)

    assert read("evenflow:up") == 0
    observer.on_engine_state(EngineState(is_up=True, max_model_len=100, num_blocks=10, block_size=16))
    assert read("evenflow:up") == 1
    assert math.isnan(read("evenflow:tbt_target_seconds") or 0.0)
    observer.on_engine_state(EngineState(is_up=True, max_model_len=100, policy="target:70ms", target_s=0.07))
    assert read("evenflow:tbt_target_seconds") == 0.07
    observer.on_engine_state(EngineState(is_up=False))
    assert read("evenflow:up") == 0
    observer.on_engine_state(EngineState(is_up=True, num_restarts=1, max_model_len=100, num_blocks=10, block_size=16))
    assert (read("evenflow:up"), read("evenflow:engine_restarts_total")) == (1, 1)
    info = {"block_size": "16", "num_gpu_blocks": "10", "engine": "0"}
    assert observer.collectors.get_sample_value("vllm:cache_config_info", info) == 1


def test_nothing_of_a_request_is_kept_after_its_end() -> None:
    observed = ObservedEngine()
    for number in range(30):
        observed.add(f"request-{number}", 5, max_tokens=3)
    observed.step()
    observed.abort("request-3")
    observed.run()
    assert observed.observer.requests == {}
    assert observed.observer._last_token_at == {}


def test_metrics_are_served_as_text_that_prometheus_reads() -> None:
    observed = ObservedEngine()
    observed.add("a", 40)
    observed.run()
    app = FastAPI()
    admin = Caller("", "", "", is_admin=True)

    def check_key(request: Request) -> None:
        request.state.caller = admin

    app.include_router(router(observed.observer), dependencies=[Depends(check_key)])
    with TestClient(app) as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert families["vllm:generation_tokens"].type == "counter"
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    assert families["vllm:num_requests_running"].type == "gauge"
    bounds = {sample.labels["le"] for sample in families["vllm:request_prompt_tokens"].samples if "le" in sample.labels}
    assert bounds == {"1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"}


def test_quantiles_forget_what_is_long_past() -> None:
    recent = RecentQuantiles(WINDOW_S)
    assert recent.quantiles((0.5,), 0.0, WINDOW_S) == [None]
    recent.observe(5.0, 10, now=1.0)
    for second in range(2, 200):
        recent.observe(0.1, 99, now=float(second))
        recent.observe(0.3, 1, now=float(second))
    half, most = recent.quantiles((0.5, 0.995), 199.0, WINDOW_S)
    assert half == pytest.approx(0.1, rel=0.02)
    assert most == pytest.approx(0.3, rel=0.02)
    assert recent.quantiles((0.5,), 300.0, WINDOW_S) == [None]


def test_the_documentation_names_every_metric_with_its_kind() -> None:
    observed = ObservedEngine()
    documented = dict(re.findall(r"^\| `((?:vllm|evenflow):\w+)` \| (\w+) \|", DOCUMENTATION.read_text(), re.MULTILINE))
    families = [family for family in observed.observer.collectors.collect() if ":" in family.name]
    assert documented == {family.name: family.type for family in families}


def test_moves_of_kv_blocks_are_counted() -> None:
    tier = TierConfig(num_blocks=40, save_seconds=0.0, restore_seconds=0.001)
    observed = ObservedEngine("fixed:64", num_blocks=12, tier=tier)
    for number, token in enumerate((1, 2, 1)):  # the second displaces the first, which comes back
        observed.add(f"r{number}", 130, max_tokens=2, token=token)
        observed.run()
    saved, restored, lost, recomputed = (
        observed.figure("evenflow:kv_tier_blocks_total", event=event)
        for event in ("saved", "restored", "lost", "recomputed")
    )
    assert saved >= restored > 0
    assert (lost, recomputed) == (0, 0)
    assert observed.figure("evenflow:kv_tier_bytes_total", direction="out") == 16 * saved
    assert observed.figure("evenflow:kv_tier_bytes_total", direction="in") == 16 * restored
    assert observed.figure("evenflow:kv_tier_seconds_total", direction="in") == pytest.approx(0.001 * restored)
    assert observed.figure("evenflow:kv_tier_stored_blocks") == saved


def test_blocks_that_are_computed_although_they_are_stored_are_counted() -> None:
    hashes = prepare(fake_engine(), [1] * 130, SamplingParams(), "r0").block_hashes
    contents = tuple(Content(block_hash, "") for block_hash in hashes)
    tier = TierConfig(num_blocks=40, save_seconds=0.0, restore_seconds=100.0, contents=contents)
    observed = ObservedEngine("fixed:64", tier=tier)
    observed.add("r0", 130, max_tokens=2)
    observed.run()
    assert observed.figure("evenflow:kv_tier_blocks_total", event="recomputed") == len(hashes)
    assert observed.figure("evenflow:kv_tier_blocks_total", event="restored") == 0
