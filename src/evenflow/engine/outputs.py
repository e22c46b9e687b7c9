"""From tokens to what a caller sees: text as it becomes certain, stop strings, logprobs, times, chunks.

An output is filled step by step and is whole when it has a finish_reason. Must not know: scheduling, executors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from evenflow.core.plan import Chunk, ChunkReason, RowLogprobs


class ChunkTaken(NamedTuple):
    """A chunk of the prompt, as it ran."""

    start: int
    length: int
    reason: ChunkReason


@dataclass(slots=True)
class RequestOutput:
    """One request's answer. Times are seconds since the request arrived."""

    request_id: str
    prompt_token_ids: list[int]
    prompt: str | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    chunks: list[ChunkTaken] = field(default_factory=list)  # with the cached tokens they cover the prompt exactly
    token_times_s: list[float] = field(default_factory=list)
    logprobs: list[RowLogprobs] | None = None
    prompt_logprobs: list[RowLogprobs] | None = None  # for the prompt's tokens from the second on

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None before there is one."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def latency_s(self) -> float | None:
        return self.token_times_s[-1] if self.token_times_s else None


class Delta(NamedTuple):
    """What one step added to a request: new tokens, and the text that became certain."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    output: RequestOutput  # the request's answer so far, whole


class TextDecoder(Protocol):
    """What turns tokens into text one by one: `evenflow.model.tokenizer.StreamDecoder`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class StopFinder:
    """Lets text through that cannot be part of a stop string any more."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string was met: the text then ends before it."""
        if not self._stops:
            return text, False
        self._held += text
        found = [index for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            certain, self._held = self._held[: min(found)], ""
            return certain, True
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain, False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)


class OutputBuilder:
    """Fills one RequestOutput."""

    def __init__(
        self, output: RequestOutput, decoder: TextDecoder | None, stops: tuple[str, ...], arrival: float
    ) -> None:
        self.output = output
        self._decoder = decoder
        self._stop_finder = StopFinder(stops)
        self._arrival = arrival

    def take_chunk(self, chunk: Chunk, prompt_logprobs: tuple[RowLogprobs, ...] | None) -> None:
        """Keep the chunks that led to the first token: a preemption before it starts over, one after it is no news."""
        if self.output.token_ids:
            return
        if self.output.chunks and chunk.start < self.output.chunks[-1].start + self.output.chunks[-1].length:
            self.output.chunks.clear()
            if self.output.prompt_logprobs is not None:
                self.output.prompt_logprobs.clear()
        self.output.chunks.append(ChunkTaken(chunk.start, chunk.length, chunk.reason))
        if prompt_logprobs is not None:
            if self.output.prompt_logprobs is None:
                self.output.prompt_logprobs = []
            self.output.prompt_logprobs += prompt_logprobs

    def take_tokens(
        self, tokens: tuple[int, ...], logprobs: tuple[RowLogprobs, ...] | None, stop_tokens: frozenset[int], now: float
    ) -> tuple[str, bool]:
        """The text that became certain, and whether a stop string ended it."""
        self.output.token_ids += tokens
        self.output.token_times_s += [now - self._arrival] * len(tokens)
        if logprobs is not None:
            if self.output.logprobs is None:
                self.output.logprobs = []
            self.output.logprobs += logprobs
        if self._decoder is None:
            return "", False
        # A token that ends the request is no part of its text.
        text = "".join([self._decoder.push(token) for token in tokens if token not in stop_tokens])
        certain, stopped = self._stop_finder.push(text)
        self.output.text += certain
        return certain, stopped

    def finish(self, reason: str, error: str | None, *, stopped_by_text: bool = False) -> str:
        """Close the output; returns the text held back until now."""
        self.output.finish_reason = reason
        self.output.error = error
        rest = ""
        if self._decoder is not None and not stopped_by_text:
            certain, _ = self._stop_finder.push(self._decoder.flush())
            rest = certain + self._stop_finder.flush()
        self.output.text += rest
        return rest
