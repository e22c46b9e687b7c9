"""What KV blocks take outside the pool, what that costs in quality, and how long they take to come back.

The text is Python's language reference, which ships with Python (pydoc_data), so that anyone can repeat this. Each
block goes through the codec once, before the next chunk: as if the request were preempted between all its chunks.
    python benchmarks/kv_tier.py                     # the default model, about three minutes on two cores
    python benchmarks/kv_tier.py --parts perplexity --model MODEL_FOLDER --tokens 8192
    python benchmarks/kv_tier.py --parts restores --device cuda --load-format dummy --model CONFIG_FOLDER --tokens 65536
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import eq
from typing import Any, NamedTuple

import torch
from int4_perplexity import text_tokens
from torch import Tensor

from evenflow import LLM, SamplingParams
from evenflow.model.cpu.decoder import Decoder
from evenflow.model.cpu.kv_cache import kv_bytes_per_token, new_sequence_kv
from evenflow.model.cpu.linear import FloatLinear
from evenflow.model.cpu.native_attention import Span
from evenflow.model.kv_codec import CODECS, BlockLayout, Codec
from evenflow.model.loader import LoadedModel, load_model

BLOCK_SIZE = 16
ANSWER_TOKENS = 8


class Quality(NamedTuple):
    perplexity: float
    kv_error: float  # of the KV that went through the codec, relative
    bytes_ratio: float  # of it, encoded


def quality(model: LoadedModel, token_ids: Sequence[int], codec: Codec | None, chunk: int = 64) -> Quality:
    """Of a text, in windows of the model's context. Without a codec, KV stays where it is."""
    decoder = Decoder(model.config, model.weights, FloatLinear, FloatLinear)
    loss = square_error = squares = 0.0
    num_predicted = num_bytes = num_encoded = 0
    for first in range(0, len(token_ids), model.config.max_position):
        window = list(token_ids[first : first + model.config.max_position])
        kv = new_sequence_kv(model.config, len(window))
        for start in range(0, len(window) - 1, chunk):
            fed = window[start : min(start + chunk, len(window) - 1)]
            logits = decoder.logits(decoder.hidden(fed, [Span(kv, start, len(fed))]))
            targets = torch.tensor(window[start + 1 : start + 1 + len(fed)])
            loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            num_predicted += len(fed)
            for block in range(start, start + len(fed) - BLOCK_SIZE + 1, BLOCK_SIZE) if codec is not None else ():
                assert codec is not None
                before = kv[:, :, :, block : block + BLOCK_SIZE].clone()
                content = codec.encode(before)
                after = codec.decode(content, BlockLayout(tuple(before.shape), before.dtype))
                kv[:, :, :, block : block + BLOCK_SIZE] = after
                square_error += float((after - before).square().sum())
                squares += float(before.square().sum())
                num_bytes, num_encoded = num_bytes + before.nbytes, num_encoded + len(content)
    error = math.sqrt(square_error / squares) if squares else 0.0
    return Quality(math.exp(loss / num_predicted), error, num_encoded / num_bytes if num_bytes else 1.0)


def show_perplexity(model: LoadedModel, token_ids: Sequence[int]) -> None:
    plain = quality(model, token_ids, None)
    print(f"\nperplexity of {len(token_ids)} tokens: {plain.perplexity:.4f}")
    for codec in CODECS.values():
        found = quality(model, token_ids, codec)
        change = found.perplexity / plain.perplexity - 1
        size = f"{found.bytes_ratio:.3f} of the bytes"
        print(f"{codec.name:10} {size}, error of KV {found.kv_error:.3%}, perplexity {change:+.4%}", flush=True)


# ---- codecs and libraries ----


def _best_ms(run: Callable[..., Any], *arguments: object) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run(*arguments)
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def _huffman(data: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(data) + packer.flush()


def _libraries() -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    """General compressors; those that are not installed are left out."""
    found: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        "zlib, Huffman coding alone": (_huffman, partial(zlib.decompress, wbits=-zlib.MAX_WBITS)),
        "zlib, level 1": (partial(zlib.compress, level=1), zlib.decompress),
    }
    with suppress(ImportError):
        zstandard = importlib.import_module("zstandard")
        found["zstandard, level 1"] = partial(zstandard.compress, level=1), zstandard.decompress
    with suppress(ImportError):
        lz4 = importlib.import_module("lz4.frame")
        found["lz4"] = lz4.compress, lz4.decompress
    return found


def show_codecs(block: Tensor) -> None:
    """On one thread, as in the engine."""
    layout = BlockLayout(tuple(block.shape), block.dtype)
    print(
        f"\none block of {BLOCK_SIZE} tokens: {layout.num_bytes / 1e3:.0f} kB; copied in {_best_ms(block.clone):.2f} ms"
    )
    for codec in CODECS.values():
        content = codec.encode(block)
        times = _best_ms(codec.encode, block), _best_ms(codec.decode, content, layout)
        _show_packing(codec.name, len(content) / layout.num_bytes, *times)
    planes = block.contiguous().view(-1).view(torch.uint8).numpy().reshape(-1, block.element_size()).T
    for name, data in (("the highest bytes", planes[-1].tobytes()), ("all bytes, by place", planes.tobytes())):
        print(f"{name}:")
        for library, (pack, unpack) in _libraries().items():
            packed = pack(data)
            times = _best_ms(pack, data), _best_ms(unpack, packed)
            _show_packing(library, len(packed) / len(data), *times)


