"""Prefixes that leave the KV cache and come back, on real engines: the answers are the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from evenflow import LLM, SamplingParams
from evenflow.core import tier
from evenflow.engine.outputs import RequestOutput
from evenflow.errors import InvalidConfig
from evenflow.executors.faulty import Fault, FaultKind, FaultyExecutor, Moment
from evenflow.executors.kv_tier import KvTier, TieredExecutor
from evenflow.executors.recorded import replay
from tests.engine.paged import paged_llm, tiny_block_bytes
from tests.models import stories260k_folder, tiny_hf_folder, tiny_llama

SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[token, *range(80)] for token in (101, 102, 103, 104)]


@pytest.fixture(autouse=True)
def _moving_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a tiny model's prefixes may be quicker to compute than to move, depending on the machine."""
    monkeypatch.setattr(KvTier, "measure", lambda self: (0.0, 0.0))
    monkeypatch.setattr(tier, "_KEPT", 1.0)


def contiguous_llm(model: str | Path, **settings: Any) -> LLM:
    """With twice the bytes: a cached prefix is stored besides the running copy."""
    return LLM(model, device="cpu", **settings | {"kv_cache_memory": 2 * settings["kv_cache_memory"]})


@pytest.fixture(params=[contiguous_llm, paged_llm])
def new_llm(request: pytest.FixtureRequest) -> Callable[..., LLM]:
    """Of the CPU's engine, and of the one for GPUs (here on a CPU). The pool holds one of the prompts."""

    def make(model: str | Path | None = None, **settings: Any) -> LLM:
        defaults = {"policy": "fixed:64", "kv_cache_memory": 8 * tiny_block_bytes()}
        llm: LLM = request.param(model or tiny_llama(), **defaults | settings)
        return llm

    return make


def plain_answers() -> list[list[int]]:
    with LLM(tiny_llama(), device="cpu", policy="unchunked") as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, SAMPLING)]


def test_prompts_that_evict_each_other_come_back(new_llm: Callable[..., LLM]) -> None:
    with new_llm(kv_offload_memory=8 << 20) as llm:
        rounds = [[llm.generate([prompt], SAMPLING)[0] for prompt in PROMPTS] for _ in range(2)]
    assert [[one.token_ids for one in outputs] for outputs in rounds] == [plain_answers()] * 2
    assert [one.num_cached_tokens for one in rounds[0]] == [0] * 4
    assert [one.num_cached_tokens for one in rounds[1]] == [80] * 4


def test_preempted_requests_come_back_with_their_kv(new_llm: Callable[..., LLM]) -> None:
    prompts = [[token] * 40 for token in (5, 6, 7)]
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(tiny_llama(), device="cpu", policy="unchunked") as llm:
        expected = [output.token_ids for output in llm.generate(prompts, sampling)]
    with new_llm(kv_offload_memory=8 << 20, kv_cache_memory=12 * tiny_block_bytes()) as llm:
        assert [output.token_ids for output in llm.generate(prompts, sampling)] == expected
        totals = llm.engine.stats.totals
    assert totals.looked_up_tokens > 3 * 40, "nobody was preempted"
    assert totals.cached_tokens > 0
    assert totals.prefill_tokens < 3 * 40 + 100, "what was preempted was computed again"


@pytest.mark.parametrize("moment", ["restore", "commit"])
@pytest.mark.parametrize("kind", ["raise", "nan", "out-of-memory"])
def test_a_fault_while_prefixes_move_leaves_the_answers(
    new_llm: Callable[..., LLM], tmp_path: Path, kind: FaultKind, moment: Moment
) -> None:
    with new_llm(cache_dir=str(tmp_path / "cache"), kv_cache_memory=16 * tiny_block_bytes()) as llm:
        for prompt in PROMPTS:
            llm.generate([prompt], SAMPLING)
        faulty = FaultyExecutor(llm.engine.executor, [Fault(kind, moment, after=2 * (moment == "commit"))])
        llm.engine.executor = faulty
        outputs = [output for prompt in PROMPTS for output in llm.generate([prompt], SAMPLING)]
        scheduler = llm.engine.scheduler
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert faulty.num_raised == 1
    assert [output.error for output in outputs] == [None] * 4
    assert [output.token_ids for output in outputs] == plain_answers()


