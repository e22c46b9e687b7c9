"""Attention by FlashInfer: its FlashAttention-3 kernel for chunks and its decode kernel for single tokens.

Two calls a layer: one call for both is half as fast, since a chunk's tile wastes its rows on decodes. On Hopper GPUs a
chunk's keys and values are copied out of their pages first: see `gather`. Import this module only where FlashInfer is
installed. Its kernels are compiled on first use and kept on disk.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import flashinfer
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenflow.core.plan import AttentionWaves
from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention import StepLayout
from evenflow.model.cuda.gather import gather_kv

KNOWN_VERSION = "0.6.14"
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_FLOAT_WORKSPACE = 256 << 20  # for what is split; the plan of a graph counts the largest case
_INT_WORKSPACE = 2 << 20
_FA2_TILE = 16  # rows of a decode's heads, at least
_FA3_TILE = 128  # rows
_GATHERED_TOKENS = 1 << 17  # that chunks may attend to together; beyond them they read pages

# What is called, by the names of its arguments.
_USED_ARGUMENTS = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__": (
        "float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer "
        "paged_kv_indices_buffer paged_kv_last_page_len_buffer"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.plan": (
        "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size window_left q_data_type sm_scale "
        "fixed_split_size"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.run": "q paged_kv_cache out",
    "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
    "BatchPrefillWithPagedKVCacheWrapper.__init__": "float_workspace_buffer kv_layout backend",
    "BatchPrefillWithPagedKVCacheWrapper.plan": (
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk "
        "page_size causal window_left q_data_type sm_scale"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.run": "q paged_kv_cache out",
    "BatchPrefillWithRaggedKVCacheWrapper.__init__": "float_workspace_buffer kv_layout backend",
    "BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk causal window_left q_data_type sm_scale"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.run": "q k v out",
    "BatchPrefillWithRaggedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
    "BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
}


def why_unsupported(dtype: torch.dtype, device: torch.device, head_dim: int | None = None) -> str | None:
    """Why FlashInfer cannot be used for a model here; None if it can."""
    if dtype not in _DTYPES:
        return f"it has no kernels for {dtype}"
    if head_dim is not None and head_dim not in _HEAD_DIMS:
        return f"it has no kernels for heads of {head_dim}, only of {', '.join(map(str, _HEAD_DIMS))}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    for name, used in _USED_ARGUMENTS.items():
        owner, method = name.split(".")
        function = getattr(getattr(flashinfer, owner, None), method, None)
        missing = set(used.split()) - set(inspect.signature(function).parameters) if function else {"the method"}
        if missing:
            version = flashinfer.__version__
            return f"{name} of version {version} lacks {', '.join(sorted(missing))}; {KNOWN_VERSION} is known to work"
    return None


class _Pages(NamedTuple):
    """The pages of some sequences: sequence i has indices[starts[i]:starts[i + 1]]."""

    starts: Tensor  # on the host
    indices: Tensor  # on the device
    last_lengths: Tensor  # on the host


class _Gathering(NamedTuple):
    """What a layer copies out of its pages; see `gather_kv`."""

    block_tables: Tensor
    starts: Tensor
    longest: int
    num_tokens: int


class FlashInferAttention:
    """Implements `AttentionBackend`.

    A plan's copies run on the stream of the layers, after the step before, so that one set of buffers on the device is
    enough, shared by all wrappers of a kind. Only the host memory that they are copied from must not be overwritten too
    early: an event guards it.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        properties = torch.cuda.get_device_properties(device)
        self._num_sms = properties.multi_processor_count
        is_hopper = properties.major == 9
        self._chunk_kernels = ("fa3", "fa2") if is_hopper else ("fa2",)
        self.name = f"FlashInfer {flashinfer.__version__} ({self._chunk_kernels[0]} for chunks)"
        num_gathered = min(_GATHERED_TOKENS, config.max_position) if is_hopper else 0
        shape = (2, num_gathered, config.num_kv_heads, config.head_dim)
        self._gathered = torch.empty(shape, dtype=dtype, device=device)
        # A chunk's tile of one head is a processor's work, however long its context.
        self.waves = AttentionWaves(_FA3_TILE, max(1, self._num_sms // config.num_heads)) if is_hopper else None
        # The other decode kernel exists for a few group sizes alone, and is slower from 4 on.
        self._decode_on_tensor_cores = config.num_heads // config.num_kv_heads not in (1, 2)
        self._float_workspace = torch.zeros(_FLOAT_WORKSPACE, dtype=torch.uint8, device=device)
        self._windows = tuple(dict.fromkeys(config.layer_windows))
        self._int_workspaces = {
            (kind, window): torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=device)
            for kind in ("decodes", "chunks")
            for window in self._windows
        }
        self._decodes = {window: self._decode_wrapper(window) for window in self._windows}
        self._chunks = {
            (kernel, window): self._chunk_wrapper(kernel, window)
            for kernel in self._chunk_kernels
            for window in self._windows
        }
        self._gathered_chunks = {window: self._gathered_wrapper(window) for window in self._windows if is_hopper}
        self._gathering: _Gathering | None = None
        self._graphs: dict[int, dict[int | None, Any]] = {}
        self._graph_indices = torch.empty(0, dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._num_decodes = 0
        self._step: tuple[dict[int | None, Any], dict[int | None, Any]] = ({}, {})
        self._compile()

    def plan(self, layout: StepLayout) -> None:
        """Divide each kind of rows among the GPU's processors: FlashInfer does so on the host."""
        self._copied.synchronize()
        decodes: dict[int | None, Any] = {}
        chunks: dict[int | None, Any] = {}
        if layout.num_decodes:
            decodes = self._graph_wrappers(layout) if layout.is_captured else self._decodes
            self._plan_decodes(decodes, layout)
        self._gathering = None
        if layout.chunk_lengths:
            contexts = np.add(layout.chunk_starts, layout.chunk_lengths)
            kernel = self._chunk_kernel(layout.chunk_lengths)
            if kernel == "fa3" and contexts.sum() <= self._gathered.shape[1]:
                chunks = self._gathered_chunks
                self._plan_gathered(layout, contexts)
            else:
                chunks = {window: self._chunks[kernel, window] for window in self._windows}
                self._plan_chunks(chunks, layout, contexts)
        self._num_decodes, self._step = layout.num_decodes, (decodes, chunks)
        self._copied.record()

    def run(self, layer: int, queries: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device) if out is None else out
        decodes, chunks = self._step
        window, split = self._config.layer_windows[layer], self._num_decodes
        if decodes:
            decodes[window].run(queries[:split], kv, out=output[:split])
        if self._gathering is not None:
            tables, starts, longest, num_tokens = self._gathering
            gather_kv(kv, tables, starts, longest, self._gathered)
            keys, values = self._gathered[:, :num_tokens]
            chunks[window].run(queries[split:], keys, values, out=output[split:])
        elif chunks:
            chunks[window].run(queries[split:], kv, out=output[split:])
        return output

    def _plan_decodes(self, wrappers: dict[int | None, Any], layout: StepLayout) -> None:
        kept = self._graph_indices if layout.is_captured else None
        pages = self._pages(layout.block_tables[: layout.num_decodes], layout.decode_contexts, layout.block_size, kept)
        split = self._decode_split(np.diff(pages.starts.numpy()))
        for window, wrapper in wrappers.items():
            wrapper.plan(
                fixed_split_size=split if window is None else None,
                indptr=pages.starts,
                indices=pages.indices,
                last_page_len=pages.last_lengths,
                head_dim=self._config.head_dim,
                page_size=layout.block_size,
                **self._shared_arguments(window),
            )

    def _decode_split(self, num_pages: NDArray[np.int32]) -> int | None:
        """The pages after which a decode's context is divided among processors, if it must be said.

        FlashInfer divides none as soon as there is a decode for every two processors, so that a single long context
        would hold all others up. This is the least that divides them into as many parts as a graph has room for.
        """
        num_slots = 2 * self._num_sms // self._config.num_kv_heads
        group = self._config.num_heads // self._config.num_kv_heads
        if len(num_pages) <= num_slots or not self._decode_on_tensor_cores or group > _FA2_TILE:
            return None
        room = -(-len(num_pages) * group // _FA2_TILE) + len(num_pages) - 1
        too_small, enough = 0, int(num_pages.max())
        while enough - too_small > 1:
            middle = (too_small + enough) // 2
            if (-(-num_pages // middle)).sum() <= room:
                enough = middle
            else:
                too_small = middle
        return enough if enough < num_pages.max() else None

    def _plan_gathered(self, layout: StepLayout, contexts: NDArray[np.int64]) -> None:
        starts = _starts(contexts)
        on_device = starts.to(self._device, non_blocking=True)
        tables = layout.block_tables[layout.num_decodes :]
        self._gathering = _Gathering(tables, on_device, int(contexts.max()), int(contexts.sum()))
        for window, wrapper in self._gathered_chunks.items():
            wrapper.plan(
                qo_indptr=_starts(layout.chunk_lengths),
                kv_indptr=starts,
                head_dim_qk=self._config.head_dim,
                causal=True,
                **self._shared_arguments(window),
            )

    def _plan_chunks(self, wrappers: dict[int | None, Any], layout: StepLayout, contexts: NDArray[np.int64]) -> None:
        pages = self._pages(layout.block_tables[layout.num_decodes :], contexts, layout.block_size, None)
        for window, wrapper in wrappers.items():
            wrapper.plan(
                qo_indptr=_starts(layout.chunk_lengths),
                paged_kv_indptr=pages.starts,
                paged_kv_indices=pages.indices,
                paged_kv_last_page_len=pages.last_lengths,
                head_dim_qk=self._config.head_dim,
                page_size=layout.block_size,
                causal=True,
                **self._shared_arguments(window),
            )

    def _shared_arguments(self, window: int | None) -> dict[str, Any]:
        return {
            "num_qo_heads": self._config.num_heads,
            "num_kv_heads": self._config.num_kv_heads,
            "window_left": -1 if window is None else window - 1,  # without the position itself
            "q_data_type": self._dtype,
            "sm_scale": self._config.attention_scale,
        }

    def _chunk_kernel(self, lengths: Sequence[int]) -> str:
        """FA3 does not split KV, so that few rows leave most of the GPU idle; FA2 does."""
        num_tiles = sum(-(-length // _FA3_TILE) for length in lengths) * self._config.num_heads
        return self._chunk_kernels[0] if 2 * num_tiles >= self._num_sms else "fa2"

    def _pages(self, tables: Tensor, contexts: Sequence[int] | Any, block_size: int, kept: Tensor | None) -> _Pages:
        """The used entries of the tables one after another, in the first part of `kept` if that is given."""
        context_array = np.asarray(contexts, dtype=np.int64)
        counts = -(-context_array // block_size)
        starts = _starts(counts)
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(len(rows)) - np.repeat(starts[:-1].numpy(), counts)
        places = _pinned(rows * tables.shape[1] + columns).to(self._device, non_blocking=True)
        target = None if kept is None else kept[: len(rows)]
        indices = torch.index_select(tables.reshape(-1), 0, places, out=target)
        return _Pages(starts, indices, _pinned(context_array - (counts - 1) * block_size))

    def _graph_wrappers(self, layout: StepLayout) -> dict[int | None, Any]:
        """For the graph with this number of decodes; it reads the same memory at each replay."""
        size = layout.num_decodes
        if size not in self._graphs:
            if len(self._graph_indices) < layout.block_tables.numel():
                self._graph_indices = torch.zeros_like(layout.block_tables).flatten()
            self._graphs[size] = {
                window: self._decode_wrapper(
                    window,
                    use_cuda_graph=True,
                    paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=self._device),
                    paged_kv_indices_buffer=self._graph_indices,
                    paged_kv_last_page_len_buffer=torch.ones(size, dtype=torch.int32, device=self._device),
                )
                for window in self._windows
            }
        return self._graphs[size]

    def _decode_wrapper(self, window: int | None, **graph: Any) -> Any:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._float_workspace, "NHD", use_tensor_cores=self._decode_on_tensor_cores, **graph
        )
        wrapper.reset_workspace_buffer(self._float_workspace, self._int_workspaces["decodes", window])
        return wrapper

    def _chunk_wrapper(self, kernel: str, window: int | None) -> Any:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._float_workspace, "NHD", backend=kernel)
        wrapper.reset_workspace_buffer(self._float_workspace, self._int_workspaces["chunks", window])
        return wrapper

    def _gathered_wrapper(self, window: int | None) -> Any:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._float_workspace, "NHD", backend="fa3")
        wrapper.reset_workspace_buffer(self._float_workspace, self._int_workspaces["chunks", window])
        return wrapper

    def _compile(self) -> None:
        """All kernels now, so that a missing compiler shows here and not in the first request."""
        block_size = 16
        for length in (1, _FA3_TILE * self._num_sms):
            contexts = torch.tensor((1, length), device=self._device)
            tables = torch.zeros(2, -(-length // block_size), dtype=torch.int32, device=self._device)
            self.plan(StepLayout([1], [0], [length], tables, contexts, block_size))


def _starts(lengths: Sequence[int] | Any) -> Tensor:
    return _pinned(np.concatenate(([0], np.cumsum(lengths))))


def _pinned(numbers: Any) -> Tensor:
    """On the host, in memory that is reused only once it has been copied."""
    return torch.from_numpy(np.asarray(numbers, dtype=np.int32)).pin_memory()
