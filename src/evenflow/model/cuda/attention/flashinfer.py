"""Attention by FlashInfer's FlashAttention-3 kernel for chunks and our own kernel for decodes.

Two calls per layer: one call for both is half as fast, since a chunk's tile wastes its rows on decodes. On Hopper GPUs
chunks with long contexts take two: see `context_parts`. For many rows, keys and values are copied out of their pages
first: see `gather`. Import this module only where FlashInfer is installed. Its kernels are compiled on first use and
kept on disk.

In deterministic mode chunks are never divided and always copied. FlashAttention 3 reads a row's positions in blocks
from last to first, and masked positions add exactly zero, so a row's bits do not depend on the other rows of its tile;
but its blocks are smaller when it reads pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flashinfer
import numpy as np
import torch
from torch import Tensor

from evenflow.core.plan import AttentionWaves
from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention.backend import StepLayout
from evenflow.model.cuda.attention.context_parts import MAX_PART_ROWS, TILE_ROWS, Spans, divide_contexts
from evenflow.model.cuda.attention.gather import gather_kv
from evenflow.model.cuda.attention.merge import merge_parts
from evenflow.model.cuda.attention.triton_decodes import DecodeAttention
from evenflow.model.cuda.graphs import capture
from evenflow.model.cuda.pinned import pinned, starts_of

KNOWN_VERSION = "0.6.14"
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_FLOAT_WORKSPACE = 256 << 20  # for split contexts
_INT_WORKSPACE = 2 << 20
_MIN_FA3_ROWS = 65  # with fewer, more than half of a tile is idle
_MIN_GATHERED_ROWS = 384  # with fewer, the copy costs more than it gains
_GATHERED_TOKENS = 1 << 17  # of copied context; beyond it chunks read pages

# Calls by their argument names.
_USED_ARGUMENTS = {
    "BatchPrefillWithPagedKVCacheWrapper.__init__": "float_workspace_buffer kv_layout backend",
    "BatchPrefillWithPagedKVCacheWrapper.plan": (
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk "
        "page_size causal window_left q_data_type sm_scale"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.run": "q paged_kv_cache out lse return_lse",
    "BatchPrefillWithRaggedKVCacheWrapper.__init__": "float_workspace_buffer kv_layout backend",
    "BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk causal window_left q_data_type sm_scale"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.run": "q k v out lse return_lse",
    "BatchPrefillWithRaggedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
    "BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
}


def why_unsupported(dtype: torch.dtype, device: torch.device, head_dim: int | None = None) -> str | None:
    """The reason why FlashInfer cannot run a model here; None if it can."""
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


class _Gathering(NamedTuple):
    """A layer's copy out of its pages; see `gather_kv`."""

    block_tables: Tensor
    starts: Tensor
    longest: int
    num_tokens: int


class _Division(NamedTuple):
    """The call for parts of contexts, and the merge of its results; see `ContextParts`."""

    wrapper: Any
    part_rows: Tensor
    merges: Tensor


class _Round(NamedTuple):
    """Chunks of a step that run together."""

    rows: slice
    calls: dict[int | None, Any]  # by window size
    gathering: _Gathering | None  # None: calls read pages
    division: _Division | None


class _PartMemory(NamedTuple):
    """A layer's inputs and outputs of parts, by row."""

    queries: Tensor
    outputs: Tensor
    log_sums: Tensor
    own_log_sums: Tensor


