"""A host engine in virtual time: a scheduler with vLLM's rules, alone or with our steering inside.

Its KV memory has no end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from evenflow.core.plan import ChunkReason
from evenflow.core.policy import Candidate, Quota
from evenflow.hosts.in_flight import InFlightStep
from evenflow.hosts.settings import Settings
from evenflow.hosts.steering import Decode, Host, HostLoad, HostRequest, Steering
from evenflow.simulation.devices import Ran, StepWork

_FREE_TOKENS = 10**9


@dataclass(slots=True, eq=False)
class _Stream:
    request: HostRequest
    num_computed: int  # of its prompt
    num_sampled: int = 0  # by steps that were scheduled

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_left(self) -> int:
        return self.request.num_prompt_tokens - self.num_computed

    @property
    def is_sampled(self) -> bool:
        """To its last token."""
        return self.num_sampled == self.request.max_tokens


class HostOutcome(NamedTuple):
    """A step that has ended."""

    step: InFlightStep
    ids: list[str]  # requests that got a token
    ended: list[str]  # those for which it was the last


class HostEngine:
    """Decodes first, then prompts in order of arrival, up to a budget of tokens."""

    def __init__(self, budget: int, max_num_seqs: int, steps_in_flight: int = 2) -> None:
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._steps_in_flight = steps_in_flight
        self._waiting: dict[str, _Stream] = {}
        self._running: dict[str, _Stream] = {}  # in order of admission
        self._in_flight: deque[HostOutcome] = deque()

    def add(self, request: HostRequest, now: float) -> None:
        self._waiting[request.id] = _Stream(request, request.num_cached_tokens)

    def schedule(self, now: float) -> StepWork | None:
        return self._schedule(now) if len(self._in_flight) < self._steps_in_flight else None

    def _schedule(self, now: float) -> StepWork | None:
        samples = [one for one in self._running.values() if not one.num_left and not one.is_sampled]
        decodes = [Decode(one.id, 1, one.request.num_prompt_tokens + one.num_sampled) for one in samples]
        step = InFlightStep(now, {one.id for one in samples})
        step.key = step
        prompts = self._prompts(now)
        for quota in self._quotas(now, decodes, [_candidate(one) for one in prompts]):
            one = prompts[quota.candidate]
            if one.id in self._waiting:
                self._running[one.id] = self._waiting.pop(one.id)
            step.reasons[one.id] = quota.reason
            step.chunks.append((one.id, one.num_computed, quota.tokens))
            one.num_computed += quota.tokens
            if not one.num_left:
                samples.append(one)
        if not decodes and not step.chunks:
            return None
        for one in samples:
            one.num_sampled += 1
        ended = [one.id for one in samples if one.is_sampled]
        self._in_flight.append(HostOutcome(step, [one.id for one in samples], ended))
        num_ended = len(samples) - len(decodes)
        self._scheduled(step, decodes, num_ended)
        chunks = tuple([(start, length) for _, start, length in step.chunks])
        return StepWork(len(decodes), sum([one.context for one in decodes]), chunks, num_ended)

    def _prompts(self, now: float) -> list[_Stream]:
        """Prompts that the next step may compute, in order of service."""
        return [*self._prefilling(), *islice(self._waiting.values(), self._num_free)]

    def _prefilling(self) -> list[_Stream]:
        return [one for one in self._running.values() if one.num_left]

    @property
    def _num_free(self) -> int:
        """Places for waiting requests."""
        return self._max_num_seqs - len(self._running)

    def _quotas(self, now: float, decodes: Sequence[Decode], prompts: Sequence[Candidate]) -> Sequence[Quota]:
        left, quotas = self._budget - len(decodes), list[Quota]()
        for number, prompt in enumerate(prompts):
            if left <= 0:
                break
            quotas.append(Quota(number, min(left, prompt.length), ChunkReason.BUDGET))
            left -= prompt.length
        return quotas

    def _scheduled(self, step: InFlightStep, decodes: Sequence[Decode], num_ended: int) -> None:
        """Steering follows steps."""

    def launched(self, now: float) -> None:
        """Steering follows steps."""

    def commit(self, ran: Ran, now: float) -> HostOutcome:
        outcome = self._in_flight.popleft()
        for request_id in outcome.ended:
            del self._running[request_id]
        return outcome


class _VirtualSteering(Steering):
    """Its clocks are set."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    wall_clock = clock


class SteeredHostEngine(HostEngine):
    """With our steering inside, as the plug-in for vLLM has it. What it learns is not kept."""

    def __init__(self, host: Host, settings: Settings, steps_in_flight: int = 2) -> None:
        super().__init__(host.budget, host.max_num_seqs, steps_in_flight)
        self._max_prompts = host.caps.max_prefill_sequences  # of a step
        self._steering = _VirtualSteering(replace(host, step_times_path=None), settings)

    def add(self, request: HostRequest, now: float) -> None:
        super().add(request, now)
        self._steering.now = now
        self._steering.add(request)

    def _schedule(self, now: float) -> StepWork | None:
        self._steering.now = now
        self._steering.begin_step()
        return super()._schedule(now)

    def _prompts(self, now: float) -> list[_Stream]:
        prompts = {one.id: one for one in self._prefilling()} | self._waiting
        in_line = list(self._steering.line_up(now, list(prompts), self._max_prompts))
        left_out = set([one for one in in_line if one in self._waiting][self._num_free :])
        return [prompts[one] for one in in_line if one not in left_out][: self._max_prompts]

    def _quotas(self, now: float, decodes: Sequence[Decode], prompts: Sequence[Candidate]) -> Sequence[Quota]:
        return self._steering.plan(now, decodes, prompts, _FREE_TOKENS, long_prefill_token_threshold=0)[1]

    def _scheduled(self, step: InFlightStep, decodes: Sequence[Decode], num_ended: int) -> None:
        self._steering.scheduled(step, decodes, num_ended)

    def launched(self, now: float) -> None:
        self._steering.now = now
        self._steering.launched(self._in_flight[-1].step.key)

    def commit(self, ran: Ran, now: float) -> HostOutcome:
        outcome = super().commit(ran, now)
        self._steering.now = now
        step = self._steering.ended(outcome.step.key)
        load = HostLoad(len(self._running), len(self._waiting), 0.0)
        tokens = dict.fromkeys(outcome.ids, (0,))
        self._steering.emitted(step, tokens, self._running | self._waiting, load)
        return outcome


def _candidate(one: _Stream) -> Candidate:
    return Candidate(one.id, one.num_computed, one.num_left, one.request.num_prompt_tokens)
