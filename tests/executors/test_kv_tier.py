"""The tier on real block memory: of the CPU's engine, and paged as on a GPU, there and with tensors on the CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evenflow.core.plan import Save, TierMoves, TierResult
from evenflow.executors import host_blocks, kv_tier
from evenflow.executors.block_files import BlockFiles
from evenflow.executors.host_blocks import HostBlocks
from evenflow.executors.kv_tier import BlockMemory, KvTier
from evenflow.model.cpu.kv_cache import PrefixStore
from evenflow.model.cuda.blocks import PagedBlocks
from evenflow.model.kv_codec import CODECS, BlockCopy, BlockLayout
from evenflow.model.loader import load_model
from tests.model.cuda.devices import needs_cuda
from tests.models import tiny_llama

NUM_BLOCKS, BLOCK_SIZE = 8, 16


def contiguous() -> BlockMemory:
    return PrefixStore(load_model(tiny_llama()).config, NUM_BLOCKS, BLOCK_SIZE)


def paged(device: str) -> BlockMemory:
    return PagedBlocks(torch.zeros(4, NUM_BLOCKS, 2, BLOCK_SIZE, 2, 16, dtype=torch.bfloat16, device=device))


@pytest.fixture(params=[contiguous, partial(paged, "cpu"), pytest.param(partial(paged, "cuda"), marks=needs_cuda)])
def memory(request: pytest.FixtureRequest) -> BlockMemory:
    make: Callable[[], BlockMemory] = request.param
    return make()


def filled(memory: BlockMemory, block: int, seed: int) -> torch.Tensor:
    layout = memory.layout
    values = torch.randn(layout.shape, generator=torch.Generator().manual_seed(seed)).to(layout.dtype)
    memory.write([block], [values])
    return values


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def save(tier: KvTier, block: int, number: int) -> None:
    tier.apply(TierMoves(saves=(Save(block, name(number), "acme"),)))


def saved(tier: KvTier) -> None:
    for _ in count():
        tier.wait()
        if not tier.collect().num_saving:
            return


def restore(tier: KvTier, block: int, number: int) -> TierResult:
    tier.apply(TierMoves(restores=((block, name(number)),)))
    tier.wait()
    return tier.collect()


EXACT = pytest.mark.parametrize("form", ["plain", "lossless"])


@EXACT
def test_a_block_comes_back_with_the_same_bits_though_it_was_overwritten(memory: BlockMemory, form: str) -> None:
    tier = KvTier(memory, CODECS[form], host_bytes=1 << 20)
    values = filled(memory, 3, seed=1)
    save(tier, 3, 1)
    filled(memory, 3, seed=2)  # at once, as the step does that follows
    saved(tier)
    result = restore(tier, 5, 1)
    assert result.restored == (name(1),)
    assert result.restore_seconds > 0
    assert torch.equal(memory.read([5])[0](None), values)
    tier.close()


@EXACT
def test_a_block_can_return_while_it_is_still_being_saved(memory: BlockMemory, form: str) -> None:
    tier = KvTier(memory, CODECS[form], host_bytes=1 << 20)
    values = [filled(memory, block, seed=block) for block in range(4)]
    tier.apply(
        TierMoves(
            saves=tuple(Save(block, name(block), "") for block in range(4)),
            restores=tuple((7 - block, name(block)) for block in range(4)),
        )
    )
    restored: set[bytes] = set()
    while len(restored) < 4:
        tier.wait()
        restored.update(tier.collect().restored)
    for block in range(4):
        assert torch.equal(memory.read([7 - block])[0](None), values[block])
    tier.close()


def test_what_was_dropped_or_never_saved_is_lost(memory: BlockMemory, caplog: pytest.LogCaptureFixture) -> None:
    tier = KvTier(memory, CODECS["lossless"], host_bytes=1 << 20)
    filled(memory, 0, seed=0)
    save(tier, 0, 1)
    tier.apply(TierMoves(drops=(name(1),)))
    save(tier, 0, 3)
    saved(tier)  # so the drop is done: it came before
    assert [restore(tier, 1, number).lost for number in (1, 2, 3)] == [(name(1),), (name(2),), ()]
    assert not caplog.records
    tier.close()


@pytest.mark.parametrize("form", ["plain", "int8"])
def test_the_host_keeps_what_fits_the_most_recent_first(memory: BlockMemory, form: str) -> None:
    codec = CODECS[form]
    tier = KvTier(memory, codec, host_bytes=2 * codec.max_bytes(memory.layout))
    for number in range(4):
        filled(memory, number, seed=number)
        save(tier, number, number)
    saved(tier)
    outcomes = [restore(tier, 7, number) for number in range(4)]
    assert [bool(outcome.restored) for outcome in outcomes] == [False, False, True, True]
    tier.close()


@EXACT
def test_files_keep_what_the_host_does_not_and_the_next_process_finds_it(
    memory: BlockMemory, form: str, tmp_path: Path
) -> None:
    def new_tier() -> KvTier:
        return KvTier(memory, CODECS[form], host_bytes=0, files=BlockFiles(tmp_path, "model", 1 << 30))

    tier = new_tier()
    values = filled(memory, 0, seed=9)
    save(tier, 0, 1)
    tier.close()
    tier = new_tier()
    config = tier.config()
    assert config.keeps_all
    assert [content.tenant for content in config.contents] == ["acme"]
    assert restore(tier, 6, 1).restored == (name(1),)
    assert torch.equal(memory.read([6])[0](None), values)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert restore(tier, 5, 1).lost == (name(1),)
    tier.close()


def test_a_disk_that_fails_is_left_alone_for_a_while(
    memory: BlockMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, now = tmp_path / "cache", 1000.0
    tier = KvTier(memory, CODECS["lossless"], host_bytes=1 << 20, files=BlockFiles(folder, "model", 1 << 30))
    monkeypatch.setattr(kv_tier, "time", SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: now))
    values = filled(memory, 0, seed=3)

    def save_some() -> None:
        for number in range(3):
            save(tier, 0, number)
            saved(tier)

    with caplog.at_level(logging.INFO, "evenflow"):
        save_some()
        tier.apply(TierMoves(drops=(name(1),)))
        folder.rename(tmp_path / "gone")
        save_some()
        folder.mkdir()
        save_some()
        assert restore(tier, 4, 2).restored == (name(2),)
        assert torch.equal(memory.read([4])[0](None), values)
        assert not list(folder.iterdir())
        now += 61
        save_some()
    assert len(list(folder.iterdir())) == 3
    assert ["not kept on disk" in record.getMessage() for record in caplog.records] == [True, False]
    assert "kept on disk again" in caplog.text
    tier.close()


class Later:
    """Stands for a thread of the tier: what is submitted runs when the test says so."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], object]] = []

    def submit(self, task: Callable[..., object], *arguments: object) -> Future[object]:
        self.tasks.append(partial(task, *arguments))
        done: Future[object] = Future()
        done.set_result(None)
        return done

    def run(self, count: int) -> None:
        for _ in range(count):
            self.tasks.pop(0)()

    def shutdown(self, cancel_futures: bool = False) -> None:
        self.run(0 if cancel_futures else len(self.tasks))


