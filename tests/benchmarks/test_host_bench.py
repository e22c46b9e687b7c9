"""The benchmarks of host engines without the engines: loads and modes on fake ones."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import host_bench
import mode_file
import pytest
import sglang_loads
import switchable_sglang
import vllm_loads
from named_loads import NamedLoad, named_load
from random_loads import Client, Load, Turn

from evenflow.core.plan import ChunkReason
from evenflow.core.report import ChunkReport, StepReport
from evenflow.errors import EndpointFailed
from evenflow.framing import frame
from evenflow.hosts.messages import HostStep

CHATS = tuple(Client(0.0, (Turn(16, 1000),), repeats=True) for _ in range(3))
LOAD = NamedLoad("tiny", Load(0, 5.0, "steady", CHATS, tuple(Client(at, (Turn(320, 2),)) for at in (0.05, 0.1))))


@pytest.fixture
def mode_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mode"
    path.write_text("default")
    monkeypatch.setenv(mode_file.MODE_VARIABLE, str(path))
    monkeypatch.setattr(host_bench, "_PROBE_PAUSE_S", 0.0)
    return path


@dataclass
class FakeVllm:
    """Gives every request a token every 2 ms, and takes a new mode when it is idle."""

    prompts: list[list[int]] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    on_prefill: Callable[[float], None] = lambda at: None
    fails: bool = False
    mode_file: mode_file.ModeFile = field(default_factory=mode_file.ModeFile)

    async def generate(self, prompt: dict[str, list[int]], sampling: Any, request_id: str) -> AsyncIterator[Any]:
        if not self.open and (mode := self.mode_file.read_if_changed()) is not None:
            self.modes.append(mode)
            self.mode_file.confirm()
        self.open.add(request_id)
        self.prompts.append(prompt["prompt_token_ids"])
        try:
            if len(self.prompts[-1]) > 50:
                if self.fails:
                    return
                await asyncio.sleep(0.05)
                self.on_prefill(time.perf_counter())
                await asyncio.sleep(0.02)
            for token in range(sampling.max_tokens):
                await asyncio.sleep(0.002)
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])])
        finally:
            self.open.discard(request_id)


@pytest.fixture
def bench(mode_path: Path, monkeypatch: pytest.MonkeyPatch) -> vllm_loads.Bench:
    sampling_params = ModuleType("vllm.sampling_params")
    sampling_params.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling_params)
    return vllm_loads.Bench(FakeVllm(), mode_path, 4096)


def report(at: float, seconds: float) -> StepReport:
    chunk = ChunkReport("long", 0, 64, ChunkReason.LATENCY, seconds / 2, False)
    values = {name: 0 for name in StepReport._fields if name not in StepReport._field_defaults} | {
        "admissions": [],
        "causes": (),
        "late": [],
        "policy": "target:50ms",
    }
    values |= {"target_s": None, "feasible_target_s": None, "ids": [], "tokens": [], "ended": {}}
    values |= {"num_decodes": 3, "chunks": [chunk]}
    return StepReport(**values | {"at": at, "seconds": seconds, "predicted_seconds": 2 * seconds})


def test_one_run_counts_every_gap_and_leaves_no_request(bench: vllm_loads.Bench, tmp_path: Path) -> None:
    async def run() -> Any:
        reader = asyncio.StreamReader()
        bench.engine.on_prefill = lambda at: reader.feed_data(frame(HostStep(report(at, 0.01), [], [])))
        writer: Any = SimpleNamespace(close=lambda: None)
        reading = asyncio.create_task(bench.read_reports(reader, writer))
        result = await bench.run("new+target:50ms", LOAD)
        reader.feed_eof()
        await reading
        return result

    figures, steps = asyncio.run(run())
    assert (figures.load, figures.mode, figures.target_s) == ("tiny", "new+target:50ms", 0.05)
    assert bench.engine.modes == ["new+target:50ms"]
    assert figures.num_gaps > 30
    assert figures.long_ttft_p50_s >= 0.07
    assert figures.chat_ttft_p50_s >= 0.002
    assert figures.step_time_error == pytest.approx(1.0)
    assert figures.prefill_tokens_per_s > 0
    assert not bench.engine.open
    long_prompts = [prompt for prompt in bench.engine.prompts if len(prompt) == 320]
    assert len(long_prompts) == 2
    assert long_prompts[0][:16] != long_prompts[1][:16]  # no prefix cache holds it
    path = tmp_path / "steps.jsonl.gz"
    host_bench.write_run(path, figures, steps)
    found = json.loads(gzip.decompress(path.read_bytes()))
    assert found["steps"][0][1:] == [0.01, 0.02, 3, [[0, 64, "latency"]], 0, True]


def test_a_load_without_long_prompts_ends_by_the_clock(bench: vllm_loads.Bench) -> None:
    chats = NamedLoad("chats", Load(0, 0.1, "none", CHATS, ()), ends_with_answers=False)
    figures, _ = asyncio.run(bench.run("fixed:512", chats))
    assert figures.target_s is None
    assert figures.num_gaps > 3
    assert not bench.engine.open


def test_a_request_without_an_answer_ends_the_run(bench: vllm_loads.Bench) -> None:
    bench.engine.fails = True
    with pytest.raises(EndpointFailed, match="load tiny failed: empty answer"):
        asyncio.run(bench.run("fixed:512", LOAD))
    assert not bench.engine.open


def test_loads_and_modes_are_planned_a_load_at_a_time() -> None:
    runs = host_bench.planned_runs(["32k,chats=fixed:512,target:50ms", "random:7:3=fixed:8"], is_tiny=False)
    assert [(load.name, mode) for load, mode in runs] == [
        ("32k", "fixed:512"),
        ("32k", "target:50ms"),
        ("chats", "fixed:512"),
        ("chats", "target:50ms"),
        ("random:7:3", "fixed:8"),
    ]


@pytest.mark.parametrize("name", ["16k", "32k:5", "decode:0", "decode:abc", "prefill:-3", "random:x", "random:5:0", ""])
def test_other_loads_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Got load '{name}' but expected one of 32k"):
        named_load(name)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("33k=fixed:8", "Got load '33k'"),
        ("32k", "Got mode ''"),
        ("32k=fixed:512,", "Got mode ''"),
        ("32k=old+target:50ms", "Got mode 'old"),
        ("32k=bogus", "bogus"),
        ("32k=target:-5ms", "-5ms"),
    ],
)
def test_runs_that_cannot_be_are_refused_before_an_engine_starts(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = host_bench.make_parser("", ())
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([argument])
    assert message in capsys.readouterr().err.splitlines()[-1]
    runs = ["32k,chats=new+target:50ms,fixed:512,default", "random:7:3=unmixed:512"]
    assert parser.parse_args(runs).runs == runs


@pytest.mark.parametrize("name", ["32k", "65k", "60k", "chats", "random:3"])
def test_a_tiny_load_has_the_same_form(name: str) -> None:
    load = named_load(name)
    tiny = load.scaled(16, 16).load
    assert len(tiny.long_prompts) == len(load.load.long_prompts)
    assert 0 < len(tiny.chats) <= len(load.load.chats)
    longest = max(turn.prompt_tokens for client in (*tiny.chats, *tiny.long_prompts) for turn in client.turns)
    assert longest <= 65_536 // 16


def test_a_target_is_held_against_the_budgets_of_its_load(bench: vllm_loads.Bench) -> None:
    figures, _ = asyncio.run(bench.run("fixed:512", LOAD))
    lines = host_bench.table([figures, replace(figures, mode="target:50ms", target_s=0.05)]).splitlines()
    assert "p99/target" not in lines[1]
    assert "TTFT/curve 1.00 | mean TTFT/best budget 1.00" in lines[2]


@dataclass
class FakeSglang:
    """Gives every request a token every 2 ms until it is aborted, as SGLang's engine does."""

    mode_path: Path
    open: set[str] = field(default_factory=set)
    mode_file: mode_file.ModeFile = field(default_factory=mode_file.ModeFile)

    @property
    def tokenizer_manager(self) -> Any:
        return SimpleNamespace(abort_request=self.open.discard)

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool = False, rid: str | None = None
    ) -> Any:
        if self.mode_file.read_if_changed() is not None:
            self.mode_file.confirm()
        if stream:
            assert rid is not None
            self.open.add(rid)
            return self._stream(rid, sampling_params["max_new_tokens"])
        differs = self.mode_path.read_text() == "fixed:512" and input_ids[0] % 2
        return {"output_ids": [input_ids[0] + int(differs)]}

    async def _stream(self, rid: str, max_tokens: int) -> AsyncIterator[dict[str, Any]]:
        for number in range(1, max_tokens + 1):
            await asyncio.sleep(0.002)
            yield {"meta_info": {"completion_tokens": number}}
        self.open.discard(rid)


