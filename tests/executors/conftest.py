from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from evenflow.executors.base import Executor
from evenflow.executors.cuda_executor import CudaExecutor
from evenflow.executors.torch_executor import TorchExecutor
from evenflow.model.config import ModelConfig
from evenflow.model.cuda import reference_ops
from evenflow.model.cuda.decoder import PagedDecoder
from evenflow.model.cuda.reference import ReferenceAttention
from tests.model.tiny import random_tensors, tiny_config

MakeExecutor = Callable[..., Executor]


def contiguous(config: ModelConfig, tensors: Any, **options: Any) -> Executor:
    options.pop("max_num_seqs", None)
    return TorchExecutor(config, tensors, threads=1, **options)


def paged(config: ModelConfig, tensors: Any, *, uses_graphs: bool = False, **options: Any) -> Executor:
    """The executor for GPUs, on the CPU. Captured steps run again there instead of being replayed."""
    options.pop("enable_prefix_caching", None)
    decoder = PagedDecoder(config, tensors, ReferenceAttention(config), reference_ops)
    return CudaExecutor(decoder, uses_graphs=uses_graphs, max_model_len=config.max_position, **options)


EXECUTORS = {"contiguous": contiguous, "paged": paged, "paged, graphs": partial(paged, uses_graphs=True)}


@pytest.fixture(params=EXECUTORS)
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
