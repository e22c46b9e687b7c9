"""`evenflow serve --engine vllm` over a real vLLM, steered, killed and started again."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.vllm.fronts import START_S, Front, needs_vllm, small_model

pytestmark = [pytest.mark.vllm, needs_vllm]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    running = Front(small_model(tmp_path_factory.mktemp("model")))
    yield running
    running.close()


def test_vllm_is_warm_when_it_is_ready(front: Front) -> None:
    log = "".join(front.log)
    assert "Warming up vLLM" in log
    assert "The warm-up of vLLM failed" not in log
    assert re.search(r"evenflow: logits of \d{2,} batch sizes", log)
    assert front.figure("vllm:prompt_tokens_total") > 0
    assert front.figure("evenflow:chunk_tokens_count") == 0  # only what users send is observed
    front.complete(100, 1, first_token=5)
    front.until(lambda: front.figure("evenflow:chunk_tokens_count") > 0)
    assert front.figure("evenflow:step_predicted_seconds_count") > 0  # step times are known


def test_vllm_answers_through_evenflow(front: Front) -> None:
    assert front.complete(20, 7, first_token=3).usage.completion_tokens == 7
    tokens = httpx.post(front.url + "/tokenize", json={"model": "tiny", "prompt": "abc"}, timeout=60).json()
    assert tokens["count"] > 0
    figures = front.get("/metrics").text
    assert "vllm:generation_tokens_total" in figures
    assert 'evenflow:up{engine="0",model_name="tiny"} 1.0' in figures


def test_a_new_target_changes_the_chunks(front: Front) -> None:
    front.chunks_beside_decodes(first_token=10)  # the step-time model learns
    before = front.chunks_beside_decodes(first_token=20)
    front.set_target("1ms")
    after = front.chunks_beside_decodes(first_token=30)
    assert max(after) < max(before)


def test_a_killed_vllm_comes_back_and_the_end_leaves_nothing(front: Front) -> None:
    first = front.vllm_group()
    os.kill(first, signal.SIGKILL)
    front.until(lambda: front.get("/health").status_code == 503)
    front.until(lambda: front.get("/ready").status_code == 200)
    assert front.complete(20, 3, first_token=3).usage.completion_tokens == 3
    assert front.get("/v1/target").json()["tbt_target"] == 0.001
    second = front.vllm_group()
    assert second != first
    front.process.terminate()
    assert front.process.wait(START_S) == 0
    for group in (first, second):
        _wait_until_gone(group)


def _wait_until_gone(group: int) -> None:
    """Killed workers may need a moment to be reaped."""
    end = time.monotonic() + 60
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < end, f"processes of group {group} are left"
        time.sleep(0.1)