class FlashInferAttention:
    """Implements `AttentionBackend`.

    A plan's copies run on the layers' stream, after the step before, so all wrappers of a kind share one set of device
    buffers. Only the host memory behind the copies must not be overwritten too early: an event guards it.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, deterministic: bool = False
    ) -> None:
        self._config, self._dtype, self._device, self._deterministic = config, dtype, device, deterministic
        properties = torch.cuda.get_device_properties(device)
        self._num_sms = properties.multi_processor_count
        is_hopper = properties.major == 9
        assert is_hopper or not deterministic
        self._chunk_kernels = ("fa3", "fa2") if is_hopper else ("fa2",)
        mode = ", deterministic" if deterministic else ""
        self.name = f"FlashInfer {flashinfer.__version__} ({self._chunk_kernels[0]} for chunks{mode})"
        num_gathered = min(_GATHERED_TOKENS, config.max_position) if is_hopper else 0
        if deterministic:
            num_gathered = config.max_position  # of a sequence, which must always fit
        shape = (2, num_gathered, config.num_kv_heads, config.head_dim)
        self._gathered = torch.empty(shape, dtype=dtype, device=device)
        self.waves = AttentionWaves(TILE_ROWS, num_tiles=1) if is_hopper else None
        self._float_workspace = torch.zeros(_FLOAT_WORKSPACE, dtype=torch.uint8, device=device)
        self._windows = tuple(dict.fromkeys(config.layer_windows))
        self._int_workspaces = {
            (kind, window): self._new_int_workspace() for kind in ("chunks", "parts") for window in self._windows
        }
        # Decodes share the workspace: their parts are merged before chunks run.
        self._decodes = DecodeAttention(config, dtype, device, self._float_workspace.view(torch.float32))
        self._chunks = {
            (kernel, window): self._paged_wrapper(kernel, "chunks", window)
            for kernel in self._chunk_kernels
            for window in self._windows
        }
        self._gathered_chunks: list[dict[int | None, Any]] = []  # by round
        if is_hopper:
            shared = {window: self._int_workspaces["chunks", window] for window in self._windows}
            self._gathered_chunks.append({window: self._gathered_wrapper(memory) for window, memory in shared.items()})
        self._divides = is_hopper and None in self._windows and not deterministic
        if self._divides:
            self._paged_parts = self._paged_wrapper("fa3", "parts", None)
            self._gathered_parts = self._gathered_wrapper(self._int_workspaces["parts", None])
            self._part_memory = self._new_part_memory()
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._repeated: torch.cuda.CUDAGraph | None = None
        self._blocks: list[Tensor] = []  # read by the step, not by graphs
        self._rounds: list[_Round] = []
        self._compile()

    def plan(self, layout: StepLayout) -> None:
        """Divide each kind of rows among the GPU's processors, on the host."""
        self._copied.synchronize()
        self._blocks = []
        tables = layout.block_tables[: layout.num_decodes]
        if layout.num_decodes and not layout.is_captured:
            # Copies, because `repeated` increments them.
            tables = tables[:, : -(-max(layout.decode_contexts) // layout.block_size)].clone()
            self._blocks.append(tables)
        self._decodes.plan(layout, tables)
        self._rounds = []
        first, row = 0, layout.num_decodes
        for number, count in enumerate(self._round_sizes(layout)):
            chunks = slice(first, first + count)
            rows = slice(row, row + sum(layout.chunk_lengths[chunks]))
            self._rounds.append(self._plan_round(layout, chunks, rows, number))
            first, row = chunks.stop, rows.stop
        self._copied.record()

    def run(self, layer: int, queries: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device) if out is None else out
        window = self._config.layer_windows[layer]
        self._decodes.run(layer, queries, kv, output)
        for rows, calls, gathering, division in self._rounds:
            memory: tuple[Tensor, ...] = (kv,)
            if gathering is not None:
                tables, starts, longest, num_tokens = gathering
                gather_kv(kv, tables, starts, longest, self._gathered)
                memory = tuple(self._gathered[:, :num_tokens])
            if division is None or window is not None:
                calls[window].run(queries[rows], *memory, out=output[rows])
            else:
                self._run_divided(division, calls[window], queries[rows], memory, output[rows])
        return output

    def repeated(self, queries: Tensor, kv: Tensor, out: Tensor) -> Callable[[], None] | None:
        """A graph of one layer, captured for this step. It ends by advancing all block numbers to the next layer."""
        if not self._rounds or len(self._windows) > 1:
            return None

        def run() -> None:
            self.run(0, queries, kv.flatten(0, 1), out)
            torch._foreach_add_(self._blocks, kv.shape[1])

        self._repeated, _ = capture(run, self._capture_stream)
        return self._repeated.replay

    def _run_divided(
        self, division: _Division, own: Any, queries: Tensor, memory: tuple[Tensor, ...], output: Tensor
    ) -> None:
        memory_of_parts = self._part_memory
        part_queries, parts, log_sums = (part[: len(division.part_rows)] for part in memory_of_parts[:3])
        own_log_sums = memory_of_parts.own_log_sums[: len(queries)]
        torch.index_select(queries, 0, division.part_rows, out=part_queries)
        division.wrapper.run(part_queries, *memory, out=parts, lse=log_sums, return_lse=True)
        own.run(queries, *memory, out=output, lse=own_log_sums, return_lse=True)
        merge_parts(output, own_log_sums, parts, log_sums, division.merges)

    def _round_sizes(self, layout: StepLayout) -> list[int]:
        """Chunks per round: all, or if all must be copied, as many as fit the memory."""
        if not self._deterministic:
            return [len(layout.chunk_lengths)] if layout.chunk_lengths else []
        sizes: list[int] = []
        room = 0
        for positions in np.add(layout.chunk_starts, layout.chunk_lengths).tolist():
            if positions > room:
                sizes.append(0)
                room = self._gathered.shape[1]
            sizes[-1] += 1
            room -= positions
        return sizes

    def _plan_round(self, layout: StepLayout, chunks: slice, rows: slice, number: int) -> _Round:
        starts, lengths, num_rows = layout.chunk_starts[chunks], layout.chunk_lengths[chunks], rows.stop - rows.start
        whole = Spans(list(lengths), np.add(starts, lengths).tolist())
        tables, num_positions = layout.block_tables[layout.num_decodes :][chunks], sum(whole.positions)
        kernel = self._chunk_kernels[0] if self._deterministic or num_rows >= _MIN_FA3_ROWS else "fa2"
        is_worth_it = kernel == "fa3" and num_rows >= _MIN_GATHERED_ROWS and num_positions <= self._gathered.shape[1]
        gathering = pages = divided = division = None
        if self._deterministic or is_worth_it:
            tables = tables.clone()
            self._blocks.append(tables)
            first_tokens = starts_of(whole.positions).to(self._device, non_blocking=True)
            gathering = _Gathering(tables, first_tokens, max(whole.positions), num_positions)
            if number == len(self._gathered_chunks):
                new = {window: self._gathered_wrapper(self._new_int_workspace()) for window in self._windows}
                self._gathered_chunks.append(new)
            calls = self._gathered_chunks[number]
        else:
            pages = self._pages(tables, whole.positions, layout.block_size)
            calls = {window: self._chunks[kernel, window] for window in self._windows}
        if self._divides and kernel == "fa3":
            divided = divide_contexts(starts, lengths, self._config.num_heads, self._num_sms, layout.block_size)
        for window, wrapper in calls.items():
            spans = divided.own if divided is not None and window is None else whole
            self._plan_spans(wrapper, spans, pages, layout.block_size, window, causal=True)
        if divided is not None:
            wrapper = self._gathered_parts if pages is None else self._paged_parts
            self._plan_spans(wrapper, divided.parts, pages, layout.block_size, None, causal=False)
            part_rows, merges = (
                pinned(each).to(self._device, non_blocking=True) for each in (divided.part_rows, divided.merges)
            )
            division = _Division(wrapper, part_rows, merges)
        return _Round(rows, calls, gathering, division)

    def _plan_spans(
        self, wrapper: Any, spans: Spans, pages: Tensor | None, block_size: int, window: int | None, causal: bool
    ) -> None:
        """Plan chunks in pages, or without pages in order."""
        arguments = self._shared_arguments(window) | {
            "qo_indptr": starts_of(spans.rows),
            "head_dim_qk": self._config.head_dim,
            "causal": causal,
        }
        if pages is None:
            wrapper.plan(kv_indptr=starts_of(spans.positions), **arguments)
            return
        positions = np.asarray(spans.positions)
        num_pages = -(-positions // block_size)
        wrapper.plan(
            paged_kv_indptr=starts_of(num_pages),
            paged_kv_indices=pages,
            paged_kv_last_page_len=pinned(positions - (num_pages - 1) * block_size),
            page_size=block_size,
            **arguments,
        )

    def _shared_arguments(self, window: int | None) -> dict[str, Any]:
        return {
            "num_qo_heads": self._config.num_heads,
            "num_kv_heads": self._config.num_kv_heads,
            "window_left": -1 if window is None else window - 1,  # excluding the position itself
            "q_data_type": self._dtype,
            "sm_scale": self._config.attention_scale,
        }

    def _pages(self, tables: Tensor, contexts: Sequence[int], block_size: int) -> Tensor:
        """The used entries of all tables, concatenated."""
        counts = -(-np.asarray(contexts, dtype=np.int64) // block_size)
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
        places = pinned(rows * tables.shape[1] + columns).to(self._device, non_blocking=True)
        pages = torch.index_select(tables.reshape(-1), 0, places)
        self._blocks.append(pages)
        return pages

    def _paged_wrapper(self, kernel: str, kind: str, window: int | None) -> Any:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._float_workspace, "NHD", backend=kernel)
        wrapper.reset_workspace_buffer(self._float_workspace, self._int_workspaces[kind, window])
        return wrapper

    def _gathered_wrapper(self, int_workspace: Tensor) -> Any:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._float_workspace, "NHD", backend="fa3")
        wrapper.reset_workspace_buffer(self._float_workspace, int_workspace)
        return wrapper

    def _new_int_workspace(self) -> Tensor:
        return torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self._device)

    def _new_part_memory(self) -> _PartMemory:
        rows = (MAX_PART_ROWS, self._config.num_heads)
        values = (torch.empty(*rows, self._config.head_dim, dtype=self._dtype, device=self._device) for _ in range(2))
        log_sums = (torch.empty(rows, dtype=torch.float32, device=self._device) for _ in range(2))
        return _PartMemory(*values, *log_sums)

    def _compile(self) -> None:
        """Compile all kernels now: a missing compiler shows here, and no request waits for a load."""
        config, block_size = self._config, 16
        kv = torch.zeros(1, 2, block_size, config.num_kv_heads, config.head_dim, dtype=self._dtype, device=self._device)
        # Gathered; in pages, by either kernel; and both in parts.
        chunks = [(0, 1)]
        if not self._deterministic:
            chunks += [(0, _MIN_FA3_ROWS), (0, 512), (1 << 14, 256), (1 << 14, 640)]
        for start, length in chunks:
            context = start + length
            contexts = torch.tensor((1, context), device=self._device)
            tables = torch.zeros(2, -(-context // block_size), dtype=torch.int32, device=self._device)
            self.plan(StepLayout([1], [start], [length], tables, contexts, block_size))
            queries = torch.zeros(1 + length, config.num_heads, config.head_dim, dtype=self._dtype, device=self._device)
            for layer in {window: layer for layer, window in enumerate(config.layer_windows)}.values():
                self.run(layer, queries, kv)
