"""Where requests are sent: an OpenAI-compatible server, or the embedded engine under one policy."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from evenflow.core.request import SamplingParams
from evenflow.errors import EndpointFailed

if TYPE_CHECKING:
    import httpx

    from evenflow.engine.async_llm import AsyncLLM
    from evenflow.engine.prompts import Conversation

_CONNECT_S = 10.0
_SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


@dataclass(frozen=True, slots=True)
class Ask:
    """One greedy answer: to a prompt or, if there are messages, to a conversation."""

    prompt: str | Sequence[int]
    max_tokens: int
    at: float = 0.0  # when to send it, in seconds since the round began
    messages: Conversation | None = None  # instead of the prompt
    stop: tuple[str, ...] = ()
    ignore_eos: bool = True  # exactly `max_tokens`, so that all answers take the same work

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.max_tokens, stop=self.stop, ignore_eos=self.ignore_eos)


class Scores(NamedTuple):
    """How likely each of several texts is after the same prompt."""

    logprobs: list[float]  # summed over the tokens of each text
    num_prompt_tokens: int  # computed for all of them


@dataclass(slots=True)
class Answer:
    """The response to one request so far. A piece is a token, or several that came at once."""

    text: str = ""
    piece_times_s: list[float] = field(default_factory=list)  # since the request was sent
    num_tokens: int = 0
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None  # of the prompt; None: the endpoint does not say
    num_chunks: int | None = None  # that the prompt was computed in; None: the endpoint does not say
    sent_at: float = field(default_factory=time.perf_counter)

    def add_piece(self, text: str, num_tokens: int = 0) -> None:
        self.piece_times_s.append(time.perf_counter() - self.sent_at)
        self.text += text
        self.num_tokens += num_tokens

    @property
    def ttft_s(self) -> float | None:
        return self.piece_times_s[0] if self.piece_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.piece_times_s)]


class Endpoint(Protocol):
    """Answers requests while it is open."""

    name: str

    @property
    def max_model_len(self) -> int | None:
        """The context; None if it is not known, or not open yet."""
        ...

    def open(self) -> AbstractAsyncContextManager[None]: ...

    async def begin_round(self) -> None: ...

    async def stream(self, ask: Ask, answer: Answer) -> None:
        """Fill in a new answer as its pieces come."""
        ...

    async def score(self, prompt: str, continuations: Sequence[str]) -> Scores:
        """A continuation's tokens are those of the joined text after as many as the prompt alone has."""
        ...


async def answer_of(endpoint: Endpoint, ask: Ask) -> Answer:
    await endpoint.stream(ask, answer := Answer())
    return answer


async def check_endpoint(endpoint: Endpoint, ask: Ask) -> None:
    """Ask for an answer that is not counted: the endpoint warms up, or the comparison fails before it begins."""
    if (error := (await answer_of(endpoint, ask)).error) is not None:
        raise EndpointFailed(f"{endpoint.name}: {error}")