def test_sglang_under_a_load_and_its_answers(mode_path: Path) -> None:
    bench = sglang_loads.Bench(FakeSglang(mode_path), mode_path, 4096)
    figures, steps = asyncio.run(bench.run("unmixed:512", LOAD))
    assert (figures.mode, figures.target_s, steps) == ("unmixed:512", None, [])
    assert not bench.engine.open
    same = asyncio.run(bench.compare_answers(("default", "target:50ms", "fixed:512")))
    assert same["default"] == same["target:50ms"] == 16
    assert 0 < same["fixed:512"] < 16


def test_sglang_finds_the_plug_in_that_switches(tmp_path: Path) -> None:
    switchable_sglang.write_entry_point(tmp_path / "packages")
    (found,) = distributions(path=[str(tmp_path / "packages")])
    assert [entry.value for entry in found.entry_points] == ["switchable_sglang:load"]


def test_modes_are_applied_to_sglang(mode_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path))
    monkeypatch.setenv("EVENFLOW_TBT_TARGET", "50ms")
    stored = tmp_path / "step-times" / "one.json"
    chosen: list[str] = []
    core = SimpleNamespace(set_policy=lambda spec: chosen.append(str(spec)), close=lambda: None)
    steering = SimpleNamespace(core=core)
    made: list[Any] = []
    monkeypatch.setattr(
        switchable_sglang.Switch, "_make", staticmethod(lambda scheduler, settings: made.append(settings) or steering)
    )
    scheduler = SimpleNamespace(evenflow=steering, chunked_prefill_size=8192, is_mixed_chunk=False)
    switch = switchable_sglang.Switch(scheduler)
    found = []
    for mode in ("fixed:1024", "unmixed:512", "default", "target:25ms"):
        switch.apply(mode)
        found.append((scheduler.chunked_prefill_size, scheduler.is_mixed_chunk, scheduler.evenflow is steering))
    assert found == [(1024, True, False), (512, False, False), (8192, False, False), (8192, False, True)]
    assert chosen == ["target:25ms"]
    for mode, is_left in (("kept+target:50ms", True), ("new+target:50ms", False)):
        stored.parent.mkdir(exist_ok=True)
        stored.touch()
        switch.apply(mode)
        assert stored.exists() is is_left
    assert [str(settings.policy) for settings in made] == ["target:50ms"] * 2
