"""The memory that a prompt's prefill needs, whole and in chunks, computed from a model's shape, not measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TABLE_TOKENS = (47, 500, 2156, 4000, 8000, 24000, 30000)

WHAT_CHUNKS_BOUND = (
    "Chunks bound a step's activations, the logits of prompt_logprobs, and the step's time. They do not shrink the KV "
    "cache. A score matrix would be chunk x prompt, not chunk x chunk, and with a flash or SDPA kernel, which every "
    "engine uses, neither matrix is ever in memory."
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that determine its memory."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    value_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.value_bytes

    @property
    def activation_bytes_per_token(self) -> int:
        """At a layer's widest point: the residual and its normed copy, the MLP's two halves and their product."""
        return (2 * self.hidden_size + 3 * self.intermediate_size) * self.value_bytes


LLAMA_3_1_8B = ModelShape(
    name="Llama-3.1-8B",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position=131072,
)


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes for one prompt, prefilled whole and in chunks. Scores are those of one head in one layer."""

    num_tokens: int
    scores_whole: int  # in 32 bits
    scores_chunked: int
    scores_16bit_whole: int
    scores_16bit_chunked: int
    activations_whole: int
    activations_chunked: int
    prompt_logits_whole: int  # only with prompt_logprobs
    prompt_logits_chunked: int
    kv_cache: int  # the same either way


def memory_table(shape: ModelShape, chunk: int, lengths: Iterable[int] = TABLE_TOKENS) -> list[MemoryRow]:
    """One row per distinct length, in ascending order."""
    return [memory_row(shape, chunk, num_tokens) for num_tokens in sorted(set(lengths))]


def memory_row(shape: ModelShape, chunk: int, num_tokens: int) -> MemoryRow:
    bytes_of_row = {
        "scores": 4 * num_tokens,
        "scores_16bit": 2 * num_tokens,
        "activations": shape.activation_bytes_per_token,
        "prompt_logits": 4 * shape.vocab_size,
    }
    num_rows = {"whole": num_tokens, "chunked": min(chunk, num_tokens)}
    sizes = {f"{what}_{how}": rows * size for what, size in bytes_of_row.items() for how, rows in num_rows.items()}
    return MemoryRow(num_tokens=num_tokens, kv_cache=num_tokens * shape.kv_bytes_per_token, **sizes)
