"""`LLM`: a model in this process, on the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

from evenflow.core.policies import PolicySpec
from evenflow.core.request import FinishReason, Pooling, Request, SamplingParams
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake
from evenflow.engine.loaded_model import GREEDY, Conversation, LoadedModel, Prompt
from evenflow.engine.outputs import Delta, Outputs, RequestOutput
from evenflow.errors import InvalidRequest

Kind = TypeVar("Kind")


class LLM(LoadedModel):
    """Loads a model and serves it with chunked prefill.

        llm = LLM("default", policy="fixed:256")
        [answer] = llm.chat([[{"role": "user", "content": "What is a token?"}]])
        print(answer.text)

    Settings are the fields of EngineConfig. With `record`, every step is written there as a JSON line.
    """

    def _start(self, engine: Engine, intake: Intake) -> None:
        super()._start(engine, intake)
        self.engine = engine
        self._outputs = Outputs(intake.codec, engine.stop)

    def _set_policy(self, policy: PolicySpec) -> None:
        self.engine.set_policy(policy)
        self._policy = policy

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_delta: Callable[[Delta], None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts. Every prompt is checked before the first one runs.

        A request that fails while it runs has the finish_reason "error" and the reason in `error`; the others go on.
        With `SamplingParams(grammar=Grammar.json_schema(...))` the output matches a schema: docs/structured_output.md.
        `priority`, lower is more urgent, chooses the class of service of each prompt: docs/shares.md.
        """
        batch = as_batch(prompts)
        params = _one_each("sampling params", sampling_params, len(batch))
        priorities = _one_each("priorities", priority, len(batch))
        requests = [
            self.prepare(prompt, sampling, priority=urgency)
            for prompt, sampling, urgency in zip(batch, params, priorities, strict=True)
        ]
        outputs = self._run(requests, on_delta)
        for prompt, output in zip(batch, outputs, strict=True):
            output.prompt = prompt if isinstance(prompt, str) else None
        return outputs

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_delta: Callable[[Delta], None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Replies to conversations, each a list of messages, through the model's chat template."""
        is_one = conversations and isinstance(conversations[0], Mapping)
        batch = cast("Sequence[Conversation]", [conversations] if is_one else conversations)
        prompts = [self.encode_chat(messages) for messages in batch]
        return self.generate(prompts, sampling_params, on_delta=on_delta, priority=priority)

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "last") -> list[RequestOutput]:
        """Each prompt as a vector of unit length, in `embedding`: that of its last token, or the mean of all."""
        return self.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams = GREEDY) -> Iterator[Delta]:
        """One output as it is generated. Closing the iterator early aborts the request."""
        request = self.prepare(prompt, sampling_params)
        self.add(request)
        try:
            while not request.is_finished:
                yield from [delta for delta in self.step() if delta.request_id == request.id]
        finally:
            self.abort(request.id)

    # ---- step by step ----

    def add(self, request: Request) -> None:
        """Queue a prepared request, to be run by `step`."""
        self.engine.add(request)
        self._outputs.add(request)

    def step(self) -> list[Delta]:
        """Run one step, and return what it added to each request; those whose deadlines have passed end before it."""
        expired = [
            self._outputs.finish(request_id, FinishReason.ERROR, str(error))
            for request_id, error in self.engine.expire().items()
        ]
        report = self.engine.step()
        return [*filter(None, expired), *(() if report is None else self._outputs.take(report))]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at any moment; None if it has ended already."""
        self.engine.abort(request_id)
        delta = self._outputs.finish(request_id, FinishReason.ABORT)
        return None if delta is None else delta.output

    def _run(self, requests: list[Request], on_delta: Callable[[Delta], None] | None) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        try:
            for request in requests:
                self.add(request)
            while len(outputs) < len(requests):
                for delta in self.step():
                    if on_delta is not None:
                        on_delta(delta)
                    if delta.finish_reason is not None:
                        outputs[delta.request_id] = delta.output
        except BaseException:
            for request in requests:
                self.abort(request.id)
            raise
        return [outputs[request.id] for request in requests]

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a string or a list of token ids; several are a list of those."""
    is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
    return cast("list[Prompt]", [prompts] if is_one else list(prompts))


def _one_each(what: str, values: Kind | Sequence[Kind], count: int) -> Sequence[Kind]:
    """As given, one for each prompt, or the same for all."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise InvalidRequest(f"Got {len(values)} {what} for {count} prompts but expected one each.")
    return values
