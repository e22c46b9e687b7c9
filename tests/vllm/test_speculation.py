"""Drafts of n-grams in a real vLLM under a target."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.vllm.fronts import Front, needs_vllm, small_model

pytestmark = [pytest.mark.vllm, needs_vllm]

_NUM_TOKENS = 200
_MOST_DRAFTS = 3
_DRAFTS = {"method": "ngram", "num_speculative_tokens": _MOST_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_drafts_are_rows_of_the_reported_steps(tmp_path: Path) -> None:
    flags = ("--speculative-config", json.dumps(_DRAFTS))
    with closing(Front(small_model(tmp_path), "--no-warm-up", vllm_flags=flags)) as front:
        answer = front.complete(300, _NUM_TOKENS, first_token=5)
        assert answer.usage.completion_tokens == _NUM_TOKENS
        drafted, accepted = (
            front.figure(f"vllm:spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted")
        )
        assert drafted > accepted > 0
        num_steps = _NUM_TOKENS - 1 - accepted  # beside the prompt's own
        front.until(lambda: front.figure("evenflow:step_tokens_total", part="decode") >= num_steps)
        rows = front.figure("evenflow:step_tokens_total", part="decode")
        # The last step may give more tokens than were asked for, or not be reported yet.
        assert rows == pytest.approx(num_steps + drafted, abs=1 + _MOST_DRAFTS)
