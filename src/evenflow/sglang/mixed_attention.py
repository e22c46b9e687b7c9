"""Attention of SGLang batches that contain chunks and decodes, in two calls: one for each kind of rows."""

from __future__ import annotations

import sys
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenflow.model.cuda.attention.decode_split import decode_split
from evenflow.model.cuda.limits import limits_of
from evenflow.model.cuda.pinned import pinned, starts_of
from evenflow.sglang.launch import SGLANG
from evenflow.sglang.uses import FLASH_ATTENTION, FLASH_ATTENTION_MODULE, FLASHINFER, FLASHINFER_UPDATER

_MOST_PARTS = 32  # of a context
_LONG = 4096  # tokens of a context, which take a millisecond
_COPIED_SHARE = 256  # the part of the GPU's memory that a layer's copied contexts may take; SGLang's own way needs none


class MixedBatch(NamedTuple):
    """Of the sequences with chunks, then of those that decode: rows and positions, which include the rows."""

    chunk_rows: list[int]
    chunk_positions: list[int]
    decode_positions: list[int]


def mixed_batch(scheduler: Any, batch: Any) -> MixedBatch | None:
    """None: its attention is SGLang's own, because it has no prefill or no target is kept."""
    steering, starts, rows = scheduler.evenflow, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    if steering is None or not steering.limits_prefill:
        return None
    if batch.forward_mode.is_decode_or_idle() or not starts or not rows:
        return None
    positions = [start + count for start, count in zip(starts, rows, strict=True)]
    if batch.seq_lens_cpu is not None:  # which is exact for decodes too
        positions = batch.seq_lens_cpu.tolist()
    num_chunks = len(rows) - sum(1 for _ in takewhile(lambda count: count == 1, reversed(rows)))
    return MixedBatch(rows[:num_chunks], positions[:num_chunks], positions[num_chunks:])


class MixedFlashAttention:
    """FlashAttention 3: stands in for the function that SGLang calls with all rows of a batch, while a target is kept.

    SGLang gives all rows to one call, which divides no context beside a chunk: one block of threads reads the
    longest context of a decode from end to end, on an H200 in 0.3 ms for every 1,000 tokens in an 8B model. In a
    call of their own, decodes have their contexts divided. If no context is that long, one call is as fast, because
    processors that finish their chunks find other work.
    """

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
        # Descaling has a value for each sequence; some models want the sums of their exponentials too.
        if batch is None or given.get("k_descale") is not None or given.get("return_softmax_lse"):
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
    SGLANG.check_attributes(FLASH_ATTENTION, backend)
    module = sys.modules[type(backend).__module__]
    SGLANG.check_attributes(FLASH_ATTENTION_MODULE, module)
    if backend.use_mla or backend.has_local_attention or backend.is_encoder_decoder:
        return
    if not isinstance(module.flash_attn_with_kvcache, MixedFlashAttention):
        MixedFlashAttention(scheduler, backend, module)


