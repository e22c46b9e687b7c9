"""`evenflow serve --engine vllm` over a real vLLM without a target: a fixed budget, and whole prompts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.fronts import Front, needs_vllm, small_model

pytestmark = [pytest.mark.vllm, needs_vllm]

BUDGET = 256


def chunk_lengths(front: Front, num_prompt_tokens: int, first_token: int) -> list[int]:
    """Of a new request's prompt, as a client asks for them."""
    answer = front.complete(num_prompt_tokens, 3, first_token)
    found: Any = front.openai.get(f"/requests/{answer.id}/chunks", cast_to=object)
    (request,) = found["requests"]
    chunks = request["chunks"]
    assert request["prompt_tokens"] == num_prompt_tokens == sum(chunk["length"] for chunk in chunks)
    assert 0 <= request["queue_s"] < chunks[0]["end_s"]
    assert request["ttft_s"] == chunks[-1]["end_s"]
    assert all(chunk["seconds"] > 0 for chunk in chunks)
    assert [chunk["reason"] for chunk in chunks] == ["budget"] * (len(chunks) - 1) + ["end_of_prompt"]
    return [chunk["length"] for chunk in chunks]


def test_a_fixed_budget_holds_until_a_target_is_set(tmp_path: Path) -> None:
    with closing(Front(small_model(tmp_path), policy=f"fixed:{BUDGET}")) as front:
        assert "Starting vLLM (fixed:256, no latency target)" in front.first_line
        assert front.get("/v1/target").json()["policy"] == "fixed:256"
        assert chunk_lengths(front, 1000, first_token=5) == [256, 256, 256, 232]
        beside = front.chunks_beside_decodes(first_token=10)
        assert max(beside) == BUDGET - 1  # the stream decodes in the same step
        front.set_target("1ms")
        assert max(front.chunks_beside_decodes(first_token=20)) < min(beside[:-1])
        front.set_target(None)
        assert front.get("/v1/target").json()["policy"] == "fixed:256"
        assert max(front.chunks_beside_decodes(first_token=30)) == BUDGET - 1


def test_unchunked_prompts_are_prefilled_whole(tmp_path: Path) -> None:
    with closing(Front(small_model(tmp_path), policy="unchunked")) as front:
        assert chunk_lengths(front, 5000, first_token=5) == [5000]
        assert front.chunks_beside_decodes(first_token=10) == [3000]
        assert front.put_target("50ms").status_code == 400
