"""From tokens to outputs: text as it becomes certain, stop strings, logprobs, times, chunks.

An output is filled step by step and is complete when it has a finish_reason.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from evenflow.core.logprobs import LogprobRows
from evenflow.core.report import ChunkReport, Ended, StepReport
from evenflow.core.request import FinishReason, Request


@dataclass(slots=True)
class RequestOutput:
    """One request's answer. Times are seconds since the request arrived."""

    request_id: str
    prompt_token_ids: list[int]
    prompt: str | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | None = None  # the stop string that ended it
    error: str | None = None
    num_cached_tokens: int = 0
    chunks: list[ChunkReport] = field(default_factory=list)  # these and the cached tokens cover the prompt exactly
    token_times_s: list[float] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None  # for the prompt's tokens from the second on
    embedding: array[float] | None = None  # of the prompt, a unit vector; with `pooling`
    others: list[RequestOutput] = field(default_factory=list)  # of the same prompt, with `n`

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None before there is one."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def latency_s(self) -> float | None:
        return self.token_times_s[-1] if self.token_times_s else None

    @property
    def finished(self) -> bool:
        return all(one.finish_reason is not None for one in (self, *self.others))

    @property
    def outputs(self) -> list[CompletionOutput]:
        """All `n` answers, as vLLM's `RequestOutput` has them. The other attributes are those of the first."""
        return [CompletionOutput(one, index) for index, one in enumerate((self, *self.others))]

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens computed, over the time to the first token; None before there is one."""
        if not self.token_times_s:
            return None
        return (len(self.prompt_token_ids) - self.num_cached_tokens) / self.token_times_s[0]

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, over the time since it; None before there are two."""
        times = self.token_times_s
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None


def joined(outputs: list[RequestOutput], prompt: str | None) -> RequestOutput:
    """The outputs of one prompt as one, with the prompt's text."""
    first = outputs[0]
    first.prompt, first.others = prompt, outputs[1:]
    return first


@dataclass(frozen=True, slots=True, repr=False)
class CompletionOutput:
    """A view of a RequestOutput by the names of vLLM's `CompletionOutput`."""

    _output: RequestOutput
    index: int

    @property
    def text(self) -> str:
        return self._output.text

    @property
    def token_ids(self) -> list[int]:
        return self._output.token_ids

    @property
    def finish_reason(self) -> str | None:
        return self._output.finish_reason

    @property
    def stop_reason(self) -> str | None:
        return self._output.stop_reason

    @property
    def logprobs(self) -> LogprobRows | None:
        return self._output.logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the tokens; None unless logprobs were asked for."""
        return None if self.logprobs is None else sum(self.logprobs.chosen)

    def finished(self) -> bool:
        return self._output.finished

    def __repr__(self) -> str:
        names = ("index", "text", "token_ids", "finish_reason")
        return f"CompletionOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class Delta(NamedTuple):
    """What one step added to a request: new tokens, and the text that became certain."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    output: RequestOutput  # everything so far


class TextDecoder(Protocol):
    """Decodes tokens one by one: `evenflow.model.text.tokenizer.StreamDecoder`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextCodec(Protocol):
    """The interface of a tokenizer to the engine's callers."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_inside(self, text: str) -> list[int]: ...

    def stream_decoder(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TextDecoder: ...


class StopFinder:
    """Holds back text that may still turn out part of a stop string."""

    def __init__(self, stops: tuple[str, ...], *, includes_stop: bool = False) -> None:
        self._stops = stops
        self._includes_stop = includes_stop
        self._held = ""
        self._num_early = 0  # characters of early text

    def push(self, text: str, *, is_early: bool = False) -> tuple[str, str | None]:
        """Returns the text that is now certain, and the stop string met, if any: the text then ends.

        No stop string may end in early text, but one that ends later may begin there.
        """
        if not self._stops:
            return text, None
        self._held += text
        if is_early:
            self._num_early = len(self._held)
        found = [(index, stop) for stop in self._stops if (index := self._held.find(stop, self._first(stop))) >= 0]
        if found:
            first, met = min(found, key=lambda one: one[0])
            end = first + len(met) if self._includes_stop else first
            certain, self._held = self._held[:end], ""
            return certain, met
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        self._num_early = max(0, self._num_early - cut)
        return certain, None

    def _first(self, stop: str) -> int:
        """The first position at which this stop string ends after the early text."""
        return max(0, self._num_early - len(stop) + 1)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest suffix of `text` that is a prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)


