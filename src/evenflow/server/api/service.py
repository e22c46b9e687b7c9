"""Shared state of the HTTP handlers: the engine and the gate; for evenflow's own engine, tokenizer and model names."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from evenflow import __version__
from evenflow.bench.live_load import LoadLimits
from evenflow.core.request import Pooling
from evenflow.engine.intake import Limits
from evenflow.errors import EvenflowError, InvalidRequest
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.access import Caller
from evenflow.server.api.grammar_gate import GrammarGate
from evenflow.server.api.large_work import LargeWork
from evenflow.server.api.response_size import TokenSizes
from evenflow.server.api.template_renderer import TemplateRenderer
from evenflow.server.engine.model_switch import Hold, ModelSwitch
from evenflow.server.engine.served_engine import ServedEngine, ServedModel
from evenflow.server.engine.supervised import SupervisedEngine
from evenflow.server.errors import ApiError
from evenflow.server.gate import Gate
from evenflow.shares_file import Shares

_ENCODED_AT_ONCE = 1 << 18  # tokens of a text: the tokenizer takes about 70 MB for them

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fingerprint(engine: str) -> str:
    """Changes with evenflow's version or the engine's settings, after which a seed may give other output."""
    return f"fp_{hashlib.sha256(f'{__version__} {engine}'.encode()).hexdigest()[:10]}"


@dataclass(frozen=True, slots=True)
class Service:
    """An engine behind a gate."""

    client: SupervisedEngine
    gate: Gate
    large_work: LargeWork

    async def fail_all(self, failure: EvenflowError) -> None:
        """End every open request with an error, whatever it waits for."""
        self.client.fail_all(failure)

    def set_shares(self, shares: Shares) -> None:
        """Use other settings of tenants and limits of classes from now on."""
        self.gate.shares = shares


@dataclass(frozen=True, slots=True)
class ModelService(Service):
    """A model served by evenflow's own engine."""

    client: ServedEngine
    tokenizer: Tokenizer
    token_sizes: TokenSizes
    grammar_gate: GrammarGate
    templates: TemplateRenderer
    model_names: tuple[str, ...]
    system_fingerprint: str
    model: ServedModel
    switch: ModelSwitch
    served: list[ModelService]  # all of this server, this one among them; the first is the default
    pooling: Pooling | None = None  # of embeddings; None: the server gives none
    started_at: int = field(default_factory=lambda: int(time.time()))

    async def fail_all(self, failure: EvenflowError) -> None:
        # Named, because a class with slots is made anew by its decorator, which `super()` does not know.
        self.switch.close(failure)
        await Service.fail_all(self, failure)
        for one in self.served:
            await one.close()

    async def close(self) -> None:
        """End its helper processes."""
        await self.grammar_gate.close()
        await self.templates.close()

    def set_shares(self, shares: Shares) -> None:
        Service.set_shares(self, shares)
        self.client.set_tenant_weights(shares.engine_settings["tenant_weights"])

    async def in_turn(
        self,
        caller: Caller,
        num_bytes: int,
        respond: Callable[Arguments, Result],
        *args: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Result:
        """Through the gate, like a generation, and on a thread: for work of a prompt's size."""
        with self.gate.enter(caller.limited_as(""), 1):
            return await self.large_work.run_on_thread(num_bytes, caller.client, respond, *args, **options)

    async def render(
        self,
        num_bytes: int,
        client: str,
        make_question: Callable[Arguments, bytes | None],
        *args: Arguments.args,
        **options: Arguments.kwargs,
    ) -> str:
        """What the chat template makes of a conversation; empty if the question is None."""
        question = await self.large_work.run(num_bytes, client, make_question, *args, **options)
        return "" if question is None else await self.templates.render(question, client)

    @property
    def limits(self) -> Limits:
        """Of a model that has been loaded."""
        assert self.model.intake is not None
        return self.model.intake.limits

    @property
    def all_names(self) -> list[str]:
        """Of all models."""
        return [name for one in self.served for name in one.model_names]

    def serving(self, requested: str | None) -> ModelService:
        """The service of the model with this name; a 404 if there is none."""
        if requested is None:
            return self.served[0]
        for one in self.served:
            if one._own_name(requested) is not None:
                return one
        message = f"The model {requested!r} is not served; served: {', '.join(self.all_names)}."
        raise ApiError(404, message, code="model_not_found", param="model")

    def model_name(self, requested: str | None) -> str:
        """This model's name for the response to a request that asks for it by this one."""
        return (None if requested is None else self._own_name(requested)) or self.model_names[0]

    def _own_name(self, requested: str) -> str | None:
        """Ollama's clients add :latest to names without a tag."""
        names = (requested, requested.removesuffix(":latest"))
        return next((name for name in names if name in self.model_names), None)

    @property
    def is_free(self) -> bool:
        """Whether requests for this model need not wait for it to be loaded."""
        return self.switch.is_free(self.model)

    async def hold(self, caller: Caller) -> Hold:
        """Keep this model loaded, after loading it if needed: who waits for that takes a place of the queue."""
        with nullcontext() if self.is_free else self.gate.enter(caller.limited_as(""), 1):
            return await self.switch.hold(self.model)

    def check_text(self, texts: Iterable[str], param: str) -> None:
        """Refuse a text that no tokenizer could fit into the context, before it is tokenized."""
        num_tokens = self._max_prompt_tokens
        max_bytes = num_tokens * self.tokenizer.longest_token_bytes
        num_bytes = 0
        for text in texts:
            # A character is one to four bytes: most texts need not be encoded for this.
            num_bytes += len(text) if 4 * len(text) <= max_bytes else len(text.encode(errors="replace"))
            if num_bytes > max_bytes:
                limit = f"This model's maximum context length is {num_tokens} tokens, at most {max_bytes} bytes."
                message = f"{limit} Got a prompt of {num_bytes} bytes or more; shorten it."
                raise ApiError(400, message, code="context_length_exceeded", param=param)

    def check_prompt(self, text: str, param: str) -> None:
        """Refuse a text that is far too long before all of it is tokenized, which would take memory for each token."""
        self.check_text([text], param)
        most = max(self._max_prompt_tokens, _ENCODED_AT_ONCE)
        if len(text.encode(errors="replace")) > most and self.tokenizer.surely_exceeds(text, most):
            limit = f"This model's maximum context length is {self._max_prompt_tokens} tokens."
            message = f"{limit} Got a prompt of more than {most} tokens; shorten it."
            raise ApiError(400, message, code="context_length_exceeded", param=param)

    @property
    def _max_prompt_tokens(self) -> int:
        return min(self.limits.max_model_len, self.gate.limits.max_prompt_tokens or sys.maxsize)

    def check_length(self, num_prompt_tokens: int, max_tokens: int | None, param: str) -> None:
        """Refuse a prompt that is too long, by itself or together with the requested output."""
        max_prompt = self.gate.limits.max_prompt_tokens
        try:
            if max_prompt and num_prompt_tokens > max_prompt:
                raise InvalidRequest(f"Got a prompt of {num_prompt_tokens} tokens but this server allows {max_prompt}.")
            self.limits.check_length(num_prompt_tokens, max_tokens)
        except InvalidRequest as error:
            raise ApiError(400, str(error), code="context_length_exceeded", param=param) from None

    async def load_limits(self) -> LoadLimits:
        """What the live page's load has to fit in."""
        return LoadLimits(
            max_model_len=self.limits.max_model_len,
            max_prompt_tokens=self.gate.limits.max_prompt_tokens,
            max_requests=self.gate.max_tenant_running,
            count_tokens=lambda text: len(self.tokenizer.encode(text, add_special_tokens=False)),
        )
