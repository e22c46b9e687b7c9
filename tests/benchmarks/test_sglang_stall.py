"""The stall benchmark of SGLang, without SGLang: on a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_stall_gpu
import stall_bench
import switchable_sglang


@dataclass
class FakeSglang:
    """Gives every request a token every 2 ms until it is aborted, as SGLang's engine does."""

    mode_path: Path
    open: set[str] = field(default_factory=set)

    @property
    def tokenizer_manager(self) -> Any:
        return SimpleNamespace(abort_request=self.open.discard)

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool = False, rid: str | None = None
    ) -> Any:
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


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sglang_stall_gpu.Bench:
    monkeypatch.setattr(stall_bench, "SECONDS_TO_ABORT", 0.0)
    load = stall_bench.stall_load(4096, (3, 16), (2, 320), 0.05, 30_000)
    return sglang_stall_gpu.Bench(FakeSglang(tmp_path / "mode"), load, tmp_path / "mode")


def test_a_run_counts_tokens_and_leaves_no_request(bench: sglang_stall_gpu.Bench) -> None:
    figures, steps, _ = asyncio.run(bench.stall("unmixed:512"))
    assert (figures.policy, figures.target_s, steps) == ("unmixed:512", None, [])
    assert figures.num_gaps > 0
    assert not bench.engine.open


def test_equal_answers_are_counted(bench: sglang_stall_gpu.Bench) -> None:
    same = asyncio.run(bench.compare_answers(("default", "target:50ms", "fixed:512")))
    assert same["default"] == same["target:50ms"] == 5
    assert 0 < same["fixed:512"] < 5


def test_sglang_finds_the_plug_in_that_switches(tmp_path: Path) -> None:
    switchable_sglang.write_entry_point(tmp_path / "packages")
    (found,) = distributions(path=[str(tmp_path / "packages")])
    assert [entry.value for entry in found.entry_points] == ["switchable_sglang:load"]


def test_modes_are_applied() -> None:
    chosen: list[str] = []
    steering = SimpleNamespace(core=SimpleNamespace(set_policy=lambda spec: chosen.append(str(spec))))
    scheduler = SimpleNamespace(evenflow=steering, chunked_prefill_size=8192, is_mixed_chunk=False)
    switch = switchable_sglang.Switch(scheduler, Path("mode"))
    found = []
    for mode in ("fixed:1024", "unmixed:512", "default", "target:25ms"):
        switch.apply(mode)
        found.append((scheduler.chunked_prefill_size, scheduler.is_mixed_chunk, scheduler.evenflow is steering))
    assert found == [(1024, True, False), (512, False, False), (8192, False, False), (8192, False, True)]
    assert chosen == ["target:25ms"]