def without_threads(tier: KvTier) -> tuple[Later, Later]:
    for worker in (tier._saver, tier._restorer):
        worker.shutdown()
    saver, restorer = Later(), Later()
    vars(tier).update(_saver=saver, _restorer=restorer)
    return saver, restorer


@pytest.mark.parametrize("is_copied_again", [True, False])
def test_a_forgotten_block_that_was_computed_anew_never_returns_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copied_again: bool
) -> None:
    """Not even while its old copy is still being saved, or waits to be dropped."""
    memory = contiguous()
    tier = KvTier(memory, CODECS["plain"], host_bytes=1 << 20, files=BlockFiles(tmp_path, "model", 1 << 30))
    saver, restorer = without_threads(tier)
    filled(memory, 0, seed=1)  # wrong
    save(tier, 0, 7)
    values = filled(memory, 0, seed=2)
    if not is_copied_again:

        def fails(block_ids: Sequence[int]) -> list[BlockCopy]:
            raise MemoryError

        monkeypatch.setattr(memory, "read", fails)
    tier.apply(TierMoves(drops=(name(7),), saves=(Save(0, name(7), ""),)))
    monkeypatch.undo()
    for num_done in range(4):
        tier.apply(TierMoves(restores=((3, name(7)),)))
        restorer.run(1)
        result = tier.collect()
        assert bool(result.restored) == is_copied_again, num_done
        if is_copied_again:
            assert torch.equal(memory.read([3])[0](None), values), num_done
        saver.run(min(1, len(saver.tasks)))


