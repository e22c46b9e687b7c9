"""What the worker class runs before the first request, on layers of vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.driving import VllmConfig, torch

from vllm.config import set_current_vllm_config  # isort: skip
from vllm.distributed import cleanup_dist_env_and_memory, ensure_model_parallel_initialized  # isort: skip
from vllm.distributed import init_distributed_environment  # isort: skip
from vllm.model_executor.layers.linear import ColumnParallelLinear, UnquantizedLinearMethod  # isort: skip
from evenflow.best_effort import BestEffort  # isort: skip
from evenflow.vllm import worker  # isort: skip
from evenflow.vllm.worker import WarmWorker, is_library_product, warm_up_products  # isort: skip


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/ranks", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
        cleanup_dist_env_and_memory()


def layer_of(size: int, width: int = 64) -> Any:
    """As on a GPU, where a layer keeps its weight: on a CPU vLLM packs it into a copy."""
    layer = ColumnParallelLinear(width, size, bias=False, params_dtype=torch.float32)
    weight = layer.weight
    layer.quant_method.process_weights_after_loading(layer)
    layer.weight = weight
    return layer


def convolution() -> Any:
    """As vLLM's hybrid models make it."""
    layer = layer_of(96, 4)
    layer.weight.data = layer.weight.data.unsqueeze(1)
    return layer


@pytest.mark.usefixtures("one_rank")
def test_one_layer_of_each_shape_gets_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    apply = UnquantizedLinearMethod.apply

    def keep(method: Any, layer: Any, rows: Any, bias: Any = None) -> Any:
        product = apply(method, layer, rows, bias)
        shapes.append((tuple(rows.shape), tuple(product.shape)))
        return product

    monkeypatch.setattr(UnquantizedLinearMethod, "apply", keep)
    layers = [layer_of(size) for size in (32, 96, 32)]
    line = warm_up_products(layers, [8, 16], BestEffort(worker.logger))
    assert shapes == [((rows, 64), (rows, outputs)) for outputs in (32, 96) for rows in (8, 16)]
    assert line.startswith("evenflow: 2 matrix products, each of 2 numbers of rows, in ")
    assert all(map(is_library_product, layers))


@pytest.mark.usefixtures("one_rank")
def test_convolutions_in_linear_layers_are_no_products() -> None:
    assert not is_library_product(convolution())
    assert not is_library_product(torch.nn.Linear(8, 8))


@pytest.mark.usefixtures("one_rank")
def test_products_that_cannot_run_alone_do_not_keep_others_from_it(
    monkeypatch: pytest.MonkeyPatch, caplog_vllm: list[str]
) -> None:
    apply = UnquantizedLinearMethod.apply

    def fail(method: Any, layer: Any, rows: Any, bias: Any = None) -> Any:
        if layer is odd:
            raise RuntimeError("not without the other ranks")
        return apply(method, layer, rows, bias)

    monkeypatch.setattr(UnquantizedLinearMethod, "apply", fail)
    odd = layer_of(32)
    line = warm_up_products([odd, layer_of(96)], [8, 16], BestEffort(worker.logger))
    assert line.startswith("evenflow: 1 matrix products, ")
    assert caplog_vllm == [
        "evenflow: warming up products with a weight of 32 x 64 failed, serving goes on without it: "
        "RuntimeError: not without the other ranks"
    ]


def test_no_warm_up_can_keep_vllm_from_starting(monkeypatch: pytest.MonkeyPatch, caplog_vllm: list[str]) -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]
        def compute_logits(self, rows: Any) -> Any:
            raise RuntimeError("no logits")

        def modules(self) -> Any:
            raise RuntimeError("no layers")

    def fail(rows: int, skip_eplb: bool) -> None:
        raise RuntimeError("no steps")

    started = worker_of(SimpleNamespace(model=Model(), _dummy_run=fail))
    monkeypatch.setattr(WarmWorker.__base__, "compile_or_warm_up_model", lambda _: "as vLLM says")
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert started.compile_or_warm_up_model() == "as vLLM says"
    end = "failed, serving goes on without it: RuntimeError:"
    assert caplog_vllm == [
        f"evenflow: warming up the output layer {end} no logits",
        f"evenflow: warming up matrix products {end} no layers",
        f"evenflow: warming up steps without a graph {end} no steps",
    ]


def worker_of(model_runner: Any) -> Any:
    created = WarmWorker.__new__(WarmWorker)
    model = SimpleNamespace(runner_type="generate", dtype=torch.float32, get_hidden_size=lambda: 8)
    created.vllm_config = SimpleNamespace(
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=2048),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 512]),
    )
    created.model_runner, created.device = model_runner, torch.device("cpu")
    return created


def test_steps_of_several_sizes_run_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of experts are compiled for ranges of rows: a prompt that was the first of its range would wait."""
    sizes = []
    started = worker_of(SimpleNamespace(_dummy_run=lambda rows, skip_eplb: sizes.append(rows)))
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    started._warm_up_steps()
    assert sizes == [767, 768, 1279, 1280, 1791, 1792, 2047, 2048]
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    started._warm_up_steps()
    assert len(sizes) == 8