class MixedFlashInfer:
    """FlashInfer: stands in for its wrapper to which SGLang gives batches with chunks, while a target is kept.

    SGLang gives both kinds of rows to one kernel, in which one block of threads reads a whole context beside many
    decodes: on an H200, 0.5 ms for every 1,000 tokens of the longest one in an 8B model. And it gives FlashInfer
    lengths that lie on the device, although it has them on the host too: reading them waits for the batch before,
    and the GPU is idle until the plan is made. Here chunks go to the kernel for prompts, with their contexts copied
    out of the pool, and decodes to the one for decodes. Both are kernels that SGLang has loaded anyway.
    """

    def __init__(self, scheduler: Any, backend: Any) -> None:
        self._scheduler, self._backend = scheduler, backend
        updater = backend.indices_updater_prefill
        self._heads = updater.num_qo_heads, updater.num_kv_heads, updater.head_dim
        self._dtype = updater.q_data_type
        [self._of_sglang] = backend.prefill_wrappers_paged
        self._prepare_by_sglang, self._is_paged_by_sglang = backend.init_forward_metadata, backend.use_paged
        self._chunks, self._decodes = backend.prefill_wrapper_ragged, backend.decode_wrappers[0]
        self._batch: MixedBatch | None = None  # if it is not SGLang's own way
        self._places = torch.empty(0)  # of the chunks' contexts in the pool, on the device
        self._copied: Any = None  # the event after the last plan was copied to the device
        backend.prefill_wrappers_paged = [self]
        backend.init_forward_metadata = self._prepare

    # ---- what SGLang calls ----

    def _prepare(self, batch: Any) -> None:
        self._batch = self._batch_of(batch)
        # SGLang's way with pages puts all rows of a batch into one call, which is `forward` below.
        self._backend.use_paged = self._is_paged_by_sglang or self._batch is not None
        self._prepare_by_sglang(batch)

    def begin_forward(self, rows: Tensor, starts: Tensor, places: Tensor, *args: Any, **more: Any) -> None:
        if self._batch is None:
            self._of_sglang.begin_forward(rows, starts, places, *args, **more)
        else:
            self._plan(self._batch, places)

    def forward_return_lse(self, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = self._of_sglang.forward_return_lse(*args, **more)
        return outputs

    def forward(self, queries: Tensor, kv: tuple[Tensor, Tensor], causal: bool, **more: Any) -> Tensor:
        if self._batch is None:
            by_sglang: Tensor = self._of_sglang.forward(queries, kv, causal=causal, **more)
            return by_sglang
        del more["k_scale"], more["v_scale"]  # of quantized memory
        num_rows = sum(self._batch.chunk_rows)
        outputs = []
        if num_rows:
            keys, values = (_copied(part, self._places) for part in kv)
            outputs.append(self._chunks.forward(queries[:num_rows], keys, values, causal=causal, **more))
        if self._batch.decode_positions:
            outputs.append(self._decodes.forward(queries[num_rows:], kv, **more))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    # ---- a batch ----

    def _batch_of(self, batch: Any) -> MixedBatch | None:
        found = mixed_batch(self._scheduler, batch)
        if found is None or batch.seq_lens_cpu is None:
            return None
        _, num_kv_heads, head_dim = self._heads
        num_bytes = 2 * sum(found.chunk_positions) * num_kv_heads * head_dim * self._dtype.itemsize
        return found if num_bytes <= limits_of(batch.seq_lens.device).memory // _COPIED_SHARE else None

    def _plan(self, batch: MixedBatch, places: Tensor) -> None:
        """FlashInfer writes a plan to pinned memory, from where it is copied once the batches before have ended."""
        if self._copied is not None:
            self._copied.synchronize()
        num_copied = sum(batch.chunk_positions)
        if batch.chunk_rows:
            self._places = places[:num_copied]
            rows, starts = starts_of(batch.chunk_rows), starts_of(batch.chunk_positions)
            self._chunks.plan(rows, starts, *self._heads, causal=True, q_data_type=self._dtype)
        if batch.decode_positions:
            split = None
            if self._backend.decode_use_tensor_cores:
                num_heads, num_kv_heads, _ = self._heads
                contexts = np.asarray(batch.decode_positions)
                split = decode_split(contexts, num_heads, num_kv_heads, limits_of(places.device).num_processors)
            self._decodes.plan(
                starts_of(batch.decode_positions),
                places[num_copied : num_copied + sum(batch.decode_positions)],
                pinned(np.ones(len(batch.decode_positions))),
                *self._heads,
                1,  # token a page
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                fixed_split_size=split,
            )
        if places.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()


def _copied(pool: Tensor, places: Tensor) -> Tensor:
    """Eight bytes at a time, which is several times faster than value by value."""
    rows = pool.view(len(pool), -1).view(torch.int64).index_select(0, places)
    return rows.view(pool.dtype).view(-1, *pool.shape[1:])


def install_flashinfer(scheduler: Any) -> bool:
    """Where SGLang's attention is FlashInfer's, without windows, of memory that is not quantized. False: it is not."""
    backend = scheduler.tp_worker.model_runner.attn_backend
    updater = getattr(backend, "indices_updater_prefill", None)
    if updater is None:
        return False
    SGLANG.check_attributes(FLASHINFER, backend)
    SGLANG.check_attributes(FLASHINFER_UPDATER, updater)
    if updater.update != updater.update_single_wrapper or updater.data_type != updater.q_data_type:
        return False
    if not isinstance(backend.prefill_wrappers_paged[0], MixedFlashInfer):
        MixedFlashInfer(scheduler, backend)
    return True
