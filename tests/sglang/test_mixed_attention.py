"""SGLang's own backends with our attention in them. Their kernels, which need a GPU, are stood in for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from evenflow.sglang.mixed_attention import install_flash_attention
from tests.hosts.test_sglang_attention import (
    DIM,
    HEADS,
    KV_HEADS,
    SCALE,
    Batch,
    DecodeWrapper,
    FlashAttention,
    OwnWrapper,
    PromptWrapper,
    installed,
    scheduler_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")


class Pool:
    """Of keys and values; what a batch computes is there already."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def set_kv_buffer(self, *args: Any) -> None: ...

    def get_kv_buffer(self, layer_id: int) -> Any:
        return self.batch.kv


class Places:
    """In place of the kernel that collects the positions of a batch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.collect

    @staticmethod
    def collect(table: Any, rows: Any, lengths: Any, starts: Any, _: Any, places: Any, stride: int, **__: Any) -> None:
        for row, length, start in zip(rows.tolist(), lengths.tolist(), starts.tolist(), strict=False):
            places[start : start + length] = table[row, :length]


class Translator:
    """In place of what finds a batch's positions since 0.5.19, under several names; here a table has them."""

    is_translating = reads_are_translated = False

    def __init__(self, table: Any) -> None:
        self.table = table

    def index_table_for_batch(self, batch: Any) -> Any:
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTable

        return KVIndexTable(self.table, batch.req_pool_indices, self.table.stride(0), 1, False, None)

    def pack_read_stream(self, *_: Any, req_pool_indices: Any, seq_lens: Any, indptr: Any, out: Any, **__: Any) -> None:
        Places.collect(self.table, req_pool_indices, seq_lens, indptr, None, out, 0)

    fill_packed_read_stream = pack_read_stream


@pytest.fixture
def backend(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As its constructor leaves it, without a GPU's memory."""
    from sglang.srt.layers.attention import flashinfer_backend as module

    monkeypatch.setattr(module, "create_flashinfer_kv_indices_triton", Places(), raising=False)
    backend = object.__new__(module.FlashInferAttnBackend)
    vars(backend).update(
        dict.fromkeys(("use_sliding_window_kv_pool", "is_multimodal", "enable_mis", "enable_deterministic"), False),
        **dict.fromkeys(("use_paged", "prefill_uses_dequant_workspace", "is_dllm_model"), False),
        **dict.fromkeys(("dispatch_reason", "prefill_split_tile_size", "dq_page_table", "_swa_kv_pool")),
        decode_use_tensor_cores=True,
        num_wrappers=1,
        prefill_wrapper_ragged=PromptWrapper(),
        prefill_wrappers_paged=[OwnWrapper()],
        decode_wrappers=[DecodeWrapper()],
        kv_cache_quant_method=SimpleNamespace(needs_global_scale=lambda: False),
    )
    updater = object.__new__(module.FlashInferIndicesUpdaterPrefill)
    vars(updater).update(
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        data_type=torch.float32,
        q_data_type=torch.float32,
        attn_backend=backend,
        kv_indptr=[torch.zeros(9, dtype=torch.int32)],
        qo_indptr=[torch.zeros(9, dtype=torch.int32)],
        kv_last_page_len=torch.ones(8, dtype=torch.int32),
        prefill_wrapper_ragged=backend.prefill_wrapper_ragged,
        update=updater.update_single_wrapper,
    )
    backend.indices_updater_prefill = updater
    return backend


def mixed(sequences: list[tuple[int, int]]) -> Any:
    """A batch with all that SGLang's backends look at."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch: Any = Batch(sequences)
    starts = torch.tensor(batch.extend_prefix_lens_cpu, dtype=torch.int32)
    batch.forward_mode, batch.extend_prefix_lens = ForwardMode.MIXED, starts
    batch.extend_seq_lens, batch.batch_size = torch.tensor(batch.rows, dtype=torch.int32), len(starts)
    batch.seq_lens_sum = int(batch.seq_lens.sum())
    batch.req_pool_indices = torch.arange(len(starts))
    batch.out_cache_loc = batch.encoder_lens = batch.cross_attention_custom_mask = None
    batch.spec_info = batch.attn_cp_metadata = batch.kv_loc_plan = None
    batch.out_cache_loc_is_physical = False
    return batch


def layer() -> Any:
    from sglang.srt.layers.radix_attention import AttentionType

    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        scaling=SCALE,
        sliding_window_size=-1,
        logit_cap=0.0,
        k_scale=None,
        v_scale=None,
        k_scale_float=None,
        v_scale_float=None,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
    )


def check_outputs(backend: Any, batch: Any) -> None:
    backend.init_forward_metadata(batch)
    rows = torch.zeros(len(batch.queries), KV_HEADS, DIM)
    output = backend.forward_extend(batch.queries, rows, rows, layer(), batch)
    assert torch.allclose(output.view(-1, HEADS, DIM), batch.expected(), atol=1e-5)


def test_sglangs_flashinfer_backend_gives_its_batches_to_it(backend: Any) -> None:
    installed(backend)
    batch = mixed([(40, 9), (17, 1), (3, 1)])
    backend.token_to_kv_pool = Pool(batch)
    backend.indices_updater_prefill.req_to_token = torch.stack(batch.table)
    backend.kv_index_translator = Translator(torch.stack(batch.table))
    check_outputs(backend, batch)


def test_sglangs_flash_attention_backend_gives_its_batches_to_it(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sgl_kernel", "sgl_kernel.flash_attn"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    limits = SimpleNamespace(num_processors=16)
    monkeypatch.setattr("evenflow.sglang.mixed_attention.limits_of", lambda device: limits)
    monkeypatch.setattr("evenflow.sglang.mixed_attention._LONG", 2)
    from sglang.srt.layers.attention import flashattention_backend as module

    kernel = FlashAttention()
    monkeypatch.setattr(module, "flash_attn_with_kvcache", kernel)
    batch = mixed([(40, 9), (17, 1), (3, 1)])
    backend = object.__new__(module.FlashAttentionBackend)
    vars(backend).update(
        dict.fromkeys(("has_local_attention", "is_encoder_decoder", "use_mla", "fa_skip_kv_cache"), False),
        **dict.fromkeys(("use_sliding_window_kv_pool", "is_prefill_aware_swa", "kv_cache_is_mxfp8", "has_swa"), False),
        **dict.fromkeys(("full_cg_prefill_metadata", "forward_metadata_spec_decode_expand", "attention_chunk_size")),
        **dict.fromkeys(("local_attn_builder", "_unified_dense", "_unified_hooks")),
        fa_impl_ver=3,
        num_kv_heads=KV_HEADS,
        num_splits=0,
        page_size=1,
        topk=0,
        attn_cp_size=1,
        kv_cache_dtype_str="auto",
        kv_index_translator=Translator(torch.stack(batch.table)),
        max_context_len=64,
        token_to_kv_pool=Pool(batch),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.stack(batch.table)),
    )
    install_flash_attention(scheduler_of(backend))
    check_outputs(backend, batch)
    assert [sequences for sequences, _, _ in kernel.calls] == [1, 2]
