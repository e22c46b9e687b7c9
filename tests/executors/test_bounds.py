"""What executors and models remember is bounded, whatever comes: each test feeds it far more than the bound."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from evenflow.core.blocks import Content
from evenflow.core.grammar import Grammar
from evenflow.core.plan import Save, TierMoves
from evenflow.executors.block_files import BlockFiles
from evenflow.executors.host_blocks import HostBlocks
from evenflow.executors.kv_tier import KvTier
from evenflow.model.cpu.kv_cache import PrefixStore
from evenflow.model.kv_codec import CODECS, BlockLayout
from evenflow.model.loader import load_model
from evenflow.model.text.grammar import Grammars
from tests.models import tiny_llama

EVENTS = 100_000


def test_bytes_of_blocks_in_host_memory() -> None:
    rng = random.Random(0)
    host = HostBlocks(10_000, BlockLayout((2, 16, 4), torch.float32), is_pinned=False)
    for _ in range(EVENTS):
        name = b"%d" % rng.randrange(500)
        match rng.randrange(4):
            case 0:
                host.remove(name)
            case 1:
                host.take(name)
            case _:
                host.put(name, b"x" * rng.choice((0, 1, 100, 900, 9_000, 20_000)))
        assert host._num_bytes <= 10_000
    assert host._num_bytes == sum(map(len, host._held.values()))


def test_bytes_of_the_cache_folder(tmp_path: Path) -> None:
    rng, most = random.Random(0), 50_000
    for _ in range(4):  # starts
        files = BlockFiles(tmp_path, "model", most)
        for number in range(EVENTS // 100):
            name = rng.randrange(500).to_bytes(16, "big")
            match rng.randrange(6):
                case 0:
                    files.remove(name)
                case 1:
                    files.read(name)
                case _:
                    files.write(Content(name, "t" * rng.randrange(300)), b"x" * rng.choice((0, 10, 900, 9_000, 60_000)))
            if number % 50 == 0:
                assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= most
    assert files._num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_blocks_on_their_way(tmp_path: Path) -> None:
    """Whatever is saved, restored and dropped, nothing of it is left when all is done."""
    rng = random.Random(0)
    memory = PrefixStore(load_model(tiny_llama()).config, 16, 16)
    tier = KvTier(memory, CODECS["plain"], host_bytes=5_000, files=BlockFiles(tmp_path, "model", 200_000))
    num_restoring = 0
    for _ in range(EVENTS // 400):
        names = [b"%016d" % rng.randrange(40) for _ in range(3)]
        tier.apply(
            TierMoves(
                saves=tuple(Save(rng.randrange(16), name, "") for name in names[: rng.randrange(3)]),
                restores=tuple((rng.randrange(16), name) for name in names[2:]),
                drops=tuple(names[: rng.randrange(2)]),
            )
        )
        num_restoring += 1
        result = tier.collect()
        num_restoring -= len(result.restored) + len(result.lost)
        assert result.num_saving <= memory.max_copied
    while num_restoring:
        tier.wait()
        result = tier.collect()
        num_restoring -= len(result.restored) + len(result.lost)
    tier.close()
    assert not tier._dropping
    assert not tier._to_drop
    assert tier._num_saving == tier._num_returning == 0


def test_grammars_of_a_model() -> None:
    model = load_model(tiny_llama())
    grammars = Grammars(model.tokenizer, model.config.vocab_size)
    for number in range(EVENTS // 200):
        grammars.constrain(Grammar("choice", f'["{number}"]'))
    info = grammars._compile_soon.cache_info()
    grammars.close()
    assert info.misses == EVENTS // 200
    assert info.maxsize is not None
    assert info.currsize == info.maxsize < EVENTS // 200
