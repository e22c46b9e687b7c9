"""Attention of batches with chunks in SGLang: the same results in two calls, with the GPU's kernels stood in for.

`tests/sglang` checks that SGLang's own backend calls it.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from evenflow.errors import MissingDependency
from evenflow.model.cuda.limits import limits_of
from evenflow.sglang.mixed_attention import (
    MixedFlashAttention,
    MixedFlashInfer,
    install_flash_attention,
    install_flashinfer,
)

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = 0.3
OPTIONS = {"sm_scale": SCALE, "window_left": -1, "logits_soft_cap": 0.0, "k_scale": None, "v_scale": None}


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Of one sequence's last rows to all its positions."""
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for part in (keys, values))
    scores = SCALE * queries.transpose(0, 1) @ keys.transpose(1, 2)
    ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
    return (scores.masked_fill(ahead, float("-inf")).softmax(-1) @ values).transpose(0, 1)


class PromptWrapper:
    """As FlashInfer's for keys and values that lie one after another."""

    def plan(self, rows: Tensor, starts: Tensor, *heads: int, causal: bool, q_data_type: torch.dtype) -> None:
        assert heads == (HEADS, KV_HEADS, DIM)
        assert causal
        self.rows, self.starts = rows.tolist(), starts.tolist()

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, causal: bool, **options: Any) -> Tensor:
        assert causal
        assert options["sm_scale"] == SCALE
        spans = zip(self.rows, self.rows[1:], self.starts, self.starts[1:], strict=False)
        return torch.cat([attend(queries[a:b], keys[c:d], values[c:d]) for a, b, c, d in spans])


class DecodeWrapper:
    """As FlashInfer's for single rows and keys and values in pages."""

    def plan(self, starts: Tensor, places: Tensor, last_pages: Tensor, *heads: int, **options: Any) -> None:
        assert heads == (HEADS, KV_HEADS, DIM, 1)
        assert last_pages.tolist() == [1] * (len(starts) - 1)
        assert len(places) == starts[-1]
        self.starts, self.places = starts.tolist(), places

    def forward(self, queries: Tensor, kv: tuple[Tensor, Tensor], **options: Any) -> Tensor:
        assert options["sm_scale"] == SCALE
        spans = zip(self.starts, self.starts[1:], strict=False)
        of_each = [[part[self.places[c:d]] for part in kv] for c, d in spans]
        return torch.cat([attend(row[None], *parts) for row, parts in zip(queries, of_each, strict=True)])


