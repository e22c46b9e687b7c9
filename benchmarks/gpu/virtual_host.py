"""A host engine in virtual time: vLLM's loop with two steps in flight, on a recorded device, over a random load.

The steering under test is the one that runs inside vLLM. In its place a fixed budget can be used, shared out as vLLM
does: decodes first, then prompts in order of arrival.
"""

from __future__ import annotations

import heapq
import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from outcomes import Stream
from random_loads import Client, Load
from recorded_device import RecordedDevice, StepWork

from evenflow.core.policies import PolicySpec
from evenflow.core.policy import Candidate
from evenflow.hosts.in_flight import InFlightStep
from evenflow.hosts.settings import Settings
from evenflow.hosts.steering import Decode, Host, HostLoad, HostRequest, Steering

_STEPS_IN_FLIGHT = 2
_BUDGET = 8192
_MAX_RUNNING = 256
# Host seconds around a launch, medians of the recordings.
_SCHEDULE_S = 0.0004
_OUTPUT_S = 0.0006  # from the end on the device to the host's hands


@dataclass(slots=True)
class _Flying:
    step: InFlightStep
    samples: list[Stream]
    launched_at: float
    gpu_end: float


class VirtualSteering(Steering):
    """Steering on a clock that the virtual host sets. It keeps nothing for a next start."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    wall_clock = clock

    def keep_step_times(self) -> None:
        return


class VirtualHost:
    """Runs one load to its end. `policy`: `target:50ms`, or `fixed:1024` for a budget without steering."""

    def __init__(self, device: RecordedDevice, load: Load, policy: str) -> None:
        self._device = device
        self._load = load
        self.now = 0.0
        self.streams: list[Stream] = []
        self._waiting: list[Stream] = []
        self._running: list[Stream] = []
        self._arrivals: list[tuple[float, int, Stream]] = []
        self._num_unanswered = 0  # of the long prompts, also those to come
        self._ids = count()
        self._in_flight: deque[_Flying] = deque()
        self._gpu_free_at = 0.0
        self._budget = _BUDGET
        self.steering: VirtualSteering | None = None
        self.errors: list[float] = []  # of the predictions of mixed steps
        spec = PolicySpec.parse(policy)
        if spec.target is None:
            self._budget = spec.max_step_tokens or _BUDGET
        else:
            log = logging.getLogger("replay")
            host = Host(device.caps, _BUDGET, _MAX_RUNNING, Path(os.devnull), log, device.prior)
            self.steering = VirtualSteering(host, Settings(spec, None, None))
        for client in (*load.chats, *load.long_prompts):
            self._send(client, 0, client.start_s)

    def run(self, *, until_answered: bool = False) -> None:
        """For the load's seconds, or only until every long prompt has its answer."""
        while self.now < self._load.seconds and (self._num_unanswered or not until_answered):
            self._admit()
            if len(self._in_flight) < _STEPS_IN_FLIGHT and self._schedule():
                continue
            if self._in_flight:
                self._finish(self._in_flight.popleft())
            elif self._arrivals:
                self.now = max(self.now, self._arrivals[0][0])
            else:
                return

    # ---- clients ----

    def _send(self, client: Client, turn: int, at: float) -> None:
        number = next(self._ids)
        size = client.turns[turn % len(client.turns)]
        is_long = not client.repeats
        self._num_unanswered += is_long
        sizes = size.prompt_tokens, size.output_tokens, size.cached_tokens
        stream = Stream(f"r{number}", client, turn, at, is_long, *sizes)
        heapq.heappush(self._arrivals, (at, number, stream))

    def _admit(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, _, stream = heapq.heappop(self._arrivals)
            self.streams.append(stream)
            self._waiting.append(stream)
            if self.steering is not None:
                prompt, cached = stream.num_prompt_tokens, stream.num_computed
                self.steering.now = self.now
                self.steering.add(HostRequest(stream.id, stream.due, prompt, prompt, cached, stream.max_tokens))

    # ---- steps ----

    def _schedule(self) -> bool:
        """Schedule and launch a step; False if there is nothing to run."""
        begun = self.now
        if self.steering is not None:
            self.steering.now = begun
            self.steering.begin_step()
        decodes = [s for s in self._running if not s.is_prefilling and s.num_sampled < s.max_tokens]
        decoding = [Decode(s.id, 1, s.num_computed + s.num_sampled) for s in decodes]
        candidates = self._candidates()
        step = InFlightStep(begun, {stream.id for stream in decodes})
        chunks = list(self._share(begun, step, decoding, candidates))
        if not decodes and not chunks:
            return False
        samples = list(decodes)
        for stream, length in chunks:
            if stream in self._waiting:
                self._waiting.remove(stream)
                self._running.append(stream)
            step.chunks.append((stream.id, stream.num_computed, length))
            stream.num_computed += length
            if not stream.is_prefilling:
                samples.append(stream)
        for stream in samples:
            stream.num_sampled += 1
        chunks_of_work = tuple((start, length) for _, start, length in step.chunks)
        work = StepWork(len(decodes), sum(one.context for one in decoding), chunks_of_work)
        self.now += _SCHEDULE_S
        begin = max(self._gpu_free_at, self.now)
        self.now += self._device.launch_seconds(work)
        self._gpu_free_at = max(begin + self._device.device_seconds(work), self.now)
        if self.steering is not None:
            step.key = step
            self.steering.scheduled(step, decoding, len(samples) - len(decodes))
            self.steering.now = self.now
            self.steering.launched(step.key)
        self._in_flight.append(_Flying(step, samples, self.now, self._gpu_free_at))
        return True

    def _candidates(self) -> list[Stream]:
        prefilling = [stream for stream in self._running if stream.is_prefilling]
        free = _MAX_RUNNING - len(self._running)
        if self.steering is None:
            return prefilling + self._waiting[:free]
        most = self._device.caps.max_prefill_sequences
        prompts = {stream.id: stream for stream in prefilling + self._waiting}
        ordered = self.steering.line_up(self.now, list(prompts), most)
        waiting = {stream.id for stream in self._waiting}
        left_out = set([name for name in ordered if name in waiting][free:])
        return [prompts[name] for name in ordered if name not in left_out][:most]

    def _share(
        self, now: float, step: InFlightStep, decoding: list[Decode], candidates: list[Stream]
    ) -> Iterator[tuple[Stream, int]]:
        if self.steering is None:
            left = self._budget - len(decoding)
            for stream in candidates:
                if left <= 0:
                    return
                length = min(left, stream.num_prompt_tokens - stream.num_computed)
                left -= length
                yield stream, length
            return
        _, quotas = self.steering.plan(
            now,
            decoding,
            [
                Candidate(s.id, s.num_computed, s.num_prompt_tokens - s.num_computed, s.num_prompt_tokens)
                for s in candidates
            ],
            free_tokens=10**9,
            long_prefill_token_threshold=0,
        )
        for quota in quotas:
            step.reasons[candidates[quota.candidate].id] = quota.reason
            yield candidates[quota.candidate], quota.tokens

    def _finish(self, flying: _Flying) -> None:
        self.now = max(self.now, flying.gpu_end + _OUTPUT_S)
        for stream in flying.samples:
            stream.token_times.append(self.now)
            if len(stream.token_times) == stream.max_tokens:
                self._running.remove(stream)
                self._num_unanswered -= stream.is_long
                client, turn = stream.client, stream.turn + 1
                if client.repeats or turn < len(client.turns):
                    self._send(client, turn, self.now + client.pause_s)
        if self.steering is not None:
            self.steering.now = self.now
            step = self.steering.ended(flying.step.key)
            if step.is_own_time and step.chunks and step.decode_ids:
                self.errors.append(step.predicted / step.seconds - 1)
            tokens = {stream.id: [0] for stream in flying.samples}
            still_open = {stream.id: stream for stream in (*self._running, *self._waiting)}
            self.steering.emitted(step, tokens, still_open, HostLoad(len(self._running), len(self._waiting), 0.0))