def _show_packing(name: str, ratio: float, pack_ms: float, unpack_ms: float) -> None:
    print(f"  {name:28} {ratio:.3f}  packed in {pack_ms:.2f} ms, unpacked in {unpack_ms:.2f} ms", flush=True)


def sample_block(model: LoadedModel, token_ids: Sequence[int]) -> Tensor:
    """A block in the middle of the text."""
    decoder = Decoder(model.config, model.weights, FloatLinear, FloatLinear)
    length = min(len(token_ids), 512, model.config.max_position)
    kv = new_sequence_kv(model.config, length)
    decoder.hidden(token_ids[:length], [Span(kv, 0, length)], [length - 1])
    start = length // 2 // BLOCK_SIZE * BLOCK_SIZE
    return kv[:, :, :, start : start + BLOCK_SIZE].contiguous()


# ---- restore against recompute ----


def show_restores(model: LoadedModel, token_ids: Sequence[int], forms: Sequence[str], settings: dict[str, Any]) -> None:
    """Time to first token of a prompt that is computed, and of one that comes back: two that evict each other."""
    longest = min(len(token_ids) // 2, model.config.max_position - ANSWER_TOKENS - 1)
    for length in (longest // 4, longest):
        print(f"\nfirst token of a prompt of {length} tokens:", flush=True)
        prompts = [list(token_ids[:length]), list(token_ids[-length:])]
        for form in forms:
            with tempfile.TemporaryDirectory() as folder:
                room = 2 * length * kv_bytes_per_token(model.config)  # of float32: for both, in any format
                on_host = {"kv_offload_memory": max(4 << 30, room), "kv_offload_format": form}
                (computed, expected), (restored, tokens) = _first_tokens(model, prompts, settings | on_host)
                same = f"{sum(map(eq, tokens, expected))} of {len(tokens)} answers the same"
                print(f"  computed {computed:.3f} s; from the host, {form}: {restored:.3f} s, {same}", flush=True)
                on_disk = {"cache_dir": folder, "kv_offload_format": form}
                _first_tokens(model, prompts, settings | on_disk)
                (after_restart, _), _ = _first_tokens(model, prompts, settings | on_disk)
                print(f"  from disk after a restart, {form}: {after_restart:.3f} s", flush=True)


def _first_tokens(
    model: LoadedModel, prompts: Sequence[list[int]], settings: dict[str, Any]
) -> list[tuple[float, list[list[int]]]]:
    """Mean TTFT and answers of two rounds. A short prompt goes first: the first step of a process is slower."""
    # On a CPU the pool keeps float32 twice, for requests and for prefixes; on a GPU 16 bits once.
    factor, policy = (2, "fixed:512") if settings["device"] == "cpu" else (0.5, "fixed:8192")
    room = int((len(prompts[0]) + ANSWER_TOKENS + 3 * BLOCK_SIZE) * factor * kv_bytes_per_token(model.config))
    rounds, sampling = [], SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(policy=policy, kv_cache_memory=room, **settings) as llm:
        llm.generate([prompts[0][:8]], sampling)
        for _ in range(2):
            outputs = [llm.generate([prompt], sampling)[0] for prompt in prompts]
            ttft = sum(output.ttft_s or 0.0 for output in outputs) / len(outputs)
            print(f"    {[output.num_cached_tokens for output in outputs]} tokens were there", flush=True)
            rounds.append((ttft, [list(output.token_ids) for output in outputs]))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--parts", nargs="*", default=["codecs", "perplexity", "restores"], help="which to run")
    parser.add_argument("--formats", nargs="*", default=[*CODECS], choices=[*CODECS], help="of the restores")
    parser.add_argument("--device", default="cpu", help="of the restores")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights and tokens, for restores alone")
    arguments = parser.parse_args()
    is_dummy = arguments.load_format == "dummy"
    model = load_model(arguments.model, is_dummy=is_dummy)
    if is_dummy:
        token_ids = random.Random(0).choices(range(1000, model.config.vocab_size), k=arguments.tokens)
    else:
        token_ids = text_tokens(model, arguments.tokens)
    with torch.inference_mode():
        if "codecs" in arguments.parts:
            block = sample_block(model, token_ids)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            show_codecs(block)
            torch.set_num_threads(threads)
        if "perplexity" in arguments.parts:
            show_perplexity(model, token_ids)
    if "restores" in arguments.parts:
        settings = {"model": arguments.model, "device": arguments.device, "load_format": arguments.load_format}
        show_restores(model, token_ids, arguments.formats, settings)


if __name__ == "__main__":
    main()