class OutputBuilder:
    """Fills one request's RequestOutput."""

    def __init__(self, request: Request, decoder: TextDecoder | None) -> None:
        self.output = RequestOutput(request.id, request.tokens[: request.num_prompt_tokens])
        self._decoder = decoder
        self._includes_stop = request.sampling.include_stop_str_in_output
        self._stop_finder = StopFinder(request.sampling.stop, includes_stop=self._includes_stop)
        self._min_tokens = request.sampling.min_tokens
        self._stop_token_ids = request.stop_token_ids
        self._arrival = request.arrival_time

    def admit(self, num_cached_tokens: int) -> None:
        """Start, or restart after a preemption: keep only its own chunks that it found in the cache."""
        output = self.output
        if output.token_ids:
            return
        kept = [chunk for chunk in output.chunks if chunk.start < num_cached_tokens]
        output.chunks = [chunk._replace(length=min(chunk.length, num_cached_tokens - chunk.start)) for chunk in kept]
        output.num_cached_tokens = num_cached_tokens - sum(chunk.length for chunk in output.chunks)
        output.prompt_logprobs = None

    def take_chunk(self, chunk: ChunkReport, prompt_logprobs: LogprobRows | None) -> None:
        """Record the chunks up to the first token."""
        output = self.output
        if output.token_ids:
            return
        output.chunks.append(chunk._replace(request_id=output.request_id))
        if prompt_logprobs is not None:
            output.prompt_logprobs = _extended(output.prompt_logprobs, prompt_logprobs)

    def take(self, tokens: tuple[int, ...], logprobs: LogprobRows | None, ended: Ended | None, now: float) -> Delta:
        """Add a step's tokens. The output may end here at a stop string that the engine does not know."""
        output = self.output
        num_early = self._min_tokens and max(0, self._min_tokens - len(output.token_ids))
        output.token_ids += tokens
        for _ in tokens:
            output.token_times_s.append(now - self._arrival)
        if logprobs is not None:
            output.logprobs = _extended(output.logprobs, logprobs)
        text, met = "", None
        if self._decoder is not None:
            shown = tokens
            if ended is not None and ended.reason == FinishReason.STOP and not self._includes_stop:
                shown = tuple(token for token in tokens if token not in self._stop_token_ids)
            if num_early:
                text, _ = self._stop_finder.push("".join(map(self._decoder.push, shown[:num_early])), is_early=True)
                shown = shown[num_early:]
            certain, met = self._stop_finder.push("".join(map(self._decoder.push, shown)))
            text += certain
            output.text += text
        if met is not None:
            self._decoder = None  # its pending text comes after the stop string
            output.stop_reason = met
            self.finish(FinishReason.STOP)
        elif ended is not None:
            text += self.finish(ended.reason, ended.error)
        return Delta(output.request_id, tokens, text, output.finish_reason, output)

    def finish(self, reason: str, error: str | None = None) -> str:
        """Close the output; returns the text held back."""
        self.output.finish_reason = reason
        self.output.error = error
        rest = ""
        if self._decoder is not None:
            is_early = len(self.output.token_ids) <= self._min_tokens
            certain, self.output.stop_reason = self._stop_finder.push(self._decoder.flush(), is_early=is_early)
            rest = certain + self._stop_finder.flush()
        self.output.text += rest
        return rest


def _extended(rows: LogprobRows | None, more: LogprobRows) -> LogprobRows:
    rows = LogprobRows() if rows is None else rows
    rows.extend(more)
    return rows


class Outputs:
    """The open requests' outputs, filled from an engine's reports. Every token becomes text here, once."""

    def __init__(self, codec: TextCodec | None, stop: Callable[[str, int], object]) -> None:
        self._codec = codec  # None: tokens only
        self._stop = stop  # ends a request in the engine after this many tokens
        self._builders: dict[str, OutputBuilder] = {}

    def add(self, request: Request, engine_id: str | None = None) -> RequestOutput:
        """`engine_id`: the engine's name for it; None: its own."""
        decoder = None
        if self._codec is not None:
            skips = request.sampling.skip_special_tokens
            decoder = self._codec.stream_decoder(request.tokens, skip_special_tokens=skips)
        builder = self._builders[engine_id or request.id] = OutputBuilder(request, decoder)
        return builder.output

    def finish(self, engine_id: str, reason: str, error: str | None = None) -> Delta | None:
        """End an output by an abort or a failure; None if it has ended already."""
        builder = self._builders.pop(engine_id, None)
        if builder is None:
            return None
        return Delta(builder.output.request_id, (), builder.finish(reason, error), reason, builder.output)

    def take(self, report: StepReport) -> Iterator[Delta]:
        """Yield each output's delta of a step, lazily: the caller may do other work in between."""
        builders = self._builders
        for admission in report.admissions:
            if (builder := builders.get(admission.request_id)) is not None:
                builder.admit(admission.num_cached_tokens)
        for place, chunk in enumerate(report.chunks):
            if (builder := builders.get(chunk.request_id)) is not None:
                builder.take_chunk(chunk, report.prompt_logprobs.get(place))
        for row, values in report.embeddings.items():
            if (builder := builders.get(report.ids[row])) is not None:
                builder.output.embedding = array("f", values)
        ended, logprobs, now = report.ended, report.logprobs, report.at
        for row, (engine_id, tokens) in enumerate(zip(report.ids, report.tokens, strict=True)):
            builder = builders.get(engine_id)
            if builder is None:  # ended here; the engine does not know yet
                continue
            delta = builder.take(tokens, logprobs.get(row), ended.get(row), now)
            if delta.finish_reason is not None:
                del builders[engine_id]
                if row not in ended:
                    self._stop(engine_id, len(delta.output.token_ids))
            yield delta