def test_a_dropped_blocks_file_goes_before_anything_else_is_saved(tmp_path: Path) -> None:
    """It may be wrong, and would be read at the next start if the process died meanwhile."""
    memory = contiguous()
    tier = KvTier(memory, CODECS["plain"], host_bytes=0, files=BlockFiles(tmp_path, "model", 1 << 30))
    saver, _ = without_threads(tier)
    filled(memory, 0, seed=1)
    save(tier, 0, 1)
    saver.run(1)
    tier.apply(TierMoves(saves=tuple(Save(0, name(number), "") for number in (2, 3, 4))))
    tier.apply(TierMoves(drops=(name(1), name(3))))
    saver.run(1)
    assert {path.stem.partition("-")[2] for path in tmp_path.iterdir()} == {name(2).hex(), name(4).hex()}
    saver.run(1)
    assert tier.collect().num_saving == 0
    assert not tier._dropping
    tier.close()


def test_what_is_lost_leaves_no_file(tmp_path: Path) -> None:
    """The scheduler knows of none then: nothing would ever drop it."""
    memory = contiguous()
    tier = KvTier(memory, CODECS["plain"], host_bytes=0, files=BlockFiles(tmp_path, "model", 1 << 30))
    for number in range(2):
        filled(memory, number, seed=number)
        save(tier, number, number)
    saved(tier)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert restore(tier, 5, 0).lost == (name(0),)
    tier.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_to_be_dropped_at_the_end_is(tmp_path: Path) -> None:
    """Else a forgotten block would be read at the next start."""
    memory = contiguous()
    tier = KvTier(memory, CODECS["plain"], host_bytes=0, files=BlockFiles(tmp_path, "model", 1 << 30))
    without_threads(tier)
    filled(memory, 0, seed=1)
    save(tier, 0, 1)
    tier._saver.run(1)  # type: ignore[attr-defined]
    assert len(list(tmp_path.iterdir())) == 1
    save(tier, 0, 2)
    tier.apply(TierMoves(drops=(name(1),)))
    tier.close()
    assert not list(tmp_path.iterdir())


def test_a_step_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    memory = contiguous()
    tier = KvTier(memory, CODECS["plain"], host_bytes=0, files=BlockFiles(tmp_path, "model", 1 << 30))
    saver, _ = without_threads(tier)
    save(tier, 0, 1)
    tier.wait()
    assert tier.collect().num_saving == 1
    saver.run(1)
    tier.wait()
    assert tier.collect().num_saving == 0


def test_int8_returns_nearly_the_same_values(memory: BlockMemory) -> None:
    tier = KvTier(memory, CODECS["int8"], host_bytes=1 << 20)
    values = filled(memory, 3, seed=1).float()
    save(tier, 3, 1)
    restore(tier, 5, 1)  # perhaps from the copy
    saved(tier)
    restore(tier, 5, 1)
    error = (memory.read([5])[0](None).float() - values).norm() / values.norm()
    assert 0 < error < 0.02
    tier.close()


class SlowMemory:
    """One that copies when the steps before have ended, on a clock of its own."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self.now = 0.0
        self.layout, self.is_on_gpu, self.max_copied = memory.layout, False, memory.max_copied
        self.write = memory.write

    def read(self, block_ids: Sequence[int]) -> list[BlockCopy]:
        waits = iter((0.25, *[0.0] * len(block_ids)))

        def copy(block: BlockCopy, into: torch.Tensor | None) -> torch.Tensor:
            self.now += next(waits) + 0.0001
            return block(into)

        return [partial(copy, block) for block in self._memory.read(block_ids)]


def test_the_steps_that_a_copy_waits_for_are_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SlowMemory(contiguous())
    monkeypatch.setattr(kv_tier, "time", SimpleNamespace(perf_counter=lambda: memory.now))
    tier = KvTier(memory, CODECS["plain"], host_bytes=1 << 20)
    tier.apply(TierMoves(saves=tuple(Save(block, name(block), "") for block in range(4))))
    results = []
    while not results or results[-1].num_saving:
        tier.wait()
        results.append(tier.collect())
    assert sum(result.num_saved for result in results) == 4
    assert max(result.save_seconds for result in results) == pytest.approx(0.0001)
    tier.close()


def test_blocks_kept_as_they_are_use_the_same_memory_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout((2, 16, 4), torch.float32)
    monkeypatch.setattr(host_blocks, "_SLAB_BYTES", 2 * layout.num_bytes)
    host = HostBlocks(3 * layout.num_bytes, layout, is_pinned=False)
    host.reserve(1)
    assert len(host._free) == 4
    places = set()
    for number in range(50):
        place = host.new_place()
        places.add(place.data_ptr())
        host.put(name(number), place.fill_(number))
    assert len(places) == 4
    taken = host.take(name(48))
    assert isinstance(taken, torch.Tensor)
    host.put(name(50), host.new_place())
    host.put(name(51), host.new_place().fill_(51))
    assert taken.unique().tolist() == [48]  # nothing is written over what was taken
    assert host.take(name(48)) is None