class OwnWrapper:
    """SGLang's own way."""

    def begin_forward(self, *args: Any, **more: Any) -> None:
        self.is_planned = True

    def forward(self, queries: Tensor, *args: Any, **more: Any) -> Tensor:
        return torch.full_like(queries, 7.0)

    def forward_return_lse(self, queries: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return queries, queries


class Updater:
    num_qo_heads, num_kv_heads, head_dim = HEADS, KV_HEADS, DIM
    data_type = q_data_type = torch.float32

    def __init__(self) -> None:
        self.update = self.update_single_wrapper

    def update_single_wrapper(self) -> None: ...


class Backend:
    """Calls its wrappers as SGLang's does."""

    def __init__(self) -> None:
        self.own = OwnWrapper()
        self.prefill_wrappers_paged: list[Any] = [self.own]
        self.prefill_wrapper_ragged, self.decode_wrappers = PromptWrapper(), [DecodeWrapper()]
        self.decode_use_tensor_cores, self.use_paged = True, False
        self.indices_updater_prefill = Updater()

    def init_forward_metadata(self, batch: Any) -> None:
        if batch.forward_mode.is_decode_or_idle():
            return
        lengths = batch.seq_lens if self.use_paged else torch.tensor(batch.extend_prefix_lens_cpu)
        places = torch.cat([row[:length] for row, length in zip(batch.table, lengths, strict=True)])
        padded = torch.cat([places, torch.zeros(256, dtype=places.dtype)])
        [wrapper] = self.prefill_wrappers_paged
        wrapper.begin_forward(torch.zeros(1), torch.zeros(1), padded, torch.ones(len(lengths)), *[1] * 4)


class Batch:
    """Sequences whose last rows are computed, with their positions strewn over a pool."""

    def __init__(self, sequences: list[tuple[int, int]], *, decodes: bool = False) -> None:
        draw = torch.Generator().manual_seed(len(sequences))
        self.extend_prefix_lens_cpu = [start for start, _ in sequences]
        self.extend_seq_lens_cpu = self.rows = [length for _, length in sequences]
        self.seq_lens = torch.tensor([start + length for start, length in sequences])
        self.seq_lens_cpu: Tensor | None = self.seq_lens
        self.forward_mode = SimpleNamespace(is_decode_or_idle=lambda: decodes)
        pool_size, longest = int(self.seq_lens.sum()) + 5, int(self.seq_lens.max())
        order = torch.randperm(pool_size, generator=draw).int()
        self.table, first = [], 0
        for length in self.seq_lens.tolist():
            self.table.append(torch.nn.functional.pad(order[first : first + length], (0, longest - length)))
            first += length
        self.kv = tuple(torch.randn(pool_size, KV_HEADS, DIM, generator=draw) for _ in range(2))
        self.queries = torch.randn(sum(self.rows), HEADS, DIM, generator=draw)

    def expected(self) -> Tensor:
        outputs, first = [], 0
        for row, length, count in zip(self.table, self.seq_lens.tolist(), self.rows, strict=True):
            keys, values = (part[row[:length]] for part in self.kv)
            outputs.append(attend(self.queries[first : first + count], keys, values))
            first += count
        return torch.cat(outputs)


def scheduler_of(backend: Any) -> Any:
    model_runner = SimpleNamespace(attn_backend=backend)
    steering = SimpleNamespace(limits_prefill=True)
    return SimpleNamespace(evenflow=steering, tp_worker=SimpleNamespace(model_runner=model_runner))


def installed(backend: Any) -> Any:
    scheduler = scheduler_of(backend)
    is_installed = install_flashinfer(scheduler)
    assert install_flashinfer(scheduler) == is_installed  # for another target
    is_there = any(isinstance(wrapper, MixedFlashInfer) for wrapper in getattr(backend, "prefill_wrappers_paged", ()))
    assert is_installed == is_there
    return scheduler


def run(backend: Backend, batch: Batch) -> Tensor:
    backend.init_forward_metadata(batch)
    output: Tensor = backend.prefill_wrappers_paged[0].forward(batch.queries, batch.kv, causal=True, **OPTIONS)
    return output


SEQUENCES = pytest.mark.parametrize(
    "sequences",
    [
        [(0, 5)],
        [(40, 9), (17, 1), (3, 1)],
        [(12, 4), (0, 7), (30, 1)],
        [(30, 1), (12, 4), (9, 1)],  # a chunk of one row before another
        [(8, 1), (5, 1)],
    ],
)


@SEQUENCES
def test_chunks_and_decodes_attend_to_their_own_positions(sequences: list[tuple[int, int]]) -> None:
    backend, batch = Backend(), Batch(sequences)
    installed(backend)
    assert torch.allclose(run(backend, batch), batch.expected(), atol=1e-5)
    assert not hasattr(backend.own, "is_planned")


@pytest.mark.parametrize("steering", [None, SimpleNamespace(limits_prefill=False)])
def test_without_a_target_sglang_goes_its_own_way(steering: Any) -> None:
    backend, batch = Backend(), Batch([(40, 9), (17, 1)])
    scheduler = installed(backend)
    run(backend, batch)
    scheduler.evenflow = steering
    assert run(backend, batch).unique().tolist() == [7.0]
    assert not backend.use_paged
    assert backend.own.is_planned
    assert backend.prefill_wrappers_paged[0].forward_return_lse(batch.queries)[0] is batch.queries


def test_contexts_that_are_too_long_to_copy_go_sglangs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    max_bytes = 2 * 49 * KV_HEADS * DIM * 4
    share = limits_of(torch.device("cpu")).memory // max_bytes
    monkeypatch.setattr("evenflow.sglang.mixed_attention._COPIED_SHARE", share)
    backend = Backend()
    installed(backend)
    assert run(backend, Batch([(40, 10), (17, 1)])).unique().tolist() == [7.0]
    assert run(backend, Batch([(40, 9), (90, 1)])).unique().numel() > 1  # a decode's is read where it is


def test_flashinfer_goes_sglangs_way_if_the_host_does_not_know_the_lengths() -> None:
    backend, batch = Backend(), Batch([(40, 9), (17, 1)])
    installed(backend)
    batch.seq_lens_cpu = None
    assert run(backend, batch).unique().tolist() == [7.0]


def test_decodes_alone_are_sglangs() -> None:
    backend = Backend()
    installed(backend)
    backend.init_forward_metadata(Batch([(40, 1)], decodes=True))
    assert not backend.use_paged


def test_other_attention_is_left_alone() -> None:
    installed(SimpleNamespace())
    for change in ({"update": lambda: None}, {"data_type": torch.int8}):
        backend = Backend()
        vars(backend.indices_updater_prefill).update(change)
        installed(backend)
        assert backend.prefill_wrappers_paged == [backend.own]


def test_a_version_that_lacks_what_is_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenflow.hosts.launch.installed_version", lambda packages: "9.9")
    backend = Backend()
    del backend.use_paged
    with pytest.raises(MissingDependency, match=r"SGLang 9\.9 lacks .*Backend\.use_paged"):
        installed(backend)
    assert not isinstance(backend.prefill_wrappers_paged[0], MixedFlashInfer)


class FlashAttention:
    """As FlashAttention 3 on keys and values in pages of one token, and what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []  # sequences, rows of the longest, parts of a context

    def __call__(self, **given: Any) -> Tensor:
        queries, starts, lengths = given["q"], given["cu_seqlens_q"].tolist(), given["cache_seqlens"].tolist()
        assert len(given["page_table"]) == len(lengths) == len(starts) - 1
        assert given["max_seqlen_q"] >= max(b - a for a, b in pairwise(starts))
        self.calls.append((len(lengths), given["max_seqlen_q"], given["num_splits"]))
        output = given["out"] if given["out"] is not None else torch.empty_like(queries)
        for a, b, table, length in zip(starts, starts[1:], given["page_table"], lengths, strict=False):
            keys, values = (given[name].flatten(0, 1)[table[:length]] for name in ("k_cache", "v_cache"))
            output[a:b] = attend(queries[a:b], keys, values)
        return output


class FlashBackend:
    """Prepares batches as SGLang's does."""

    fa_impl_ver, num_kv_heads = 3, KV_HEADS
    has_local_attention = is_encoder_decoder = use_mla = False

    def init_forward_metadata(self, batch: Any) -> None:
        self.batch = batch


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module in which SGLang's backend finds its kernel, on a GPU of 16 processors."""
    limits = SimpleNamespace(num_processors=16)
    monkeypatch.setattr("evenflow.sglang.mixed_attention.limits_of", lambda device: limits)
    monkeypatch.setattr("evenflow.sglang.mixed_attention._LONG", 2)
    module = ModuleType(FlashBackend.__module__)
    module.flash_attn_with_kvcache = FlashAttention()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, FlashBackend.__module__, module)
    return module


