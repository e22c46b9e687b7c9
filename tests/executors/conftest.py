from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from evenflow.executors.base import Executor
from evenflow.executors.cuda_executor import CudaExecutor
from evenflow.executors.torch_executor import TorchExecutor
from evenflow.model.config import ModelConfig
from tests.model.cuda.devices import CPU, CUDA_FLOAT32, Place, needs_cuda
from tests.model.tiny import random_tensors, tiny_config

MakeExecutor = Callable[..., Executor]


def contiguous(config: ModelConfig, tensors: Any, **options: Any) -> Executor:
    options.pop("max_num_seqs", None)
    return TorchExecutor(config, tensors, threads=1, **options)


def paged(place: Place, uses_graphs: bool, config: ModelConfig, tensors: Any, **options: Any) -> Executor:
    """The executor for GPUs. On a CPU, captured steps run again instead of being replayed."""
    options.pop("enable_prefix_caching", None)
    decoder = place.decoder(config, tensors)
    return CudaExecutor(decoder, uses_graphs=uses_graphs, max_model_len=config.max_position, **options)


EXECUTORS = {
    "contiguous": contiguous,
    "paged": partial(paged, CPU, False),
    "paged, graphs": partial(paged, CPU, True),
    "cuda": partial(paged, CUDA_FLOAT32, False),
    "cuda, graphs": partial(paged, CUDA_FLOAT32, True),
}


@pytest.fixture(params=[pytest.param(name, marks=needs_cuda if "cuda" in name else ()) for name in EXECUTORS])
def make_executor(request: pytest.FixtureRequest) -> Iterator[MakeExecutor]:
    made: list[Executor] = []

    def make(tensors: Any = None, **changes: Any) -> Executor:
        config = tiny_config()
        options: dict[str, Any] = {"num_blocks": 160, "block_size": 4, **changes}
        made.append(EXECUTORS[request.param](config, tensors or random_tensors(config), **options))
        return made[-1]

    yield make
    for executor in made:
        executor.close()
