"""Microbenchmarks behind the choices in evenflow.model: each variant of an operation against the simplest one.

    python benchmarks/cpu_ops.py                 # all, on one thread, by CPU time: stable on a busy machine too
    python benchmarks/cpu_ops.py --threads 2 linears attention

Variants of a row run in turn, round after round; medians count. Shapes are SmolLM2-135M's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.model.config import ModelConfig, RopeConfig
from evenflow.model.cpu.attention import TorchStepAttention, attention_for
from evenflow.model.cpu.decoder import Decoder, RmsNorm
from evenflow.model.cpu.int4 import (
    DynamicInt8Linear,
    NativeInt4Linear,
    NativeInt8Linear,
    WeightOnlyInt4Linear,
    int4_linear,
)
from evenflow.model.cpu.kv_cache import new_sequence_kv
from evenflow.model.cpu.linear import FloatLinear, can_pack, fixed_order_linear, pack, packed_linear
from evenflow.model.cpu.native_attention import Span
from evenflow.model.formats.weights import RandomWeights
from evenflow.native.build import library
from evenflow.native.matrix import float_matrix

Variants = dict[str, Callable[[], object]]

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM = 576, 1536, 9, 3, 64
_LAYER_SHAPES = ((960, _HIDDEN), (_HIDDEN, _HIDDEN), (2 * _INNER, _HIDDEN), (_HIDDEN, _INNER))
_COPIES = 8  # of a layer's weights, too large together for the small caches


def _config(num_layers: int = 1) -> ModelConfig:
    return ModelConfig(
        architecture="bench",
        vocab_size=128,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_layers=num_layers,
        num_heads=_HEADS,
        num_kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        max_position=8192,
        rms_norm_eps=1e-5,
        attention_scale=_HEAD_DIM**-0.5,
        rope=RopeConfig(theta=100000.0, rotary_dim=_HEAD_DIM, scaling=None),
        layer_windows=(None,) * num_layers,
        layer_uses_rope=(True,) * num_layers,
        tie_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        bos_token_id=None,
        eos_token_ids=(),
    )


def _compare(label: str, variants: Variants, rounds: int) -> None:
    """Print the first variant's time, and how many times as fast each other one is."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(rounds + 1):
        for name, run in variants.items():
            began = clock()
            run()
            if round_number:
                seconds[name].append(clock() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first = next(iter(medians))
    ratios = "  ".join(f"{name} {medians[first] / median:.2f}x" for name, median in medians.items() if name != first)
    print(f"{label:28} {first} {medians[first] * 1e3:.3f} ms  {ratios}", flush=True)


def _linears() -> None:
    weights = [torch.randn(shape) * 0.02 for _ in range(_COPIES) for shape in _LAYER_SHAPES]
    forms: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "F.linear": [partial(F.linear, weight=weight) for weight in weights],
        "input-major": [partial(F.linear, weight=weight.t().contiguous().t()) for weight in weights],
    }
    if can_pack():
        forms["packed"] = [partial(packed_linear, packed=pack(weight)) for weight in weights]
    if can_pack(torch.bfloat16):
        forms["packed bf16"] = [partial(_bfloat16_linear, packed=pack(weight.bfloat16())) for weight in weights]
    if library():
        forms["native"] = [float_matrix(weight, None, max_rows=512) for weight in weights]
        forms["native int4"] = [NativeInt4Linear(weight, None).native for weight in weights]
    forms["int4"] = [int4_linear(weight, None) for weight in weights]
    for count in (1, 2, 4, 6, 8, 16, 32, 64, 256, 512):
        rows = [torch.randn(count, weight.shape[1]) for weight in weights]
        variants: Variants = {
            name: partial(_run_all, linears, rows)
            for name, linears in forms.items()
            if count <= 64 or not name.startswith("native")
        }
        _compare(f"linears, {count} rows", variants, rounds=9 if count < 64 else 3)


def _bfloat16_linear(rows: Tensor, packed: Tensor) -> Tensor:
    return packed_linear(rows.bfloat16(), packed)


def _run_all(functions: list[Callable[[Tensor], Tensor]], inputs: list[Tensor]) -> None:
    for function, rows in zip(functions, inputs, strict=True):
        function(rows)


def _head() -> None:
    weight = torch.randn(49152, _HIDDEN)
    input_major = weight.t().contiguous().t()
    int4, int8 = WeightOnlyInt4Linear(weight, None), DynamicInt8Linear(weight, None)
    for count in (1, 6, 16):
        rows = torch.randn(count, _HIDDEN)
        variants: Variants = {
            "F.linear": partial(F.linear, rows, weight),
            "input-major": partial(F.linear, rows, input_major),
            "int4": partial(int4, rows),
            "int8": partial(int8, rows),
        }
        if library():
            variants["native int8"] = partial(NativeInt8Linear(weight, None).native, rows)
        _compare(f"output head, {count} rows", variants, rounds=9)


