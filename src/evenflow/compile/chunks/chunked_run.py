"""Runs one long call as several shorter ones: over the model's own KV cache, or by the model's own `process_chunk`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evenflow.compile.chunks.memory import SMALLEST_CHUNK
from evenflow.compile.chunks.out_of_memory import RanOut, attempt
from evenflow.compile.chunks.sizes import ChunkSizes
from evenflow.compile.model_call import Model, forward_parameters, hugging_face_module, input_shape, num_cached_tokens
from evenflow.errors import UnsupportedModel


def run_in_chunks(model: Model, call: Mapping[str, Any], longest: int, sizes: ChunkSizes) -> tuple[Any, list[int]]:
    """The model's output for `call`, which holds arguments by name and can be chunked; and the chunks' lengths.

    The output equals that of the whole call, in the model's own output class.
    """
    num_cached, (num_sequences, total) = num_cached_tokens(call), input_shape((), call)
    rows = _LogitRows(call.get("logits_to_keep"), total, "logits_to_keep" in forward_parameters(model))
    chunk_call = {name: value for name, value in call.items() if name not in ("logits_to_keep", "return_dict")}
    chunk_call |= {"use_cache": True, "return_dict": True}
    config = hugging_face_module(model).config
    has_cache = call.get("past_key_values") is not None
    keep_cache = call.get("use_cache", getattr(config, "use_cache", True))
    parts: list[dict[str, Any]] = []
    last: Any = None

    def run(start: int, end: int) -> Any:
        nonlocal last
        arguments = {**_slice_call(chunk_call, start, end, num_cached), **rows.asked(start, end)}
        if has_cache and end == total:  # some models return a given cache whether or not they are to use one
            arguments["use_cache"] = keep_cache
        is_smallest = end - start <= SMALLEST_CHUNK
        why_final = f"even {end - start} tokens at a time do not fit" if is_smallest else None
        output = attempt(model, (), arguments, lambda: why_final)
        if not isinstance(output, RanOut):
            if output.past_key_values is None and arguments["use_cache"]:
                raise UnsupportedModel(f"{type(output).__name__} came back without a KV cache")
            chunk_call["past_key_values"] = output.past_key_values
            parts.append(_kept(output, rows, start, end))
            last = output
        return output

    lengths = sizes.run_chunks(num_sequences, num_cached, total, longest, run)
    joined = _joined(last, parts, rows, keep_cache or has_cache)
    return joined if call.get("return_dict", config.return_dict) else joined.to_tuple(), lengths


def _slice_call(call: Mapping[str, Any], start: int, end: int, num_cached: int) -> dict[str, Any]:
    """The arguments for tokens [start, end); the mask also covers the cached ones."""
    sliced = dict(call)
    for name in ("input_ids", "position_ids", "cache_position"):
        if name in call:
            sliced[name] = call[name][..., start:end]
    if "inputs_embeds" in call:
        sliced["inputs_embeds"] = call["inputs_embeds"][..., start:end, :]
    if "attention_mask" in call:
        sliced["attention_mask"] = call["attention_mask"][:, : num_cached + end]
    return sliced


class _LogitRows:
    """The rows of a call's logits that its caller wants, by chunk."""

    def __init__(self, logits_to_keep: int | Tensor | None, total: int, model_can_choose: bool) -> None:
        self._model_can_choose = model_can_choose
        self._are_listed = isinstance(logits_to_keep, Tensor)  # otherwise they are the last ones
        if isinstance(logits_to_keep, Tensor):
            wanted = torch.arange(total, device=logits_to_keep.device)[logits_to_keep]
        else:
            wanted = torch.arange(total)[-(logits_to_keep or 0) :]
        self._wanted, order = wanted.sort()
        self._order = order.argsort()  # the caller's

    def _within(self, start: int, end: int) -> Tensor:
        """The wanted rows of a chunk, counted from its start."""
        return self._wanted[(self._wanted >= start) & (self._wanted < end)] - start

    def asked(self, start: int, end: int) -> dict[str, Any]:
        """The argument for a chunk. A model always computes at least one row."""
        if not self._model_can_choose:
            return {}
        rows = self._within(start, end)
        return {"logits_to_keep": rows if self._are_listed and len(rows) else max(1, len(rows))}

    def kept(self, logits: Tensor, start: int, end: int) -> Tensor:
        """The wanted rows of what the model returned for a chunk."""
        rows = self._within(start, end)
        if self._model_can_choose or (not self._are_listed and len(rows) == end - start):
            return logits[..., : len(rows), :]
        return logits[..., rows.to(logits.device), :]  # a copy: a view would keep all rows in memory

    def in_order(self, logits: Tensor) -> Tensor:
        """Rows in the caller's order, from rows in rising order."""
        return logits[..., self._order.to(logits.device), :] if self._are_listed else logits


