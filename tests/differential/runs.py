"""Runs a configuration and checks it: after every step what a scheduler promises, at the end that nothing is left over,
and that every answer is right."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evenflow.core.request import Request
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.errors import InvalidRequest, LateRequest
from tests.core.promises import check_accounts, check_scheduler
from tests.differential.configurations import Ask, Configuration
from tests.differential.judge import Finding, judge_of, model_path, require
from tests.differential.machine import Tamper, as_it_is, start

# By their format. Everything else that is logged as a warning or an error is a finding.
_EXPECTED_LOGS = (
    "Policy %s is infeasible",
    "Memory ran out. From now on",
    "step %d failed",
)


def run(configuration: Configuration, tamper: Tamper = as_it_is) -> Counter[str]:
    """What happened, by kind. Raises a Finding, or whatever the engine raised."""
    events: Counter[str] = Counter()
    answers: dict[int, RequestOutput] = {}
    with _Log() as log, tempfile.TemporaryDirectory(prefix="evenflow-differential-") as folder:
        for phase in range(configuration.num_phases):
            _Phase(configuration, Path(folder) / "cache", events, answers, phase, tamper).run()
        log.check(has_faults=bool(configuration.faults))
    return events


class _Phase:
    """One engine, from its start to its end."""

    def __init__(
        self,
        configuration: Configuration,
        cache_dir: Path,
        events: Counter[str],
        answers: dict[int, RequestOutput],
        phase: int,
        tamper: Tamper,
    ) -> None:
        self._configuration, self._events = configuration, events
        self._answers = answers  # by the ask's number, of earlier phases too
        self._asks = [ask for ask in configuration.asks if ask.phase == phase]
        self._changes = list(configuration.changes)
        self._llm, self._machine = start(configuration, model_path(configuration.model), cache_dir, events, phase)
        self._machine.tamper = tamper
        self._engine = self._llm.engine
        self._requests: dict[int, Request] = {}
        self._added_at: dict[int, int] = {}
        self._seen: dict[str, tuple[list[int], str]] = {}  # what the deltas said so far
        self._cache_dir, self._phase = cache_dir, phase

    def run(self) -> None:
        waiting, step = list(self._asks), 0
        limit = 2000 + 40 * sum(len(ask.prompt) + ask.sampling.max_tokens for ask in self._asks)
        while waiting or self._engine.has_work:
            waiting = [ask for ask in waiting if not self._is_due(ask, step) or not self._add(ask, step)]
            self._change(step)
            self._abort(step)
            for delta in self._llm.step():
                self._take(delta)
            self._check_step()
            step += 1
            require(step < limit, f"no end after {step} steps: {self._engine.scheduler.requests}")
        self._check_end()
        self._llm.close()
        self._check_folder()

    # ---- what happens between steps ----

    def _is_due(self, ask: Ask, step: int) -> bool:
        in_phase = {one.number for one in self._asks}
        return ask.at_step <= step and not (ask.follows in in_phase and ask.follows not in self._answers)

    def _prompt(self, ask: Ask) -> list[int]:
        before = self._answers.get(ask.follows) if ask.follows is not None else None
        tokens = [*ask.prompt] if before is None else [*before.prompt_token_ids, *before.token_ids, *ask.prompt]
        return tokens[-(self._llm.max_model_len - 1) :]

    def _add(self, ask: Ask, step: int) -> bool:
        """True, as the ask is done with."""
        sampling = ask.sampling
        if not self._llm.policy.startswith("target"):
            sampling = replace(sampling, tbt_target=None, ttft_target=None)
        names = {"tenant": ask.tenant, "cache_salt": ask.cache_salt, "service_class": ask.service_class}
        request = self._llm.prepare(self._prompt(ask), sampling, request_id=ask.id, **names)
        self._events["requests"] += 1
        try:
            self._llm.add(request)
        except LateRequest:
            self._refused(ask, request)
            require(self._may_be_refused(ask), f"{ask.id} was refused without a reason")
            return True
        except InvalidRequest:
            capacity = self._engine.scheduler.pool.num_blocks * self._engine.scheduler.block_size
            require(request.max_known_tokens > capacity and self._machine.faulty.num_raised, f"{ask.id} was refused")
            self._refused(ask, request)
            return True
        self._requests[ask.number], self._added_at[ask.number] = request, step
        self._seen[ask.id] = [], ""
        return True

    def _refused(self, ask: Ask, request: Request) -> None:
        self._events["refused"] += 1
        self._answers[ask.number] = RequestOutput(ask.id, request.tokens)
        require(ask.id not in self._engine.scheduler.requests, f"{ask.id} was refused, and is served")

    def _may_be_refused(self, ask: Ask) -> bool:
        classes = self._engine.scheduler.config.classes
        refuses = any(one.refuse_late and one.name == ask.service_class for one in classes)
        return refuses or ask.sampling.deadline is not None

    def _change(self, step: int) -> None:
        while self._changes and self._changes[0][0] <= step:
            _, policy = self._changes.pop(0)
            self._events["live changes"] += 1
            if policy == "none":
                self._llm.set_target(None)
            else:
                self._llm.set_policy(policy)

    def _abort(self, step: int) -> None:
        for ask in self._asks:
            added = self._added_at.get(ask.number)
            if added is None or ask.abort_after is None or step - added != ask.abort_after:
                continue
            output = self._llm.abort(ask.id)
            require((output is None) == (ask.number in self._answers), f"{ask.id}: its abort gave {output}")
            if output is not None:
                require(output.finish_reason == "abort", f"{ask.id} was aborted and ends with {output.finish_reason}")

    def _take(self, delta: Delta) -> None:
        number = int(delta.request_id.removeprefix("ask-"))
        require(number not in self._answers, f"{delta.request_id} got {delta} after its end")
        tokens, text = self._seen[delta.request_id]
        tokens += delta.token_ids
        self._seen[delta.request_id] = tokens, text + delta.text
        require(tokens == delta.output.token_ids, f"{delta.request_id}: its deltas have tokens {tokens}")
        if delta.finish_reason is not None:
            require(
                text + delta.text == delta.output.text, f"{delta.request_id}: its deltas have {text + delta.text!r}"
            )
            self._answers[number] = delta.output
            self._events[f"ended by {delta.finish_reason}"] += 1

    # ---- checks ----

    def _check_step(self) -> None:
        scheduler = self._engine.scheduler
        check_scheduler(scheduler, self._machine.touched)
        check_accounts(scheduler)
        require(self._engine._admission_failure is None, f"stuck: {self._engine._admission_failure}")
        open_ids = {request.id for number, request in self._requests.items() if number not in self._answers}
        require(scheduler.requests.keys() == open_ids, f"open are {open_ids}, served {list(scheduler.requests)}")

    def _check_end(self) -> None:
        scheduler, asks = self._engine.scheduler, {ask.number: ask for ask in self._asks}
        require(
            scheduler.pool.num_free == scheduler.pool.num_blocks, f"blocks leak: {scheduler.pool.num_held} are held"
        )
        require(scheduler.seats.num_free == scheduler.config.max_num_seqs, "slots leak")
        require(not scheduler._recovery.suspects, "suspects are left")
        require(not scheduler.prefix_cache._being_computed, "blocks are expected that nobody computes")
        require(not self._llm._outputs._builders, f"outputs are left: {list(self._llm._outputs._builders)}")
        require(scheduler.tier is None or not scheduler.tier.num_returning, "blocks are still to return")
        for number, request in self._requests.items():
            require(number in self._answers, f"{request.id} never ended")
            output = self._answers[number]
            self._check_answer(asks[number], request, output)
            if output.prompt_token_ids:
                judge_of(self._configuration.model).check(request, output)
        self._check_totals()

    def _check_answer(self, ask: Ask, request: Request, output: RequestOutput) -> None:
        tokens, reason, name = output.token_ids, output.finish_reason, request.id
        most = min(request.sampling.max_tokens, self._llm.max_model_len - len(output.prompt_token_ids))
        ends = [n for n, token in enumerate(tokens, 1) if token in request.stop_token_ids]
        require(len(tokens) <= most, f"{name}: {len(tokens)} tokens of at most {most}")
        match reason:
            case "length":
                require(len(tokens) == most, f"{name}: {len(tokens)} tokens of {most} and ends by length")
                require(not ends, f"{name}: it went on after a stop token: {tokens}")
            case "stop":
                at_token = ends == [len(tokens)]
                require(at_token or output.stop_reason is not None, f"{name}: it stopped without a reason: {tokens}")
            case "abort":
                require(ask.abort_after is not None, f"{name}: nobody aborted it")
            case "error":
                require(self._may_fail(ask, output), f"{name}: {output.error}")
            case _:
                raise Finding(f"{name}: it ended with {reason}")
        times = output.token_times_s
        require(len(times) == len(tokens) and times == sorted(times), f"{name}: times {times} of {len(tokens)} tokens")
        self._check_usage(request, output)

    def _may_fail(self, ask: Ask, output: RequestOutput) -> bool:
        """A second fault ends a request, and only the one that has it, and so does its deadline."""
        if ask.sampling.deadline is not None and "deadline" in (output.error or ""):
            return True
        if "leave no token" in (output.error or ""):
            return ask.sampling.grammar is not None
        faults = self._configuration.faults
        num_possible = sum(fault.count for fault in faults if fault.request_id in (None, ask.id))
        return self._machine.faulty.num_raised > 1 and num_possible > 0

    def _check_usage(self, request: Request, output: RequestOutput) -> None:
        """The cached tokens and the chunks are the prompt, if it has given a token."""
        length, cached = len(output.prompt_token_ids), output.num_cached_tokens
        require(0 <= cached < length or not cached, f"{request.id}: {cached} of {length} prompt tokens are cached")
        if not output.token_ids:
            return
        end, computed = 0, 0
        for chunk in output.chunks:
            require(end <= chunk.start and chunk.length > 0, f"{request.id}: its chunks are {output.chunks}")
            end, computed = chunk.start + chunk.length, computed + chunk.length
        require(end == length == cached + computed, f"{request.id}: {cached} tokens and {output.chunks} of {length}")
        require(cached <= self._most_cached(request), f"{request.id}: {cached} cached tokens, of whose prompt?")

    def _most_cached(self, request: Request) -> int:
        """Of its prompt, what others with its salt have computed too, in this engine or before it."""
        salts = {
            ask.number: ask.tenant if ask.cache_salt is None else ask.cache_salt for ask in self._configuration.asks
        }
        prompt = request.tokens[: request.num_prompt_tokens]
        others = [
            [*output.prompt_token_ids, *output.token_ids]
            for number, output in self._answers.items()
            if salts[number].encode() == request.salt and output.request_id != request.id
        ]
        return max((_num_shared(prompt, other) for other in others), default=0)

    def _check_totals(self) -> None:
        totals = self._engine.stats.totals
        num_tokens = sum(len(self._answers[number].token_ids) for number in self._requests)
        require(totals.output_tokens >= num_tokens, f"{totals} for {num_tokens} tokens")
        require(0 <= totals.cached_tokens <= totals.looked_up_tokens, f"{totals}")
        ends = {self._answers[number].finish_reason for number in self._requests}
        has_stops = any(ask.sampling.stop for ask in self._asks)
        if ends <= {"length", "stop"} and not has_stops:
            require(totals.output_tokens == num_tokens, f"{totals} for {num_tokens} tokens")

    def _check_folder(self) -> None:
        if self._configuration.has_disk:
            size = sum(path.stat().st_size for path in self._cache_dir.iterdir())
            most = self._configuration.settings["cache_dir_size"]
            require(size <= most, f"the folder has {size} bytes of at most {most}")


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


class _Log(logging.Handler):
    """Keeps what evenflow warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records: list[logging.LogRecord] = []
        self._logger = logging.getLogger("evenflow")

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def __enter__(self) -> _Log:
        self._before = self._logger.handlers, self._logger.propagate
        self._logger.handlers, self._logger.propagate = [self], False
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.handlers, self._logger.propagate = self._before

    def check(self, has_faults: bool) -> None:
        for record in self._records:
            is_fault = record.levelno > logging.WARNING or record.msg.startswith("Memory")
            require(record.msg.startswith(_EXPECTED_LOGS), f"it logged {record.getMessage()!r}")
            require(has_faults or not is_fault, f"it logged {record.getMessage()!r} without a fault")
