"""What the claims about memory and latency of one prefill are tested by: transformers models, whole and in chunks."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evenflow.compile import ChunkedPrefillOptimizer, ChunkedPrefillWrapper
from evenflow.core.blocks import BlockPool

_BENCHMARKS = Path(__file__).parents[1]
sys.path += [str(_BENCHMARKS), str(_BENCHMARKS / "gpu")]

LENGTHS = (47, 2156, 4000, 8000, 12_000, 24_000, 30_000)
_CALLS = 15


def memory() -> dict[str, Any]:
    """Peak memory and seconds of a prefill, whole and in chunks, with eager and SDPA attention."""
    if torch.cuda.is_available():
        from compile_h200 import ONE_BILLION, memory_table

        with torch.inference_mode():
            return {"model": "16 layers, 1B weights", "rows": memory_table(ONE_BILLION, "cuda", LENGTHS)}
    from prefill_memory import in_its_own_process

    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        for attention in ("sdpa", "eager"):
            whole = in_its_own_process(attention, "whole", length)
            chunked = {"not_run": "there is no whole run to compare with"}
            if "peak_mb" in whole:
                chunked = in_its_own_process(attention, "chunked", length)
            case = {"tokens": length, "attention": attention}
            rows += [{**case, "run": "whole", **whole}, {**case, "run": "chunked", **chunked}]
    return {"model": "2 layers of SmolLM2-135M's shape", "rows": rows}


def short_calls() -> dict[str, Any]:
    """An input of 47 tokens: the plain model, the wrapper that leaves it whole, and the wrapper that chunks it."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    with torch.device(device):
        model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, vocab_size=49_152, **shape)).eval()
    ways = {
        "plain": model,
        "wrapped": ChunkedPrefillWrapper(model, ChunkedPrefillOptimizer(), "model"),
        "chunked": ChunkedPrefillWrapper(model, ChunkedPrefillOptimizer(enable_threshold=0), "model"),
    }
    tokens = torch.randint(0, 49_152, (1, 47), device=device)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for _ in range(_CALLS):
            for name, way in ways.items():
                started = time.perf_counter()
                way(tokens, use_cache=True, logits_to_keep=1)
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - started)
    return {"tokens": 47} | {f"{name}_s": statistics.median(times) for name, times in seconds.items()}


def step_parts_on_cuda() -> dict[str, Any]:
    """What can be told without an engine; the recordings say the rest."""
    return {"chunk": 512} | chunk_costs(512)


def chunk_costs(chunk: int) -> dict[str, float]:
    """Milliseconds to take a chunk's blocks from the pool, and to write its keys and values."""
    pool = BlockPool(4096)
    allocating = []
    for _ in range(100):
        started = time.perf_counter()
        pool.allocate(chunk // 16)
        allocating.append(time.perf_counter() - started)
    return {
        "allocation_ms": 1e3 * statistics.median(allocating),
        "kv_write_ms": 1e3 * statistics.median(_kv_write_seconds(chunk)),
    }


def _kv_write_seconds(chunk: int) -> list[float]:
    """Copies into a cache, all layers: of the default model's shape on a CPU, of an 8B Llama's on a GPU."""
    is_cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if is_cuda else ("cpu", torch.float32)
    layers, heads, width = (32, 8, 128) if is_cuda else (30, 3, 64)
    cache = torch.zeros(layers, 2, heads, 12 * chunk, width, device=device, dtype=dtype)
    keys_and_values = torch.randn(layers, 2, heads, chunk, width, device=device, dtype=dtype)
    times = []
    for start in range(0, 12 * chunk, chunk):
        started = time.perf_counter()
        for layer in range(layers):
            cache[layer, :, :, start : start + chunk] = keys_and_values[layer]
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return times


def vllm_defaults() -> dict[str, Any] | None:
    """What the vLLM in .venv-vllm, or else in this environment, does by default; None if there is none."""
    python = _BENCHMARKS.parent / ".venv-vllm" / "bin" / "python"
    if not python.exists() and find_spec("vllm") is None:
        return None
    command = [str(python) if python.exists() else sys.executable, "-c", _DEFAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


_DEFAULTS = """
import dataclasses, json, vllm
from vllm.config import SchedulerConfig
fields = {field.name: field.default for field in dataclasses.fields(SchedulerConfig)}
defaults = {name: getattr(default, "default", default) for name, default in fields.items()}
names = ("enable_chunked_prefill", "long_prefill_token_threshold", "max_num_partial_prefills")
print(json.dumps({"vllm": vllm.__version__} | {name: defaults.get(name, "removed") for name in names}))
"""
