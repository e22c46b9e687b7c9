"""Memory of a prefill with and without chunks, and decoding eager, compiled and with CUDA graphs, on one GPU.

Needs torch, transformers and this checkout: `PYTHONPATH=src python benchmarks/gpu/compile_h200.py`. Random weights in
the shape of a Llama with one billion parameters. Prints one JSON object. `--tiny` runs in seconds, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from evenflow.advisor.memory import TABLE_TOKENS
from evenflow.compile import ChunkedPrefillOptimizer, ChunkedPrefillWrapper, create_enhanced_compiler
from evenflow.compile.aot.cuda_graphs import GraphedModel

ONE_BILLION: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
_TINY: dict[str, Any] = {**ONE_BILLION, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
_NEW_TOKENS = 128
_TIMED_RUNS = 2
_PROMPT_TOKENS = 128


def make_model(sizes: dict[str, Any], device: str, attention: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, max_position_embeddings=32768, eos_token_id=None, pad_token_id=0, bos_token_id=1)
    config._attn_implementation = attention
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def tokens_of(model: Any, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, model.config.vocab_size, (1, length), generator=generator).to(model.device)


def prefill(run: Callable[..., Any], tokens: torch.Tensor) -> dict[str, Any]:
    """Peak additional memory, KV cache included, and seconds: the first run loads kernels and takes memory anew."""
    figures = measured_prefill(run, tokens)
    if "seconds" in figures:
        figures["seconds"] = min(measured_prefill(run, tokens)["seconds"] for _ in range(_TIMED_RUNS))
    return figures


def measured_prefill(run: Callable[..., Any], tokens: torch.Tensor) -> dict[str, Any]:
    device = tokens.device.type
    try:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        started = time.perf_counter()
        output = run(tokens, use_cache=True, logits_to_keep=1)
        synchronize(device)
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
        layers = output.past_key_values.layers
        kv_bytes = sum(part.nbytes for layer in layers for part in (layer.keys, layer.values))
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    return {"peak_mb": peak / 1e6, "kv_mb": kv_bytes / 1e6, "seconds": seconds}


def memory_table(sizes: dict[str, Any], device: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for attention in ("sdpa", "eager"):
        model = make_model(sizes, device, attention)
        chunked = ChunkedPrefillWrapper(model, ChunkedPrefillOptimizer(enable_threshold=0), "model")
        prefill(model, tokens_of(model, 64))  # libraries allocate their workspaces
        for length in lengths:
            for name, run in (("whole", model), ("chunked", chunked)):
                figures = prefill(run, tokens_of(model, length))
                rows.append({"attention": attention, "tokens": length, "run": name, **figures})
        del model, chunked, run
    return rows


def generated(model: Any, tokens: torch.Tensor, num_new: int) -> tuple[list[int], float]:
    """The answer, and milliseconds per decoding step: all tokens less the first two."""
    synchronize(tokens.device.type)
    seconds = []
    for count in (2, num_new):
        started = time.perf_counter()
        output = model.generate(tokens, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(tokens))
        synchronize(tokens.device.type)
        seconds.append(time.perf_counter() - started)
    return output[0, tokens.shape[1] :].tolist(), (seconds[1] - seconds[0]) / (num_new - 2) * 1e3


def decode_rates(sizes: dict[str, Any], device: str, num_new: int, seconds_left: Callable[[], float]) -> dict[str, Any]:
    model = make_model(sizes, device, "sdpa")
    tokens = tokens_of(model, _PROMPT_TOKENS)
    result: dict[str, Any] = {}
    measure_decoding(result, "eager", model, tokens, num_new)
    for mode in ("reduce-overhead", "default"):
        if seconds_left() > 60:
            compiled, result[f"mode {mode}"] = compiled_twice(model, tokens, mode)
            measure_decoding(result, f"compiled, mode {mode}", compiled, tokens, num_new)
    if device == "cuda" and seconds_left() > 60:
        started = time.perf_counter()
        step = torch.compile(model, dynamic=False, options={"emulate_precision_casts": True})
        measure_decoding(result, "graphs over Inductor's kernels", GraphedModel(model, step), tokens, num_new)
        result["graphs over Inductor's kernels"]["with_compilation_s"] = time.perf_counter() - started
    return result


def compiled_twice(model: Any, tokens: torch.Tensor, mode: str) -> tuple[Any, dict[str, Any]]:
    """The compiled model, and the reports of a first start and of a second one that finds its files on disk."""
    starts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for start in ("first start", "second start"):
            compiler = create_enhanced_compiler(cache_dir=folder, mode=mode, progress=False)
            compiled = compiler.compile_model(model, tokens, "model")
            starts[start] = compiler.get_performance_report()["compilations"]
    return compiled, starts


def measure_decoding(result: dict[str, Any], name: str, run: Any, tokens: torch.Tensor, num_new: int) -> None:
    """Record a step's time under `name`; answers are compared with the first one."""
    generated(run, tokens, 4)
    answer, step_ms = min((generated(run, tokens, num_new) for _ in range(3)), key=lambda pair: pair[1])
    wanted = result.setdefault("answer", answer)
    same = next((i for i, (a, b) in enumerate(zip(answer, wanted, strict=True)) if a != b), len(wanted))
    print(name, step_ms, same, file=sys.stderr, flush=True)
    result[name] = {"step_ms": step_ms, "same_leading_tokens": same, "replays": getattr(run, "num_replays", None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the script")
    parser.add_argument("--time-limit", type=float, default=280.0, help="seconds after which no further part starts")
    parser.add_argument("--parts", default="memory,decode")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, force=True)
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, lengths = (_TINY, (47, 600)) if options.tiny else (ONE_BILLION, TABLE_TOKENS)
    result: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    result["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    with torch.inference_mode():
        if "memory" in options.parts:
            result["memory"] = memory_table(sizes, device, lengths)
            print(json.dumps(result), file=sys.stderr, flush=True)  # in case the rest fails
        if "decode" in options.parts:
            num_new = 8 if options.tiny else _NEW_TOKENS
            left = lambda: options.time_limit - (time.perf_counter() - started)  # noqa: E731
            result["decode"] = decode_rates(sizes, device, num_new, left)
    result["decode"].pop("answer", None) if "decode" in result else None
    result["seconds"] = time.perf_counter() - started
    print(json.dumps(result))


if __name__ == "__main__":
    main()
