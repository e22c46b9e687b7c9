"""Drives the demo's prompts step by step on an engine, and so in virtual time if its clock is virtual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from evenflow.bench.timeline import StreamTimes, Timeline
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake
from evenflow.engine.outputs import Outputs, RequestOutput, TextCodec
from evenflow.errors import EngineFailed

Size = Literal["small", "large"]
OnRun = Callable[[Timeline], None]

_TOKENS_BEFORE_LAST = 12  # of each small answer


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    name: str
    size: Size
    token_ids: Sequence[int]  # with the chat template, if the model has one
    text_tokens: int  # of the user's text
    max_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    name: str
    size: Size
    prompt_tokens: int  # of the user's text
    output_tokens: int
    num_chunks: int
    ttft_s: float
    latency_s: float
    longest_gap_s: float  # between two of its tokens
    finish_place: int  # 1: first of its run to finish
    text: str


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The answers to the prompts of one run, in their order."""

    policy: str
    answers: tuple[DemoAnswer, ...]
    last_arrival_s: float  # of the last prompt, since the run began
    timeline: Timeline

    @property
    def total_s(self) -> float:
        return self.timeline.last_token_s

    @property
    def longest_gap_s(self) -> float:
        """The longest pause of any stream between two tokens."""
        return self.timeline.longest_gap_s

    def mean_latency_s(self, size: Size) -> float:
        return fmean(answer.latency_s for answer in self.answers if answer.size == size)

    def mean_ttft_s(self, size: Size) -> float:
        return fmean(answer.ttft_s for answer in self.answers if answer.size == size)

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.total_s

    @property
    def output_tokens_per_s(self) -> float:
        return sum(answer.output_tokens for answer in self.answers) / self.total_s

    @property
    def tokens_per_s(self) -> float:
        """Of prompts and answers."""
        return sum(answer.prompt_tokens + answer.output_tokens for answer in self.answers) / self.total_s


@dataclass(frozen=True, slots=True)
class DemoRunner:
    """Runs prompts on an idle engine, which is left idle. `on_run` gets each run's timeline when the run begins."""

    engine: Engine
    codec: TextCodec
    on_run: OnRun = lambda timeline: None

    def run(self, prompts: Sequence[DemoPrompt], name: str, last_arrival_s: float | None = 0.0) -> DemoRun:
        """Submit the prompts in order, the last one after `last_arrival_s`.

        None: it arrives when every small answer has some tokens, so that it finds streams that decode. If all others
        end before, it arrives then.
        """
        run = _Run(self.engine, self.codec, prompts, name)
        self.on_run(run.timeline)
        try:
            return run.to_the_end(last_arrival_s)
        finally:
            run.stop()


class _Run:
    def __init__(self, engine: Engine, codec: TextCodec, prompts: Sequence[DemoPrompt], name: str) -> None:
        self._engine = engine
        self._prompts = prompts
        self._name = name
        self._outputs = Outputs(codec, engine.stop)
        intake = Intake(engine.limits, engine.scheduler.block_size, codec, engine.clock)
        self._requests = [self._prepare(intake, prompt) for prompt in prompts]
        streams = {r.id: StreamTimes(p.name) for r, p in zip(self._requests, prompts, strict=True)}
        self.timeline = Timeline(name, engine.clock(), streams)

    def _prepare(self, intake: Intake, prompt: DemoPrompt) -> Request:
        sampling = SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens, ignore_eos=prompt.ignore_eos)
        # With a tenant of its own, a run finds nothing of an earlier one in the prefix cache.
        name, policy = self._name, self._engine.policy
        request_id = f"{name}/{prompt.name}"
        return intake.prepare(prompt.token_ids, sampling, policy=policy, request_id=request_id, tenant=name)

    def to_the_end(self, last_arrival_s: float | None) -> DemoRun:
        *first, last = self._requests
        for request in first:
            self._submit(request, arrived=0.0)
        finished: dict[str, RequestOutput] = {}
        while len(finished) < len(self._requests):
            if self.timeline.streams[last.id].arrived is None and self._is_due(last_arrival_s):
                now = self._now()
                self._submit(last, arrived=now if last_arrival_s is None else min(now, last_arrival_s))
            finished |= {output.request_id: output for output in self._step()}
        places = {request_id: place for place, request_id in enumerate(finished, start=1)}
        answers = tuple(
            self._answer(prompt, finished[request.id], places[request.id])
            for prompt, request in zip(self._prompts, self._requests, strict=True)
        )
        return DemoRun(str(self._engine.policy), answers, last.arrival_time - self.timeline.began, self.timeline)

    def stop(self) -> None:
        for request in self._requests:
            self._engine.abort(request.id)

    def _now(self) -> float:
        return self._engine.clock() - self.timeline.began

    def _is_due(self, last_arrival_s: float | None) -> bool:
        if not self._engine.has_work:
            return True
        if last_arrival_s is not None:
            return self._now() >= last_arrival_s
        streams = [s for s, p in zip(self.timeline.streams.values(), self._prompts, strict=True) if p.size == "small"]
        return all(stream.is_finished or len(stream.tokens) >= _TOKENS_BEFORE_LAST for stream in streams)

    def _submit(self, request: Request, arrived: float) -> None:
        request.arrival_time = self.timeline.began + arrived
        self._engine.add(request)
        self._outputs.add(request)
        self.timeline.streams[request.id].arrived = arrived

    def _step(self) -> list[RequestOutput]:
        """Run one step, and return the outputs that it completed."""
        report = self._engine.step()
        assert report is not None  # there is work until all requests have ended
        self.timeline.take(report)
        finished = [delta.output for delta in self._outputs.take(report) if delta.finish_reason is not None]
        for output in finished:
            if output.finish_reason == "error":
                raise EngineFailed(f"{output.request_id}: {output.error}")
        return finished

    def _answer(self, prompt: DemoPrompt, output: RequestOutput, finish_place: int) -> DemoAnswer:
        return DemoAnswer(
            name=prompt.name,
            size=prompt.size,
            prompt_tokens=prompt.text_tokens,
            output_tokens=len(output.token_ids),
            num_chunks=len(output.chunks),
            ttft_s=output.token_times_s[0],
            latency_s=output.token_times_s[-1],
            longest_gap_s=self.timeline.streams[output.request_id].longest_gap_s,
            finish_place=finish_place,
            text=output.text.strip(),
        )
