"""Advice that agrees with itself, and the highest figure of each kind, whatever line it stands in."""

from __future__ import annotations

import io

from evenflow.advisor.explanation import Explanation, explain
from evenflow.advisor.server_logs import read_facts

NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory."
NO_ROOM = "ValueError: No available memory for the cache blocks."
LOW_TARGET = "evenflow: a target of 20 ms is infeasible"
SMALL_BUDGET = "max_num_batched_tokens (512) is smaller than max_model_len (8192)"


def load(running: int, waiting: int, rate: float = 10.0, usage: float = 5.0) -> str:
    return (
        f"Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: {rate} tokens/s, Running: {running} reqs, "
        f"Waiting: {waiting} reqs, GPU KV cache usage: {usage}%, Prefix cache hit rate: 0.0%"
    )


def explained(*lines: str) -> Explanation:
    return explain(read_facts(io.BytesIO("\n".join(lines).encode())))


def advice(*lines: str) -> str:
    return "\n".join(statement.text for statement in explained(*lines).advice)


def test_memory_that_is_short_for_steps_and_for_the_cache_is_one_advice() -> None:
    assert "Lower --gpu-memory-utilization" in advice(NO_MEMORY)
    assert "raise --gpu-memory-utilization" in advice(NO_ROOM)
    for lines in ([NO_MEMORY, NO_ROOM], [NO_MEMORY, load(8, 3, usage=99.0)]):
        found = advice(*lines)
        assert "Memory is short for steps and for the KV cache at once" in found
        assert "--gpu-memory-utilization" not in found


def test_a_load_that_waits_does_not_raise_what_a_problem_lowers() -> None:
    assert "Raising it serves more requests" in advice(load(8, 3))
    found = advice(LOW_TARGET, load(8, 3))
    assert "serve fewer streams" in found
    assert "Raising it" not in found


def test_a_budget_that_is_too_small_is_not_lowered() -> None:
    budget = "Chunked prefill is enabled with max_num_batched_tokens=2048."
    assert "lower --max-num-batched-tokens, such as 512" in advice(budget)
    found = advice(budget, SMALL_BUDGET)
    assert "raise --max-num-batched-tokens" in found
    assert "such as 512" not in found


def test_each_peak_is_the_highest_of_its_kind() -> None:
    [meaning, *_] = explained(load(8, 0, 20.0), load(3, 40, 5.0), load(2, 1, 90.5)).meaning
    assert meaning.text == (
        "At the peak, 8 requests were running and 0 waiting; the server generated 20.0 tokens per second, 2.5 for each "
        "running request. At another time, up to 40 waited and 90.5 tokens per second were generated."
    )
    assert meaning.line_numbers == (1, 2, 3)
    [alone, *_] = explained(load(8, 4, 20.0)).meaning
    assert "another time" not in alone.text
