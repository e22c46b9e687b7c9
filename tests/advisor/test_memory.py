"""The memory table against figures worked out by hand."""

from __future__ import annotations

import pytest

from evenflow.advisor.memory import LLAMA_3_1_8B, TABLE_TOKENS, memory_row, memory_table


def test_thirty_thousand_tokens_in_chunks_of_2048() -> None:
    row = memory_row(LLAMA_3_1_8B, 2048, 30_000)
    assert row.scores_16bit_whole == 1_800_000_000
    assert row.scores_16bit_chunked == 122_880_000
    assert (row.scores_whole, row.scores_chunked) == (3_600_000_000, 245_760_000)
    assert row.activations_whole == pytest.approx(3.07e9, rel=0.01)
    assert row.activations_chunked == pytest.approx(210e6, rel=0.01)
    assert row.prompt_logits_whole == 30_000 * 128_256 * 4
    assert row.kv_cache == 30_000 * 131_072


def test_a_prompt_that_fits_into_a_chunk_is_the_same_either_way() -> None:
    row = memory_row(LLAMA_3_1_8B, 2048, 500)
    assert row.scores_whole == row.scores_chunked == 1_000_000
    assert row.activations_whole == row.activations_chunked
    assert row.prompt_logits_whole == row.prompt_logits_chunked


def test_the_table_has_each_length_once_in_order() -> None:
    lengths = [row.num_tokens for row in memory_table(LLAMA_3_1_8B, 512, (*TABLE_TOKENS, 500, 7))]
    assert lengths == [7, 47, 500, 2156, 4000, 8000, 24_000, 30_000]
