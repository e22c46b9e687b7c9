"""What the routes share: the engine, the tokenizer, the gate, the model's names, and checks that need them.

Must not know: what a route does with them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from evenflow.core.policies import PolicySpec
from evenflow.errors import EvenflowError
from evenflow.model.tokenizer import Tokenizer
from evenflow.server.access import Gate, ServerLimits
from evenflow.server.api.errors import ApiError
from evenflow.server.engine.served_engine import ServedEngine


class Engine(Protocol):
    """What the server asks of whichever engine it serves."""

    @property
    def is_up(self) -> bool: ...

    @property
    def policy(self) -> PolicySpec | None: ...

    def set_target(self, seconds: float | None, paced: bool | None = None) -> None: ...

    def fail_all(self, failure: EvenflowError) -> None: ...


class Served(Protocol):
    """An engine behind a gate."""

    @property
    def client(self) -> Engine: ...

    @property
    def gate(self) -> Gate: ...

    @property
    def limits(self) -> ServerLimits: ...


@dataclass(frozen=True, slots=True)
class Service:
    """One model behind one server."""

    client: ServedEngine
    tokenizer: Tokenizer
    gate: Gate
    limits: ServerLimits
    model_names: tuple[str, ...]
    started_at: int = field(default_factory=lambda: int(time.time()))

    def model_name(self, asked: str | None) -> str:
        """The name to answer with; a 404 where no such model is served."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            message = f"The model {asked!r} is not served; served: {', '.join(self.model_names)}."
            raise ApiError(404, message, code="model_not_found", param="model")
        return asked

    def check_length(self, num_prompt_tokens: int, max_tokens: int | None, param: str) -> None:
        """Refuse a prompt that is too long, by itself or with the answer that is asked for."""
        context, most = self.client.limits.max_model_len, self.limits.max_prompt_tokens
        # Clients that know this case know it by these words.
        longest = f"This model's maximum context length is {context} tokens, prompt and answer together."
        if most and num_prompt_tokens > most:
            message = f"Got a prompt of {num_prompt_tokens} tokens but this server takes {most}."
        elif num_prompt_tokens >= context:
            message = f"{longest} Got a prompt of {num_prompt_tokens}."
        elif max_tokens is not None and num_prompt_tokens + max_tokens > context:
            message = f"{longest} Got a prompt of {num_prompt_tokens} and an answer of up to {max_tokens} to make."
        else:
            return
        raise ApiError(400, message, code="context_length_exceeded", param=param)
