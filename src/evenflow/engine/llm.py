"""`LLM`: a model in this process, on the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from evenflow.config import EngineConfig
from evenflow.core.policies import PolicySpec
from evenflow.core.request import FinishReason, Request, SamplingParams
from evenflow.engine.build import build_engine
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake
from evenflow.engine.outputs import Delta, Outputs, RequestOutput
from evenflow.errors import InvalidRequest

if TYPE_CHECKING:
    from evenflow.model.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=128)


class LLM:
    """Loads a model and serves it with chunked prefill.

        llm = LLM("default", policy="fixed:256")
        [answer] = llm.chat([[{"role": "user", "content": "What is a token?"}]])
        print(answer.text)

    Settings are the fields of EngineConfig. With `record`, every step is written there as a JSON line.
    """

    def __init__(self, model: str | Path = "default", *, record: str | Path | None = None, **settings: Any) -> None:
        self.config = make_config(model, settings)
        built = build_engine(self.config, record)
        self.tokenizer = built.tokenizer
        self._start(built.engine, built.intake)

    @classmethod
    def over(cls, engine: Engine, intake: Intake) -> LLM:
        """Around an existing engine, such as one with a fake executor."""
        llm = cls.__new__(cls)
        llm._start(engine, intake)
        return llm

    def _start(self, engine: Engine, intake: Intake) -> None:
        self.engine = engine
        self._intake = intake
        self._outputs = Outputs(intake.codec, engine.stop)

    @property
    def policy(self) -> str:
        return str(self.engine.policy)

    def set_policy(self, policy: str | PolicySpec) -> None:
        """Plan by another policy from the next step on; the model, its KV cache and the requests stay."""
        self.engine.set_policy(self.config.with_policy(policy).resolve_policy(self.engine.limits.max_model_len))

    def set_target(self, seconds: float | None, paced: bool | None = None) -> None:
        """Keep another target from the next step on, paced as before unless stated; None: keep none."""
        self.engine.set_target(seconds, paced)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts. Every prompt is checked before the first one runs.

        A request that fails while it runs has the finish_reason "error" and the reason in `error`; the others go on.
        With `SamplingParams(grammar=Grammar.json_schema(...))` the output matches a schema: docs/structured_output.md.
        """
        batch = as_batch(prompts)
        params = _one_each(sampling_params, len(batch))
        requests = [self.prepare(prompt, sampling) for prompt, sampling in zip(batch, params, strict=True)]
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
    ) -> list[RequestOutput]:
        """Replies to conversations, each a list of messages, through the model's chat template."""
        is_one = conversations and isinstance(conversations[0], Mapping)
        batch = cast("Sequence[Conversation]", [conversations] if is_one else conversations)
        prompts = [self.encode_chat(messages) for messages in batch]
        return self.generate(prompts, sampling_params, on_delta=on_delta)

    def encode_chat(self, messages: Conversation) -> list[int]:
        """The token ids of a conversation, up to where the reply begins."""
        return encode_chat(self.tokenizer, messages)

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams = GREEDY,
        *,
        request_id: str | None = None,
        tenant: str = "",
    ) -> Request:
        """Check and tokenise a request without running it; it arrives now. May be called on any thread."""
        policy = self.engine.policy
        return self._intake.prepare(prompt, sampling_params, policy=policy, request_id=request_id, tenant=tenant)

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
        """Run one step, and return what it added to each request."""
        report = self.engine.step()
        return [] if report is None else list(self._outputs.take(report))

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_config(model: str | Path, settings: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from keyword arguments; an unknown one is an error that lists the known ones."""
    known = [name for name in EngineConfig.__dataclass_fields__ if name != "model"]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise TypeError(f"unknown setting {unknown[0]!r}; known are {', '.join(known)}")
    return EngineConfig(model=str(model), **settings)


def encode_chat(tokenizer: Tokenizer, messages: Conversation) -> list[int]:
    """The token ids of a conversation, up to where the reply begins."""
    if not messages:
        raise InvalidRequest("Got an empty conversation but expected at least one message.")
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a string or a list of token ids; several are a list of those."""
    is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
    return cast("list[Prompt]", [prompts] if is_one else list(prompts))


def _one_each(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise InvalidRequest(f"Got {len(sampling)} sampling params for {count} prompts but expected one each.")
    return sampling
