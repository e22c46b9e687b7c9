"""What only the CPU's executor does: 4-bit weights, memory by sequence."""

from __future__ import annotations

import pytest
import torch

from evenflow.core.request import SamplingParams
from evenflow.errors import InvalidConfig, OutOfMemory
from evenflow.executors.torch_executor import TorchExecutor
from evenflow.model.cpu.int4 import dequantise, quantise
from tests.executors.plans import admit, chunk, generate, plan, prompt, run
from tests.model.tiny import random_tensors, tiny_config

CONFIG = tiny_config()


def test_int4_of_weights_that_fit_four_bits_follows_float32_closely() -> None:
    config = tiny_config(hidden_size=96)
    tensors = {
        name: dequantise(*quantise(tensor)) if "_proj" in name else tensor
        for name, tensor in random_tensors(config).items()
    }
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    found = {}
    for weights in ("float32", "int4"):
        executor = TorchExecutor(
            config, tensors, num_blocks=1, block_size=4, enable_prefix_caching=False, weights=weights
        )
        rows = chunk(0, 0, 60, samples=True, prompt_logprobs=True)
        result = run(executor, plan(admissions=(admit(0, prompt(60), sampling),), chunks=(rows,)))
        found[weights] = torch.tensor([row.chosen.logprob for row in result.prompt_logprobs[0]])
        executor.close()
    difference = (found["int4"] - found["float32"]).abs().mean()
    # Not at all where the products of many rows are float32's: on x86 without bfloat16.
    assert difference < 0.1 * found["float32"].std()


def test_an_unknown_weight_format_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="'int3'"):
        TorchExecutor(CONFIG, random_tensors(CONFIG), num_blocks=1, block_size=4, weights="int3")


def test_memory_that_cannot_be_had_fails_the_step_and_not_the_executor() -> None:
    executor = TorchExecutor(
        CONFIG, random_tensors(CONFIG), num_blocks=64, block_size=4, enable_prefix_caching=False, threads=1
    )
    huge = admit(3, prompt(5), max_known_tokens=1 << 50)
    with pytest.raises(OutOfMemory, match="max_num_batched_tokens"):
        run(executor, plan(admissions=(huge,), chunks=(chunk(3, 0, 5, samples=True),)))
    run(executor, plan(released=(3,)))
    assert len(generate(executor, admit(0, prompt(5)), (), 3)) == 3
    executor.close()
