"""The stall benchmarks of vLLM, without vLLM: their figures' names, and the GPU one on a fake engine."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import stall_bench
import vllm_stall_gpu
from stall_curve import table, to_json

from evenflow.bench.stall_run import ClientFigures
from evenflow.core.plan import ChunkReason
from evenflow.core.report import ChunkReport, StepReport
from evenflow.framing import frame
from evenflow.hosts.messages import HostStep

KEYS = [
    "name",
    "target_s",
    "gap_p50_s",
    "gap_p90_s",
    "gap_p99_s",
    "gap_max_s",
    "long_ttft_p50_s",
    "num_gaps",
    "total_s",
]


def point(policy: str, p99: float, ttft: float, target_s: float | None = None) -> ClientFigures:
    return ClientFigures(
        policy=policy,
        target_s=target_s,
        num_gaps=10,
        tbt_p50_s=p99 / 2,
        tbt_p90_s=p99,
        tbt_p99_s=p99,
        tbt_max_s=p99,
        long_ttft_p50_s=ttft,
        long_ttft_max_s=ttft,
        prefill_tokens_per_s=1.0,
        total_s=1.0,
        output_tokens_per_s=1.0,
    )


def test_figures_keep_their_names_in_json() -> None:
    found = to_json(point("target:50ms", 0.04, 2.0, 0.05))
    assert found.keys() >= set(KEYS)
    assert (found["name"], found["gap_p99_s"], found["target_s"]) == ("target:50ms", 0.04, 0.05)
    assert "policy" not in found


def test_a_target_is_held_against_the_curve_of_fixed_budgets() -> None:
    points = [point("fixed:64", 0.2, 9.0), point("fixed:512", 0.8, 4.0), point("default", 1.6, 3.0)]
    lines = table([*points, point("target:400ms", 0.4, 3.0, 0.4), point("target:50ms", 0.1, 9.0, 0.05)]).splitlines()
    assert lines[4].split()[-2:] == ["1.00", "0.500"]  # on logarithmic axes 6 s lie between 9 and 4
    assert lines[5].split()[-2:] == ["2.00", "outside"]


@dataclass
class FakeVllm:
    """Gives every request a token every 2 ms."""

    prompts: list[list[int]] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    on_prefill: Callable[[float], None] = lambda at: None

    async def generate(self, prompt: dict[str, list[int]], sampling: Any, request_id: str) -> AsyncIterator[Any]:
        assert request_id not in self.ids
        self.ids.add(request_id)
        self.prompts.append(prompt["prompt_token_ids"])
        if len(self.prompts[-1]) > 50:
            await asyncio.sleep(0.05)
            for at in (time.perf_counter(), time.perf_counter() + 100.0):  # while the prompt waits, and long after
                self.on_prefill(at)
            await asyncio.sleep(0.02)
        for token in range(sampling.max_tokens):
            await asyncio.sleep(0.002)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])])


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> vllm_stall_gpu.Bench:
    sampling_params = ModuleType("vllm.sampling_params")
    sampling_params.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling_params)
    monkeypatch.setattr(stall_bench, "SECONDS_TO_ABORT", 0.0)
    load = stall_bench.stall_load(4096, (3, 16), (2, 320), 0.05, 30_000)
    return vllm_stall_gpu.Bench(FakeVllm(), load, tmp_path / "mode")


def report(at: float, seconds: float) -> StepReport:
    chunk = ChunkReport("long", 0, 64, ChunkReason.LATENCY, seconds / 2, False)
    values = dict.fromkeys(StepReport._fields, 0) | {
        "admissions": [],
        "causes": (),
        "late": [],
        "policy": "target:50ms",
    }
    values |= {"target_s": None, "feasible_target_s": None, "ids": [], "tokens": [], "ended": {}, "logprobs": {}}
    values |= {"prompt_logprobs": {}, "is_own_time": True, "num_decodes": 3, "chunks": [chunk]}
    return StepReport(**values | {"at": at, "seconds": seconds, "predicted_seconds": 2 * seconds})


def test_one_run_on_the_gpu_benchmarks_engine(bench: vllm_stall_gpu.Bench) -> None:
    async def run() -> Any:
        await bench.warm_up()
        reader = asyncio.StreamReader()
        bench.engine.on_prefill = lambda at: reader.feed_data(frame(HostStep(report(at, 0.01), [], [])))
        writer: Any = SimpleNamespace(close=lambda: None)
        reading = asyncio.create_task(bench.read_reports(reader, writer))
        result = await bench.stall("target:50ms")
        reader.feed_eof()
        await reading
        return result

    figures, steps, pending = asyncio.run(run())
    assert (figures.policy, figures.target_s) == ("target:50ms", 0.05)
    assert figures.num_gaps > 10
    assert 0.05 <= figures.long_ttft_p50_s < figures.total_s
    assert (len(steps), len(pending)) == (4, 2)
    assert stall_bench.step_row(pending[0])[1:] == [0.01, 0.02, 3, [[0, 64, "latency"]], 0, True]
    assert (bench.mode_path.read_text(), os.stat(bench.mode_path).st_mtime_ns) == ("target:50ms", 1)
    assert len({tuple(prompt[:8]) for prompt in bench.engine.prompts[1:]}) == 3 + 2


def test_chats_alone_on_the_gpu_benchmarks_engine(bench: vllm_stall_gpu.Bench) -> None:
    assert 5 < asyncio.run(bench.decode_alone("fixed:512", 0.1)) < 510
