"""Show what chunk size does to a mixed load: three long prompts, ten short ones, five slots.

    python examples/minimal_tutorial.py                    a toy model with a fixed cost, on a virtual clock
    python examples/minimal_tutorial.py --model FOLDER     a transformers model, in real time

Read it beside `evenflow/minimal.py`, which holds the whole idea; this script only observes its steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evenflow.minimal import Model, PriorityScheduler, Request, Tokenizer, ToyModel, run_steps

LONG_PROMPT = "Write a detailed essay about " + "artificial intelligence " * 100
PROMPTS = [LONG_PROMPT] * 3 + ["Hello"] * 10
OUTPUT_TOKENS = 24
BATCH_SIZE = 5
UNCHUNKED = 1_000_000
CHUNK_SIZES = (32, 128, 512, UNCHUNKED)
TIMELINE_COLUMNS = 56


class CostedModel:
    """The toy model on a virtual clock, which advances by a fixed cost per call and per token."""

    SECONDS_PER_CALL = 0.001
    SECONDS_PER_TOKEN = 0.0001

    def __init__(self) -> None:
        self.now = 0.0
        self._toy = ToyModel()

    def __call__(self, token_ids: Sequence[int], offset: int, cache: Any) -> tuple[Sequence[float], Any]:
        self.now += self.SECONDS_PER_CALL + self.SECONDS_PER_TOKEN * len(token_ids)
        return self._toy(token_ids, offset, cache)

    def clock(self) -> float:
        return self.now


class FourCharacterTokenizer:
    """Four characters per token, about as in English text. Answers are numbers, and have no end token."""

    eos_token_id = None

    def encode(self, text: str, /) -> list[int]:
        return [sum(text[start : start + 4].encode()) % 256 for start in range(0, len(text), 4)]

    def decode(self, token_ids: list[int], /) -> str:
        return " ".join(str(token) for token in token_ids)


@dataclass
class Timing:
    """When one request was prefilled and got its tokens, in seconds since the start."""

    name: str
    prefills: list[tuple[float, float]]
    token_times: list[float]

    @property
    def worst_gap(self) -> float:
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)


def measure(
    model: Model, tokenizer: Tokenizer, clock: Callable[[], float], chunk_size: int, short_first: bool = False
) -> list[Timing]:
    """Run the load, and record when each request was prefilled and got each of its tokens."""
    waiting = PriorityScheduler()
    timings: dict[Request, Timing] = {}
    for number, prompt in enumerate(PROMPTS, start=1):
        num_tokens = len(tokenizer.encode(prompt)) + OUTPUT_TOKENS
        request = Request(prompt, chunk_size, model=model, tokenizer=tokenizer, max_seq_len=num_tokens)
        is_short = prompt != LONG_PROMPT
        urgent = short_first and is_short
        (waiting.high_priority_queue if urgent else waiting.low_priority_queue).append(request)
        timings[request] = Timing(f"{number:2} {'Hello' if is_short else 'essay'}", [], [])
    began = clock()
    for step in run_steps(waiting, BATCH_SIZE, clock):
        step_ended = clock() - began
        chunk_ended = step_ended - step.decode_seconds
        if step.prefilled is not None:
            timing = timings[step.prefilled]
            timing.prefills.append((chunk_ended - step.prefill_seconds, chunk_ended))
            if step.prefilled.is_prefill_done:
                timing.token_times.append(chunk_ended)
        for request in step.decoded:
            timings[request].token_times.append(step_ended)
    return list(timings.values())


def timeline(requests: list[Timing]) -> str:
    """One line per request: `.` waits for a slot, `#` prefill, `o` a token, `-` no token for this stream."""
    total = max(request.token_times[-1] for request in requests)

    def column(seconds: float) -> int:
        return min(int(seconds / total * TIMELINE_COLUMNS), TIMELINE_COLUMNS - 1)

    lines = []
    for request in requests:
        first_work, last_token = column(request.prefills[0][0]), column(request.token_times[-1])
        cells = ["."] * first_work + ["-"] * (last_token - first_work + 1)
        for began, ended in request.prefills:
            cells[column(began) : column(ended) + 1] = "#" * (column(ended) - column(began) + 1)
        for seconds in request.token_times:
            cells[column(seconds)] = "o"
        lines.append(f"  {request.name} {''.join(cells)}")
    return "\n".join(lines)


def summary(label: str, requests: list[Timing]) -> str:
    total = max(request.token_times[-1] for request in requests)
    worst_gap = max(request.worst_gap for request in requests)
    first_tokens = [request.token_times[0] for request in requests if request.name.endswith("Hello")]
    mean_first_token = sum(first_tokens) / len(first_tokens)
    return f"{label:<28}{worst_gap * 1e3:>16.1f}{mean_first_token * 1e3:>24.1f}{total * 1e3:>12.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How three long prompts and ten short ones share five slots.")
    parser.add_argument("--model", metavar="FOLDER", help="a model folder that transformers can load")
    folder = parser.parse_args(arguments).model
    model: Model
    tokenizer: Tokenizer
    if folder is None:
        costed = CostedModel()
        model, tokenizer, clock = costed, FourCharacterTokenizer(), costed.clock
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
        tokenizer, clock = AutoTokenizer.from_pretrained(folder), time.perf_counter

    rows = []
    for chunk_size in CHUNK_SIZES:
        label = "unchunked" if chunk_size == UNCHUNKED else f"chunks of {chunk_size}"
        requests = measure(model, tokenizer, clock, chunk_size)
        rows.append(summary(label, requests))
        if chunk_size in (CHUNK_SIZES[0], UNCHUNKED):
            print(f"{label}:  . waits   # prefill   o a token   - no token for this stream\n{timeline(requests)}\n")
    requests = measure(model, tokenizer, clock, CHUNK_SIZES[0], short_first=True)
    rows.append(summary("chunks of 32, Hello first", requests))

    print(f"{'':<28}{'worst gap (ms)':>16}{'first Hello token (ms)':>24}{'total (ms)':>12}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