def _kept(output: Any, rows: _LogitRows, start: int, end: int) -> dict[str, Any]:
    """The parts of a chunk's output that the whole needs; the rest is freed before the next chunk."""
    kept: dict[str, Any] = {}
    for name, value in output.items():
        if name == "logits":
            kept[name] = rows.kept(value, start, end)
        elif name == "hidden_states":
            kept[name] = value
        elif name != "past_key_values" and value is not None:
            raise UnsupportedModel(f"{type(output).__name__}.{name} cannot be joined from chunks")
    return kept


def _joined(last: Any, parts: list[dict[str, Any]], rows: _LogitRows, keep_cache: bool) -> Any:
    fields: dict[str, Any] = {}
    for name, value in last.items():
        if name == "logits":
            fields[name] = rows.in_order(torch.cat([part["logits"] for part in parts], dim=-2))
        elif name == "hidden_states":
            layers = zip(*(part["hidden_states"] for part in parts), strict=True)
            fields[name] = tuple(torch.cat(layer, dim=-2) for layer in layers)
        elif name != "past_key_values" or keep_cache:
            fields[name] = value
    return type(last)(**fields)


def run_own_chunks(
    model: Any, tokens: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], longest: int, sizes: ChunkSizes
) -> tuple[Any, list[int]]:
    """Calls `model.process_chunk(chunk_tokens, *args, **kwargs)` in order, with chunks of the same kind as `tokens`.

    Results with one entry for each token of their chunk are joined, inside mappings and tuples too. Of any other kind,
    such as the logits of the last position, the last chunk's is the result.
    """
    num_sequences, total = input_shape((tokens,), {})
    has_rows = isinstance(tokens, list) and isinstance(tokens[0], list)
    dimension = int(has_rows) if isinstance(tokens, list) else len(tokens.shape) - 1
    results: list[Any] = []

    def run(start: int, end: int) -> None:
        cut = slice(start, end)
        chunk = [row[cut] for row in tokens] if has_rows else tokens[cut if isinstance(tokens, list) else (..., cut)]
        results.append(model.process_chunk(chunk, *args, **kwargs))

    lengths = sizes.run_chunks(num_sequences, 0, total, longest, run)

    def join(*parts: Any) -> Any:
        if all(isinstance(part, Tensor) and part.ndim > dimension for part in parts):
            is_by_token = [part.shape[dimension] for part in parts] == lengths
            return torch.cat(parts, dim=dimension) if is_by_token else parts[-1]
        if not isinstance(parts[-1], list):
            return parts[-1]
        if has_rows and all(isinstance(row, list) for part in parts for row in part):
            return [_chained(rows, lengths) for rows in zip(*parts, strict=True)]
        return parts[-1] if has_rows else _chained(parts, lengths)

    return pytree.tree_map(join, *results, is_leaf=lambda part: isinstance(part, list)), lengths


def _chained(parts: tuple[list[Any], ...], lengths: list[int]) -> list[Any]:
    return list(chain(*parts)) if [len(part) for part in parts] == lengths else parts[-1]
