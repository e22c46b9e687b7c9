"""`LLM`: a model in this process, for callers that wait.

A step runs when any caller waits for output, and serves all open requests. Each caller reads its own deltas from an
inbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from typing import TypeVar

from evenflow.core.policies import PolicySpec
from evenflow.core.request import FinishReason, Pooling, Request, SamplingParams
from evenflow.engine.base_llm import BaseLLM, check_sampling
from evenflow.engine.engine import Engine
from evenflow.engine.engine_thread import EngineThread
from evenflow.engine.intake import Intake
from evenflow.engine.outputs import Delta, Outputs, RequestOutput, joined
from evenflow.engine.prompts import Conversation, Prompt, Prompts, as_batch, as_conversations, read_prompt
from evenflow.errors import EngineFailed, InvalidRequest

Kind = TypeVar("Kind")
Inbox = deque[Delta]


class LLM(BaseLLM):
    """Loads a model and serves it with chunked prefill.

        llm = LLM("default", policy="fixed:256")
        [answer] = llm.chat([[{"role": "user", "content": "What is a token?"}]])
        print(answer.text)

    Calls and streams may overlap, also on several threads: their requests share steps. Ctrl-C ends the waiting call and
    aborts its requests; the object continues to serve. In a forked process it does not: load the model there.

    Settings are the fields of EngineConfig. With `record`, every step is written there as a JSON line.
    """

    def _start(self, engine: Engine, intake: Intake) -> None:
        super()._start(engine, intake)
        self.engine = engine  # for callers that step it themselves; otherwise only its thread uses it, and the rest
        self._thread = EngineThread()
        self._outputs = Outputs(intake.codec, engine.stop)
        self._inboxes: dict[str, Inbox] = {}  # of the open requests
        self._added: Inbox = deque()  # of requests queued by `add`
        self._is_closed = False

    def _set_policy(self, policy: PolicySpec) -> None:
        self._call(lambda: self.engine.set_policy(policy))
        self._policy = policy

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_delta: Callable[[Delta], None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts. All prompts are checked before the first one runs.

        A prompt is a text, token ids, or vLLM's `{"prompt": ...}` or `{"prompt_token_ids": ...}`. Without parameters an
        answer has up to 128 tokens, always the likeliest ones. With `SamplingParams(n=3, temperature=0.8)` each prompt
        gets three, in `outputs`.

        A request that fails while it runs has the finish_reason "error" and the reason in `error`; the others go on.
        With `SamplingParams(grammar=Grammar.json_schema(...))` the output matches a schema: docs/structured_output.md.
        `priority`, lower is more urgent, chooses the class of service of each prompt: docs/shares.md.
        """
        batch = [read_prompt(prompt) for prompt in as_batch(prompts)]
        params = _one_each("sampling params", sampling_params, len(batch))
        priorities = _one_each("priorities", priority, len(batch))
        requests: list[Request] = []
        counts: list[int] = []
        for (prompt, _), sampling, urgency in zip(batch, params, priorities, strict=True):
            choices = check_sampling(sampling).choices()
            token_ids = self._intake.encode(prompt)
            requests += [self.prepare(token_ids, one, priority=urgency) for one in choices]
            counts.append(len(choices))
        outputs = iter(self._complete(requests, on_delta))
        return [joined(list(islice(outputs, count)), text) for count, (_, text) in zip(counts, batch, strict=True)]

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_delta: Callable[[Delta], None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Reply to conversations, each a list of messages, through the model's chat template."""
        prompts = [self.encode_chat(messages) for messages in as_conversations(conversations)]
        return self.generate(prompts, sampling_params, on_delta=on_delta, priority=priority)

    def embed(self, prompts: Prompts, pooling: Pooling = "last") -> list[RequestOutput]:
        """Embed each prompt as a unit vector in `embedding`, from its last token or the mean of all."""
        return self.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """Stream one output. Closing the iterator early aborts the request."""
        yield from self._run([self.prepare(prompt, sampling_params)])

    # ---- step by step ----

    def add(self, request: Request) -> None:
        """Queue a prepared request for `step`. A finished one runs again from its start."""
        new = request if request.finish_reason is None else request.record().request()
        self._call(lambda: self._add([new], self._added))

    def step(self) -> list[Delta]:
        """Run one step and return the deltas of added requests; expired ones end before it."""
        self._call(self._step)
        deltas: list[Delta] = []
        with suppress(IndexError):  # empty: other threads also take deltas
            while True:
                deltas.append(self._added.popleft())
        return deltas

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at any moment; None if it has ended already."""
        return self._call(lambda: self._abort(request_id))

    # ---- callers' waits ----

    def _complete(self, requests: list[Request], on_delta: Callable[[Delta], None] | None) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        with closing(self._run(requests)) as deltas:
            for delta in deltas:
                if on_delta is not None:
                    on_delta(delta)
                outputs[delta.request_id] = delta.output
        return [outputs[request.id] for request in requests]

    def _run(self, requests: list[Request]) -> Generator[Delta]:
        """Yield the deltas of these requests until all have ended. Closing it early aborts the rest."""
        inbox: Inbox = deque()
        num_open = len(requests)
        try:
            self._call(lambda: self._add(requests, inbox))
            while num_open:
                if not inbox:
                    self._call(lambda: None if inbox else self._step())  # another caller's step may have filled it
                while inbox:
                    delta = inbox.popleft()
                    num_open -= delta.finish_reason is not None
                    yield delta
        finally:
            if num_open:
                self._thread.send(lambda: self._abandon(requests, inbox))

    def _call(self, function: Callable[[], Kind]) -> Kind:
        def run() -> Kind:
            if self._is_closed:
                raise EngineFailed("the engine was closed")
            return function()

        self._check_process()
        return self._thread.call(run)

    # ---- on the engine's thread ----

    def _add(self, requests: list[Request], inbox: Inbox) -> None:
        for request in requests:
            self.engine.add(request)
            self._outputs.add(request)
            self._inboxes[request.id] = inbox

    def _step(self) -> None:
        for request_id, error in self.engine.expire().items():
            self._finish(request_id, FinishReason.ERROR, str(error))
        report = self.engine.step()
        if report is not None:
            for delta in self._outputs.take(report):
                self._deliver(delta)

    def _abort(self, request_id: str) -> RequestOutput | None:
        self.engine.abort(request_id)
        return self._finish(request_id, FinishReason.ABORT)

    def _abandon(self, requests: list[Request], inbox: Inbox) -> None:
        for request in requests:
            if self._inboxes.get(request.id) is inbox:  # else it was never added, and another may have its id
                self._abort(request.id)

    def _finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> RequestOutput | None:
        delta = self._outputs.finish(request_id, reason, error)
        if delta is None:
            return None
        self._deliver(delta)
        return delta.output

    def _deliver(self, delta: Delta) -> None:
        self._inboxes[delta.request_id].append(delta)
        if delta.finish_reason is not None:
            del self._inboxes[delta.request_id]

    def close(self) -> None:
        """End the engine. A forked process has none."""
        if self._is_here:
            self._thread.call(self._close)

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _one_each(what: str, values: Kind | Sequence[Kind], count: int) -> Sequence[Kind]:
    """The given ones, or the same for every prompt."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise InvalidRequest(f"Got {len(values)} {what} for {count} prompts but expected one each.")
    return values