@dataclass(slots=True)
class HttpEndpoint:
    """A server with OpenAI's completions API: evenflow's, vLLM's, or another."""

    name: str  # its address, such as http://127.0.0.1:8000
    model: str | None = None  # None: the first that the server lists
    api_key: str | None = None
    timeout_s: float = 600.0
    max_model_len: int | None = None  # as listed with the model
    _client: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        import httpx

        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(self.timeout_s, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.name, headers=headers, timeout=timeout, limits=limits) as client:
            self._client = client
            await self._choose_model(client)
            yield

    async def _choose_model(self, client: httpx.AsyncClient) -> None:
        import httpx

        try:
            response = await client.get("/v1/models")
            if response.status_code != 200:
                key = " A key goes into $EVENFLOW_API_KEY." if response.status_code in (401, 403) else ""
                raise EndpointFailed(f"{self.name}: {_refusal(response.status_code, response.content)}{key}")
            models = {model["id"]: model.get("max_model_len") for model in response.json()["data"]}
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EndpointFailed(
                f"no server at {self.name} ({error or type(error).__name__}); start one with `evenflow serve`"
            ) from error
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise EndpointFailed(
                f"{self.name} does not list its models at /v1/models: {error or type(error)}"
            ) from error
        if self.model is None and not models:
            raise EndpointFailed(f"{self.name} lists no model.")
        if self.model is not None and self.model not in models:
            raise EndpointFailed(f"{self.name} has no model {self.model!r} but {', '.join(models)}.")
        self.model = self.model or next(iter(models))
        self.max_model_len = models[self.model]

    async def begin_round(self) -> None:
        """Nothing to prepare."""

    async def stream(self, ask: Ask, answer: Answer) -> None:
        try:
            async with aclosing(self.events(*self._request(ask))) as events:
                async for event in events:
                    _take_event(answer, event)
        except EndpointFailed as error:
            answer.error = str(error)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of a streamed response."""
        import httpx

        assert self._client is not None, "the endpoint is not open"
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise EndpointFailed(_refusal(response.status_code, await response.aread()))
                async for line in _event_lines(response):
                    if line.startswith("data:") and not line.endswith("[DONE]"):
                        yield _checked(json.loads(line.removeprefix("data:")))
        except httpx.HTTPError as error:
            raise EndpointFailed(str(error) or type(error).__name__) from error

    def _request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.ignore_eos:
            body["ignore_eos"] = True  # no part of OpenAI's API: strict servers refuse it
        if ask.messages is not None:
            return "/v1/chat/completions", {**body, "messages": ask.messages}
        return "/v1/completions", {**body, "prompt": ask.prompt}

    async def score(self, prompt: str, continuations: Sequence[str]) -> Scores:
        # One more request says how many tokens the prompt alone has: the server's tokenizer is not known here.
        num_context, _ = await self._echo(prompt)
        logprobs, num_prompt_tokens = [], num_context
        for continuation in continuations:
            num_tokens, found = await self._echo(prompt + continuation, logprobs=1)
            logprobs.append(sum(found[num_context:num_tokens]))
            num_prompt_tokens += num_tokens
        return Scores(logprobs, num_prompt_tokens)

    async def _echo(self, prompt: str, **more: Any) -> tuple[int, list[float]]:
        """How many tokens the prompt has and, if `more` asks for them, their logprobs."""
        import httpx

        assert self._client is not None, "the endpoint is not open"
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, **more}
        try:
            response = await self._client.post("/v1/completions", json=body)
            if response.status_code != 200:
                raise EndpointFailed(f"{self.name}: {_refusal(response.status_code, response.content)}")
            found = response.json()
            num_tokens = found["usage"]["prompt_tokens"]
            if not more:
                return num_tokens, []
            logprobs = found["choices"][0]["logprobs"]["token_logprobs"]
            if len(logprobs) < num_tokens or None in logprobs[1:num_tokens]:
                raise ValueError(f"got {len(logprobs)} logprobs for {num_tokens} tokens")
        except httpx.HTTPError as error:
            raise EndpointFailed(f"{self.name}: {error or type(error).__name__}") from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EndpointFailed(
                f"{self.name} does not echo a prompt with its logprobs, as evenflow and vLLM do: {error}"
            ) from error
        return num_tokens, logprobs


async def _event_lines(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of an event stream. httpx's own would also split at characters such as U+2028, which a token may be."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode().removesuffix("\r")


def _refusal(status: int, content: bytes) -> str:
    """With what OpenAI's format of errors says, or the beginning of any other body."""
    try:
        return f"status {status}: {json.loads(content)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"status {status}: {' '.join(content.decode(errors='replace').split())[:200]}"


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    if "error" in event:
        raise EndpointFailed(str(event["error"].get("message", event["error"])))
    return event


def _take_event(answer: Answer, event: dict[str, Any]) -> None:
    for choice in event.get("choices") or ():
        if "delta" in choice:
            # A chat opens with an event that holds only the role, before the first token.
            if content := choice["delta"].get("content"):
                answer.add_piece(content)
        # A token may add no text: half of a character, or the beginning of a possible stop string.
        elif choice.get("text") or choice.get("finish_reason") is None:
            answer.add_piece(choice.get("text") or "")
    if usage := event.get("usage"):
        answer.num_tokens = usage["completion_tokens"]
        answer.num_prompt_tokens = usage.get("prompt_tokens", 0)
        answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


@dataclass(slots=True)
class PolicyEndpoint:
    """The embedded engine under one policy; several share one engine and take turns."""

    name: str  # the policy
    llm: AsyncLLM

    @property
    def max_model_len(self) -> int:
        return self.llm.max_model_len

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        yield  # the caller closes the engine

    async def begin_round(self) -> None:
        self.llm.set_policy(self.name)

    async def stream(self, ask: Ask, answer: Answer) -> None:
        prompt = ask.prompt if ask.messages is None else self.llm.encode_chat(ask.messages)
        async for delta in self.llm.stream(prompt, ask.sampling):
            if delta.token_ids:
                answer.add_piece(delta.text, len(delta.token_ids))
            else:
                answer.text += delta.text
            answer.error = delta.output.error
        answer.num_prompt_tokens = len(delta.output.prompt_token_ids)
        answer.num_cached_tokens = delta.output.num_cached_tokens
        answer.num_chunks = len(delta.output.chunks)

    async def score(self, prompt: str, continuations: Sequence[str]) -> Scores:
        encode = self.llm.tokenizer.encode
        num_context, logprobs, num_prompt_tokens = len(encode(prompt)), [], 0
        for continuation in continuations:
            token_ids = encode(prompt + continuation)
            output = await self.llm.generate(token_ids, _SCORING)
            if output.error is not None or output.prompt_logprobs is None:
                raise EndpointFailed(f"{self.name}: {output.error}")
            rows = output.prompt_logprobs[num_context - 1 :]  # the prompt's first token has none
            logprobs.append(sum(row.chosen.logprob for row in rows))
            num_prompt_tokens += len(token_ids)
        return Scores(logprobs, num_prompt_tokens)
