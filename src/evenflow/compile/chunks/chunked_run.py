"""Runs one long call of a causal language model as several shorter ones over the model's own KV cache.

The result equals that of the whole call, in the model's own output class.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from evenflow.compile.chunks.out_of_memory import RanOut, attempt
from evenflow.compile.model_call import Model, forward_parameters, hugging_face_module, input_shape, num_cached_tokens
from evenflow.errors import UnsupportedModel


class ChunkSizer(Protocol):
    """Chooses the length of each chunk of one call, and learns what came of it."""

    def choose_length(self, start: int, left: int) -> int:
        """Tokens of the next chunk, with `start` tokens before it and `left` still to run."""
        ...

    def ran(self, start: int, length: int, seconds: float) -> None: ...

    def ran_out_of_memory(self, length: int, message: str) -> None:
        """A chunk of this length failed; the next one starts at the same token."""
        ...

    def why_not_smaller(self, length: int) -> str | None:
        """Why running out of memory with a chunk of this length is final."""
        ...


def run_in_chunks(model: Model, call: Mapping[str, Any], sizer: ChunkSizer) -> Any:
    """The model's output for `call`, which holds arguments by name and can be chunked."""
    num_cached, (_, total) = num_cached_tokens(call), input_shape((), call)
    rows = _LogitRows(call.get("logits_to_keep"), total, "logits_to_keep" in forward_parameters(model))
    chunk_call = {name: value for name, value in call.items() if name not in ("logits_to_keep", "return_dict")}
    chunk_call |= {"use_cache": True, "return_dict": True}
    config = hugging_face_module(model).config
    has_cache = call.get("past_key_values") is not None
    keep_cache = call.get("use_cache", getattr(config, "use_cache", True))
    parts: list[dict[str, Any]] = []
    start = 0
    while start < total:
        end = start + min(max(1, sizer.choose_length(num_cached + start, total - start)), total - start)
        arguments = {**_slice_call(chunk_call, start, end, num_cached), **rows.asked(start, end)}
        if has_cache and end == total:  # some models return a given cache whether or not they are to use one
            arguments["use_cache"] = keep_cache
        started = time.perf_counter()
        output = attempt(model, (), arguments, partial(sizer.why_not_smaller, end - start))
        if isinstance(output, RanOut):
            sizer.ran_out_of_memory(end - start, output.message)
            continue
        sizer.ran(num_cached + start, end - start, time.perf_counter() - started)
        if output.past_key_values is None and arguments["use_cache"]:
            raise UnsupportedModel(f"{type(output).__name__} came back without a KV cache")
        chunk_call["past_key_values"] = output.past_key_values
        parts.append(_kept(output, rows, start, end))
        start = end
    joined = _joined(output, parts, rows, keep_cache or has_cache)
    return joined if call.get("return_dict", config.return_dict) else joined.to_tuple()


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
        self._wanted: Tensor | None = None  # in rising order; None: every row
        self._order: Tensor | None = None  # of the caller, if it chose rows one by one
        if isinstance(logits_to_keep, Tensor):
            self._wanted, order = torch.arange(total, device=logits_to_keep.device)[logits_to_keep].sort()
            self._order = order.argsort()
        elif logits_to_keep:
            self._wanted = torch.arange(max(0, total - logits_to_keep), total)

    def within(self, start: int, end: int) -> Tensor | None:
        """The wanted rows of a chunk, counted from its start; None: every row."""
        rows = self._wanted
        return None if rows is None else rows[(rows >= start) & (rows < end)] - start

    def asked(self, start: int, end: int) -> dict[str, Any]:
        """The argument for a chunk. A model always computes at least one row."""
        rows = self.within(start, end)
        if rows is None or not self._model_can_choose:
            return {}
        if len(rows) == 0:
            return {"logits_to_keep": 1}
        if torch.equal(rows, torch.arange(end - start - len(rows), end - start, device=rows.device)):
            return {"logits_to_keep": len(rows)}
        return {"logits_to_keep": rows}

    def kept(self, logits: Tensor, start: int, end: int) -> Tensor | None:
        """The wanted rows of what the model returned for a chunk."""
        rows = self.within(start, end)
        if rows is None:
            return logits
        if len(rows) == 0:
            return None
        return logits if self._model_can_choose else logits[..., rows.to(logits.device), :]

    def in_order(self, logits: Tensor) -> Tensor:
        """Rows in the caller's order, from rows in rising order."""
        return logits if self._order is None else logits[..., self._order.to(logits.device), :]


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
            logits = [part["logits"] for part in parts if part["logits"] is not None]
            fields[name] = rows.in_order(torch.cat(logits, dim=-2))
        elif name == "hidden_states":
            layers = zip(*(part["hidden_states"] for part in parts), strict=True)
            fields[name] = tuple(torch.cat(layer, dim=-2) for layer in layers)
        elif name != "past_key_values" or keep_cache:
            fields[name] = value
    return type(last)(**fields)
