"""Runs a prompt through a model's own `process_chunk`, chunk by chunk, and joins the results.

The model keeps its own state between chunks; this module knows nothing about its cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from evenflow.compile.chunks.chunked_run import ChunkSizer
from evenflow.compile.model_call import input_shape


def run_own_chunks(model: Any, tokens: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizer: ChunkSizer) -> Any:
    """Calls `model.process_chunk(chunk_tokens, *args, **kwargs)` in order, with chunks of the same kind as `tokens`.

    Results with one entry for each token of their chunk are joined, inside mappings and tuples too. Of any other kind,
    such as the logits of the last position, the last chunk's is the result.
    """
    _, total = input_shape((tokens,), {})
    results: list[Any] = []
    lengths: list[int] = []
    while (start := sum(lengths)) < total:
        length = min(max(1, sizer.choose_length(start, total - start)), total - start)
        started = time.perf_counter()
        results.append(model.process_chunk(_cut(tokens, start, start + length), *args, **kwargs))
        sizer.ran(start, length, time.perf_counter() - started)
        lengths.append(length)
    num_dimensions = len(tokens.shape) if hasattr(tokens, "shape") else 1 + isinstance(tokens[0], list)
    return _joined(results, lengths, num_dimensions - 1)


def _cut(tokens: Any, start: int, end: int) -> Any:
    if not isinstance(tokens, list):
        return tokens[..., start:end]
    return [row[start:end] for row in tokens] if isinstance(tokens[0], list) else tokens[start:end]


def _joined(results: list[Any], lengths: list[int], dimension: int) -> Any:
    """`dimension` is that of the tokens, in the input and in results that have one entry for each."""
    last = results[-1]
    if isinstance(last, Tensor):
        fits = last.ndim > dimension and [result.shape[dimension] for result in results] == lengths
        return torch.cat(results, dim=dimension) if fits else last
    if isinstance(last, list):
        return _joined_lists(results, lengths, dimension)
    if isinstance(last, Mapping):
        fields = {name: _joined([result[name] for result in results], lengths, dimension) for name in last}
        return type(last)(**fields)
    if type(last) is tuple:
        return tuple(_joined(list(part), lengths, dimension) for part in zip(*results, strict=True))
    return last


def _joined_lists(results: list[list[Any]], lengths: list[int], dimension: int) -> list[Any]:
    if dimension == 0:
        return list(chain(*results)) if [len(result) for result in results] == lengths else results[-1]
    if any(not isinstance(row, list) for result in results for row in result):
        return results[-1]
    return [_joined_lists(list(rows), lengths, dimension - 1) for rows in zip(*results, strict=True)]
