"""FlashInfer's attention in SGLang batches that contain chunks and decodes: two calls, planned on the host.

SGLang gives both kinds of rows to one kernel, in which one block of threads reads a whole context beside many decodes:
on an H200, 0.5 ms for every 1,000 tokens of the longest one in an 8B model. And it gives FlashInfer lengths that lie on
the device, although it has them on the host too: reading them waits for the batch before, and the GPU is idle until the
plan is made. Here chunks go to the kernel for prompts, with their contexts copied out of the pool, and decodes to the
one for decodes. Both are kernels that SGLang has loaded anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenflow.model.cuda.decode_split import decode_split
from evenflow.model.cuda.limits import limits_of
from evenflow.model.cuda.pinned import pinned, starts_of
from evenflow.sglang.mixed_batch import MixedBatch, mixed_batch
from evenflow.sglang.plugin import check_has

_BACKEND_ATTRIBUTES = (
    *("decode_use_tensor_cores", "decode_wrappers", "init_forward_metadata", "prefill_wrapper_ragged"),
    *("prefill_wrappers_paged", "use_paged"),
)
_UPDATER_ATTRIBUTES = (
    *("data_type", "head_dim", "num_kv_heads", "num_qo_heads", "q_data_type", "update", "update_single_wrapper"),
)
_COPIED_SHARE = 256  # the part of the GPU's memory that a layer's copied contexts may take; SGLang's own way needs none


class MixedFlashInfer:
    """Stands in for the wrapper of FlashInfer's to which SGLang gives batches with chunks, while a target is kept."""

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
    check_has(backend, _BACKEND_ATTRIBUTES)
    check_has(updater, _UPDATER_ATTRIBUTES)
    if updater.update != updater.update_single_wrapper or updater.data_type != updater.q_data_type:
        return False
    if not isinstance(backend.prefill_wrappers_paged[0], MixedFlashInfer):
        MixedFlashInfer(scheduler, backend)
    return True