def _attention() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    kv = torch.randn(1, 2, _KV_HEADS, 4096, _HEAD_DIM)
    for start, count in ((100, 1), (1000, 1), (3000, 1), (3000, 16), (0, 512), (1000, 64), (2500, 512), (0, 2048)):
        end = start + count
        packed = torch.randn(count, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM)
        query = packed[:, : _HEADS * _HEAD_DIM].view(1, count, _HEADS, _HEAD_DIM).transpose(1, 2)
        keys, values = kv[:, 0, :, :end], kv[:, 1, :, :end]
        mask = torch.ones(count, end, dtype=torch.bool).tril(start)
        folded = query.reshape(1, _KV_HEADS, -1, _HEAD_DIM)
        folded_mask = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf")).repeat(_HEADS // _KV_HEADS, 1)
        masked = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        variants: Variants = {
            "masked SDPA": partial(masked, query, keys, values),
            "folded, masked": partial(flash, folded, keys, values, attn_mask=folded_mask),
            "on torch (and KV written)": partial(TorchStepAttention(_config(), [Span(kv, start, count)]), 0, packed),
            "as chosen": partial(attention_for(_config())([Span(kv, start, count)]), 0, packed),
        }
        _compare(f"attention, {count} rows at {start}", variants, rounds=30 if count == 1 else 5)
    for name, places in {
        "6 decodes at 500": [(500, 1)] * 6,
        "and 256 rows at 1000": [(500, 1)] * 6 + [(1000, 256)],
    }.items():
        spans = [Span(torch.randn(1, 2, _KV_HEADS, 1280, _HEAD_DIM), start, count) for start, count in places]
        packed = torch.randn(sum(count for _, count in places), (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM)
        mixed: Variants = {
            "on torch": partial(TorchStepAttention(_config(), spans), 0, packed),
            "as chosen": partial(attention_for(_config())(spans), 0, packed),
        }
        _compare(f"attention, {name}", mixed, rounds=15)


def _norms() -> None:
    weight = torch.randn(_HIDDEN)
    for count in (1, 6, 512):
        rows = [torch.randn(count, _HIDDEN)] * 100
        plain = partial(F.rms_norm, normalized_shape=(_HIDDEN,), weight=weight, eps=1e-5)
        variants: Variants = {
            "100 x F.rms_norm": partial(_run_all, [plain] * 100, rows),
            "as chosen": partial(_run_all, [RmsNorm(weight, 1e-5)] * 100, rows),
        }
        _compare(f"RMSNorm, {count} rows", variants, rounds=9)


def _kv_memory() -> None:
    """A sequence's memory: newly allocated, or reused."""
    config, count = _config(num_layers=30), 512
    kept = new_sequence_kv(config, 4096)

    def write(kv: Tensor) -> None:
        kv[:, :, :, :count].fill_(1.0)

    variants: Variants = {
        "new memory": lambda: write(new_sequence_kv(config, 4096)),
        "kept memory": lambda: write(kept),
    }
    _compare(f"writing the KV of {count} tokens", variants, rounds=9)


def _steps() -> None:
    """Steps of eight layers: what the deterministic mode costs."""
    config = _config(num_layers=8)
    weights = dict(RandomWeights.of(config))
    usual = Decoder(config, weights, FloatLinear)
    fixed = Decoder(config, weights, fixed_order_linear, fixed_order=True)
    for label, places in {
        "1 decode at 500": [(500, 1)],
        "1 decode at 7000": [(7000, 1)],
        "8 decodes at 500": [(500, 1)] * 8,
        "32 decodes at 500": [(500, 1)] * 32,
        "64 rows at 1000": [(1000, 64)],
        "512 rows at 0": [(0, 512)],
        "512 rows at 2500": [(2500, 512)],
        "512 rows at 7000": [(7000, 512)],
    }.items():
        spans = [Span(new_sequence_kv(config, start + count), start, count) for start, count in places]
        token_ids = [7] * sum(count for _, count in places)
        variants: Variants = {
            "usual": partial(usual.hidden, token_ids, spans),
            "deterministic": partial(fixed.hidden, token_ids, spans),
        }
        _compare(label, variants, rounds=15 if len(token_ids) <= 64 else 3)


_BENCHMARKS = {
    "linears": _linears,
    "head": _head,
    "attention": _attention,
    "norms": _norms,
    "kv": _kv_memory,
    "steps": _steps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(_BENCHMARKS)} (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        for name in arguments.names or _BENCHMARKS:
            _BENCHMARKS[name]()


if __name__ == "__main__":
    main()
