"""What the worker class runs before the first request, on layers of vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.driving import VllmConfig, torch

from vllm.config import set_current_vllm_config  # isort: skip
from vllm.distributed import cleanup_dist_env_and_memory, ensure_model_parallel_initialized  # isort: skip
from vllm.distributed import init_distributed_environment  # isort: skip
from vllm.model_executor.layers.linear import ColumnParallelLinear, UnquantizedLinearMethod  # isort: skip
from evenflow.vllm.worker import is_library_product, warm_up_products  # isort: skip


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/ranks", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
        cleanup_dist_env_and_memory()


@pytest.mark.usefixtures("one_rank")
def test_one_layer_of_each_shape_gets_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    apply = UnquantizedLinearMethod.apply

    def keep(method: Any, layer: Any, rows: Any, bias: Any = None) -> Any:
        product = apply(method, layer, rows, bias)
        shapes.append((tuple(rows.shape), tuple(product.shape)))
        return product

    monkeypatch.setattr(UnquantizedLinearMethod, "apply", keep)
    layers = [ColumnParallelLinear(64, size, bias=False, params_dtype=torch.float32) for size in (32, 96, 32)]
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    line = warm_up_products(layers, [8, 16], torch.float32, None)
    assert shapes == [((rows, 64), (rows, outputs)) for outputs in (32, 96) for rows in (8, 16)]
    assert line.startswith("evenflow: 2 matrix products, each of 2 numbers of rows, in ")
    assert all(map(is_library_product, layers))
    assert not is_library_product(torch.nn.Linear(8, 8))