def run_flash(module: Any, batch: Batch, *, padding: int = 3, **more: Any) -> Tensor:
    """As SGLang's backend does for a layer, whose rows are padded to the size of a graph."""
    rows = torch.tensor([0, *batch.rows])
    queries = torch.cat([batch.queries, torch.zeros(padding, HEADS, DIM)])
    output: Tensor = module.flash_attn_with_kvcache(
        q=queries,
        k_cache=batch.kv[0][:, None],
        v_cache=batch.kv[1][:, None],
        page_table=torch.stack(batch.table),
        cache_seqlens=batch.seq_lens.int(),
        cu_seqlens_q=rows.cumsum(0).int(),
        cu_seqlens_k_new=torch.zeros(1),
        max_seqlen_q=max(batch.rows),
        **{"num_splits": 0, "out": None} | more,
    )
    return output[: len(batch.queries)]


@SEQUENCES
@pytest.mark.parametrize("has_output", [True, False])  # SGLang gives one where it replays graphs
def test_flash_attention_computes_the_same_in_two_calls(
    flash: Any, sequences: list[tuple[int, int]], has_output: bool
) -> None:
    kernel, backend, batch = flash.flash_attn_with_kvcache, FlashBackend(), Batch(sequences)
    batch.seq_lens_cpu = None if has_output else batch.seq_lens_cpu
    for _ in range(2):  # and again for another target
        install_flash_attention(scheduler_of(backend))
    backend.init_forward_metadata(batch)
    assert backend.batch is batch
    out = torch.empty(len(batch.queries) + 3, HEADS, DIM) if has_output else None
    assert torch.allclose(run_flash(flash, batch, out=out), batch.expected(), atol=1e-5)
    is_mixed = sequences[-1][1] == 1 and any(rows > 1 for _, rows in sequences)
    assert len(kernel.calls) == 1 + is_mixed
    assert not is_mixed or kernel.calls[1][1] == 1


def test_only_a_context_beyond_a_processors_share_is_divided(flash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, backend = flash.flash_attn_with_kvcache, FlashBackend()
    install_flash_attention(scheduler_of(backend))
    for sequences in ([(4, 3), *[(50, 1)] * 16], [(4, 3), *[(50, 1)] * 16, (800, 1)]):
        batch = Batch(sequences)
        backend.init_forward_metadata(batch)
        assert torch.allclose(run_flash(flash, batch), batch.expected(), atol=1e-5)
    assert kernel.calls == [(17, 3, 0), (1, 3, 0), (17, 1, 4)]  # 801 of 1,617 positions
    monkeypatch.setattr("evenflow.sglang.mixed_attention._LONG", 1000)
    backend.init_forward_metadata(batch)
    run_flash(flash, batch)
    assert kernel.calls[3:] == [(18, 3, 0)]


def test_flash_attention_is_sglangs_own_without_a_target_and_where_one_call_is_needed(flash: Any) -> None:
    kernel, backend, batch = flash.flash_attn_with_kvcache, FlashBackend(), Batch([(40, 9), (17, 1)])
    scheduler = scheduler_of(backend)
    install_flash_attention(scheduler)
    backend.init_forward_metadata(batch)
    run_flash(flash, batch, k_descale=torch.ones(2, KV_HEADS))
    run_flash(flash, batch, return_softmax_lse=True)
    scheduler.evenflow = None
    backend.init_forward_metadata(batch)
    run_flash(flash, batch)
    assert [sequences for sequences, _, _ in kernel.calls] == [2, 2, 2]


@pytest.mark.parametrize("name", ["has_local_attention", "is_encoder_decoder", "use_mla"])
def test_flash_attention_of_other_models_is_left_alone(flash: Any, name: str) -> None:
    backend = FlashBackend()
    setattr(backend, name, True)
    install_flash_attention(scheduler_of(backend))
    assert not isinstance(flash.flash_attn_with_kvcache, MixedFlashAttention)
