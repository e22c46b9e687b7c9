"""FlashAttention 3 in SGLang batches that contain a chunk and a decode with a long context: two calls.

SGLang gives all rows to one call, which divides no context beside a chunk: one block of threads reads the longest
context of a decode from end to end, on an H200 in 0.3 ms for every 1,000 tokens in an 8B model. In a call of their own,
decodes have their contexts divided. If no context is that long, one call is as fast, because processors that finish
their chunks find other work.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from evenflow.model.cuda.limits import limits_of
from evenflow.sglang.mixed_batch import MixedBatch, mixed_batch
from evenflow.sglang.plugin import check_has

_ATTRIBUTES = ("has_local_attention", "init_forward_metadata", "is_encoder_decoder", "num_kv_heads", "use_mla")
_MOST_PARTS = 32  # of a context
_LONG = 4096  # tokens of a context, which take a millisecond


class MixedFlashAttention:
    """Stands in for the function that SGLang calls with all rows of a batch, while a target is kept."""

    def __init__(self, scheduler: Any, backend: Any, module: Any) -> None:
        self._scheduler = scheduler
        self._num_kv_heads = backend.num_kv_heads
        self._of_sglang, self._prepare_by_sglang = module.flash_attn_with_kvcache, backend.init_forward_metadata
        self._batch: MixedBatch | None = None  # if it is not SGLang's own way
        self._starts = torch.empty(0)  # of the decodes' rows
        self._num_parts = 0  # of a context, at most
        module.flash_attn_with_kvcache = self
        backend.init_forward_metadata = self._prepare

    def _prepare(self, batch: Any) -> None:
        self._batch = None
        found = mixed_batch(self._scheduler, batch)
        if found is not None and found.chunk_rows and found.decode_positions:
            positions, device = found.decode_positions, batch.seq_lens.device
            self._num_parts = _num_parts(positions, self._num_kv_heads, limits_of(device).num_processors)
            if self._num_parts > 1:
                self._batch = found
                self._starts = torch.arange(len(positions) + 1, dtype=torch.int32, device=device)
        self._prepare_by_sglang(batch)

    def __call__(self, **given: Any) -> Any:
        batch = self._batch
        if batch is None or given.get("k_descale") is not None:  # which has a value for each sequence
            return self._of_sglang(**given)
        queries: Tensor = given.pop("q")
        table, lengths, starts = given.pop("page_table"), given.pop("cache_seqlens"), given.pop("cu_seqlens_q")
        output: Tensor | None = given.pop("out", None)
        if output is None:
            output = queries.new_empty(*queries.shape[:-1], given["v_cache"].shape[-1])
        given["cu_seqlens_k_new"] = None  # of keys that are not in the cache: there are none
        num_chunks, num_rows, num_decodes = len(batch.chunk_rows), sum(batch.chunk_rows), len(batch.decode_positions)
        self._of_sglang(
            q=queries[:num_rows],
            page_table=table[:num_chunks],
            cache_seqlens=lengths[:num_chunks],
            cu_seqlens_q=starts[: num_chunks + 1],
            out=output[:num_rows],
            **given,
        )
        of_decodes = slice(num_rows, num_rows + num_decodes)  # rows of padding may follow
        self._of_sglang(
            q=queries[of_decodes],
            page_table=table[num_chunks : num_chunks + num_decodes],
            cache_seqlens=lengths[num_chunks : num_chunks + num_decodes],
            cu_seqlens_q=self._starts,
            out=output[of_decodes],
            **given | {"max_seqlen_q": 1, "num_splits": self._num_parts},
        )
        return output


def _num_parts(positions: list[int], num_kv_heads: int, num_processors: int) -> int:
    """Those of the longest context: none of them is long and has more than a processor's share of all positions."""
    share = max(_LONG, sum(positions) * num_kv_heads // num_processors)
    return min(_MOST_PARTS, -(-max(positions) // share))


def install_flash_attention(scheduler: Any) -> None:
    """Where SGLang's attention is FlashAttention 3's of plain decoders."""
    backend = scheduler.tp_worker.model_runner.attn_backend
    if getattr(backend, "fa_impl_ver", None) != 3:
        return
    check_has(backend, _ATTRIBUTES)
    module = sys.modules[type(backend).__module__]
    check_has(module, ("flash_attn_with_kvcache",))
    if backend.use_mla or backend.has_local_attention or backend.is_encoder_decoder:
        return
    if not isinstance(module.flash_attn_with_kvcache, MixedFlashAttention):
        MixedFlashAttention(scheduler, backend, module)
