"""The perplexity of a real model on real text, with all KV blocks through each codec."""

from __future__ import annotations

from pathlib import Path

import torch
from int4_perplexity import text_tokens
from kv_tier import quality

from evenflow.model.kv_codec import CODECS
from evenflow.model.loader import load_model
from tests.models import stories260k_folder


def test_int8_changes_perplexity_by_less_than_a_thousandth_and_lossless_by_nothing(tmp_path: Path) -> None:
    model = load_model(stories260k_folder(tmp_path))
    token_ids = text_tokens(model, 2048)
    with torch.inference_mode():
        plain = quality(model, token_ids, None)
        lossless = quality(model, token_ids, CODECS["lossless"])
        int8 = quality(model, token_ids, CODECS["int8"])
    assert lossless.perplexity == plain.perplexity
    assert lossless.kv_error == 0
    assert lossless.bytes_ratio < 0.9
    assert 0 < int8.kv_error < 0.02
    assert abs(int8.perplexity / plain.perplexity - 1) < 0.001
    assert int8.bytes_ratio < 0.4  # heads of 8 values have many scales
