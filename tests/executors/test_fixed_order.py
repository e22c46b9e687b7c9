"""The deterministic mode on a CPU: no chunking and no batch changes a bit of a prompt's or an answer's logprobs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from evenflow.core.logprobs import RowLogprobs
from evenflow.core.plan import StepPlan
from evenflow.core.request import SamplingParams
from evenflow.errors import InvalidConfig
from evenflow.executors.base import Executor
from evenflow.executors.torch_executor import TorchExecutor, WeightFormat
from evenflow.model.config import ModelConfig, RopeConfig
from evenflow.native.build import library
from tests.executors.plans import admit, blocks, chunk, decodes, plan, prompt, run
from tests.model.architectures import CASES
from tests.model.tiny import random_tensors, tiny_config

needs_kernels = pytest.mark.skipif(library() is None, reason="no native kernels")

SAMPLING = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)
NUM_OUTPUTS = 3
NUM_CHUNKINGS = 500
# Lengths around the kernels' tiles of keys, blocks of rows, rows at once and parts of keys: 64, 96, 256 and 512.
LENGTHS = (1, 2, 15, 64, 65, 97, 130, 300, 600)
MODELS: dict[str, tuple[ModelConfig, WeightFormat]] = {
    **{name: (CASES[name][0], "float32") for name in ("llama, biases", "llama, one KV head", "qwen3", "smollm3")},
    "windows": (tiny_config(layer_windows=(None, 7, 70, 20), qkv_bias=True), "float32"),
    "six heads of their own": (tiny_config(num_kv_heads=6), "float32"),
    "int4": (tiny_config(hidden_size=64, intermediate_size=96), "int4"),
    "odd sizes": (tiny_config(hidden_size=77, intermediate_size=101), "float32"),
}


def new_executor(config: ModelConfig, weights: WeightFormat, deterministic: bool = True) -> TorchExecutor:
    tensors = random_tensors(config)
    return TorchExecutor(
        config,
        tensors,
        num_blocks=400,
        block_size=4,
        enable_prefix_caching=False,
        weights=weights,
        deterministic=deterministic,
    )


class Sequence:
    """Collects the logprobs of one prompt and its answer."""

    def __init__(self, slot: int, tokens: tuple[int, ...], cuts: tuple[int, ...]) -> None:
        self.slot, self.tokens = slot, tokens
        self.ends = [*cuts, *range(len(tokens), len(tokens) + NUM_OUTPUTS)]
        self.done = 0
        self.found: list[RowLogprobs] = []

    @property
    def is_decoding(self) -> bool:
        return self.done >= len(self.tokens)

    def parts(self) -> StepPlan:
        """Its next chunk or decode, as a step of its own."""
        start, end = self.done, self.ends.pop(0)
        self.done = end
        if start >= len(self.tokens):
            return plan(decoding=decodes((self.slot, start)))
        new = chunk(self.slot, start, end, samples=end == len(self.tokens), prompt_logprobs=True)
        is_first = start == 0
        return plan(
            admissions=(admit(self.slot, self.tokens, SAMPLING),) if is_first else (),
            changes=(blocks(self.slot, 80 * self.slot, 80),) if is_first else (),
            chunks=(new,),
        )


def run_together(executor: Executor, sequences: list[Sequence], draw: random.Random) -> None:
    """Each step takes some of the sequences one part further."""
    while waiting := [sequence for sequence in sequences if sequence.ends]:
        chosen = draw.sample(waiting, draw.randint(1, len(waiting)))
        chosen.sort(key=lambda sequence: not sequence.is_decoding)
        parts = [sequence.parts() for sequence in chosen]
        step = plan(
            admissions=tuple(one for part in parts for one in part.admissions),
            changes=tuple(one for part in parts for one in part.block_changes),
            decoding=decodes(*((part.decodes.slots[0], part.decodes.positions[0]) for part in parts if part.decodes)),
            chunks=tuple(one for part in parts for one in part.chunks),
        )
        result = run(executor, step)
        assert not result.errors
        for number, sequence in enumerate(chosen):
            sequence.found += [*result.prompt_logprobs.get(number, ()), *result.logprobs.get(number, ())]
    run(executor, plan(released=tuple(sequence.slot for sequence in sequences)))


def batches(draw: random.Random, prompts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Some of the prompts at a time, until each model has had its share of the chunkings."""
    left = NUM_CHUNKINGS // len(MODELS) + 1
    while left > 0:
        batch = draw.sample(prompts, draw.randint(1, 4))
        left -= len(batch)
        yield batch


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_no_chunking_and_no_batch_changes_a_bit(name: str) -> None:
    config, weights = MODELS[name]
    draw = random.Random(name)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    with closing(new_executor(config, weights)) as executor:
        expected = {}
        for tokens in prompts:
            alone = Sequence(0, tokens, ())
            run_together(executor, [alone], draw)
            assert len(alone.found) == len(tokens) - 1 + NUM_OUTPUTS
            expected[tokens] = alone.found
        for batch in batches(draw, prompts):
            sequences = []
            for slot, tokens in enumerate(batch):
                cuts = draw.sample(range(1, len(tokens)), draw.randint(0, min(5, len(tokens) - 1)))
                sequences.append(Sequence(slot, tokens, tuple(sorted(cuts))))
            cuts_of = {len(sequence.tokens): list(sequence.ends) for sequence in sequences}
            run_together(executor, sequences, draw)
            for sequence in sequences:
                assert sequence.found == expected[sequence.tokens], cuts_of


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_the_usual_mode(name: str) -> None:
    config, weights = MODELS[name]
    length = 300 if weights == "float32" else 2  # more rows are multiplied in 8 or 16 bits in the usual mode
    found = []
    for deterministic in (False, True):
        with closing(new_executor(config, weights, deterministic)) as executor:
            alone = Sequence(0, prompt(length), ())
            run_together(executor, [alone], random.Random(0))
            found.append(torch.tensor([row.chosen.logprob for row in alone.found[:length]]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)


def test_what_the_kernels_do_not_support_is_refused() -> None:
    config = tiny_config(head_dim=8, rope=RopeConfig(theta=10000.0, rotary_dim=8, scaling=None))
    with pytest.raises(InvalidConfig, match="deterministic=True, which needs evenflow's native kernels on a CPU, but "):
        new_executor(config, "float32")