def test_kv_that_a_failed_step_was_built_on_is_not_read_at_the_next_start(
    new_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither after a clean end, nor if the process is killed once the request has its answer."""
    folder, killed = tmp_path / "cache", tmp_path / "killed"

    def answer(folder: Path, faults: Sequence[Fault] = (), copy: Path | None = None) -> RequestOutput:
        with new_llm(cache_dir=str(folder), kv_cache_memory=16 * tiny_block_bytes()) as llm:
            tiered = llm.engine.executor
            assert isinstance(tiered, TieredExecutor)
            llm.engine.executor = FaultyExecutor(tiered, faults)
            [output] = llm.generate(PROMPTS[:1], SAMPLING)
            if copy is not None:
                tiered._tier._saver.submit(lambda: None).result()  # what has begun
                shutil.copytree(folder, copy)
        return output

    [right, *_] = plain_answers()
    with monkeypatch.context() as broken:
        broken.setattr(KvTier, "_encode", lambda self, copy: self._codec.encode(-copy(None)))
        answer(folder)
    wrong = answer(folder)
    assert wrong.token_ids != right
    assert wrong.num_cached_tokens == 80
    assert answer(folder, [Fault("nan", "prefill")], killed).token_ids == right
    assert answer(killed).token_ids == right
    last = answer(folder)
    assert last.token_ids == right
    assert last.num_cached_tokens == 80


@pytest.mark.parametrize("form", ["lossless", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_restarted_engine_finds_the_prefixes(new_llm: Callable[..., LLM], tmp_path: Path, form: str) -> None:
    settings = {"cache_dir": str(tmp_path / "cache"), "kv_offload_format": form}
    with new_llm(**settings) as llm:
        before = [llm.generate([prompt], SAMPLING)[0] for prompt in PROMPTS]
    with new_llm(**settings) as llm:
        after = [llm.generate([prompt], SAMPLING)[0] for prompt in PROMPTS]
    assert [one.num_cached_tokens for one in before] == [0] * 4
    assert [one.num_cached_tokens for one in after] == [80] * 4
    if form == "lossless":
        assert [one.token_ids for one in after] == [one.token_ids for one in before] == plain_answers()


def test_torn_files_are_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"kv_cache_memory": 8 * tiny_block_bytes(), "policy": "fixed:64", "cache_dir": str(tmp_path)}
    with contiguous_llm(tiny_llama(), **settings) as llm:
        llm.generate(PROMPTS, SAMPLING)
    files = sorted(tmp_path.iterdir())
    for number, path in enumerate(files):
        content = bytearray(path.read_bytes())
        content[-5] ^= 0x40
        path.write_bytes(content[: len(content) - 3 * (number == 0)])
    with contiguous_llm(tiny_llama(), **settings) as llm:
        assert [llm.generate([prompt], SAMPLING)[0].token_ids for prompt in PROMPTS] == plain_answers()
    assert caplog.text.count("Ignored files in") == 1
    assert "checksum is wrong" in caplog.text


@pytest.mark.parametrize("change", ["weights", "other files", "block size", "format"])
def test_what_another_setting_or_model_wrote_is_not_read(tmp_path: Path, change: str) -> None:
    folder = tiny_hf_folder(tmp_path / "model", "LlamaForCausalLM")
    settings: dict[str, Any] = {"kv_cache_memory": 1 << 22, "policy": "fixed:64", "cache_dir": str(tmp_path / "cache")}
    with LLM(folder, device="cpu", **settings) as llm:
        llm.generate([PROMPTS[0]], SAMPLING)
    match change:
        case "weights":
            settings["weights"] = "int4"
        case "other files":
            os.utime(folder / "model.safetensors", (1, 1))
        case "block size":
            settings["block_size"] = 8
        case "format":
            settings["kv_offload_format"] = "int8"
    with LLM(folder, device="cpu", **settings) as llm:
        [output] = llm.generate([PROMPTS[0]], SAMPLING)
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("host", [0, 2_000_000])
def test_the_folder_stays_within_its_size(tmp_path: Path, host: int) -> None:
    """Also if the host holds more."""
    size = 200_000
    settings = {"policy": "fixed:64", "cache_dir": str(tmp_path), "cache_dir_size": size, "kv_offload_memory": host}
    with LLM(tiny_llama(), device="cpu", kv_cache_memory=1 << 22, **settings) as llm:
        for token in range(40):
            llm.generate([[token, *range(80)]], SAMPLING)
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size / 2 < total <= size


def test_a_recorded_run_with_moves_replays(tmp_path: Path) -> None:
    with LLM(
        tiny_llama(),
        device="cpu",
        policy="fixed:64",
        kv_cache_memory=16 * tiny_block_bytes(),
        cache_dir=str(tmp_path / "cache"),
        record=tmp_path / "run.jsonl",
    ) as llm:
        for prompt in [*PROMPTS, *PROMPTS]:
            llm.generate([prompt], SAMPLING)
    plans = replay(tmp_path / "run.jsonl")
    assert any(plan.moves.restores for plan in plans)
    assert any(plan.moves.saves for plan in plans)


def test_a_real_models_text_continues_from_disk_as_it_did(tmp_path: Path) -> None:
    folder = stories260k_folder(tmp_path / "model")
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    with LLM(folder, device="cpu", policy="fixed:64") as llm:
        [expected] = llm.generate(["Once upon a time, there was a little girl named Lily. " * 4], sampling)
    for form in ("lossless", "int8"):
        for cached in (False, True):
            with LLM(
                folder, device="cpu", policy="fixed:64", cache_dir=str(tmp_path / form), kv_offload_format=form
            ) as llm:
                [output] = llm.generate(["Once upon a time, there was a little girl named Lily. " * 4], sampling)
            assert (output.num_cached_tokens > 0) == cached
            if form == "lossless":
                assert output.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offload_memory": 10_000}, "kv_offload_memory=10000 but one block of 16 tokens may take"),
        ({"cache_dir": "{}/c", "cache_dir_size": 10}, "cache_dir_size=10 but one block"),
        ({"cache_dir": "{}/c", "cache_dir_size": 10, "kv_offload_memory": 1 << 30}, "cache_dir_size=10 but one block"),
        ({"cache_dir": "/dev/null"}, "cache_dir='/dev/null' but it cannot be used"),
    ],
)
def test_too_little_room_is_said(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    given = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in settings.items()}
    with pytest.raises(InvalidConfig, match=message):
        LLM(tiny_llama(), device="cpu", kv_cache_memory=1 << 22, policy="fixed:64", **given)
