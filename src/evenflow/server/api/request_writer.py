"""The common base of responses that the engine computes: the caller, ids, and the requests for the engine."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from evenflow.core.grammar import Grammar
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.outputs import RequestOutput
from evenflow.server.access import Caller, cache_salt, check_own_target
from evenflow.server.api.class_choice import chosen_class
from evenflow.server.api.request_models import EngineBody
from evenflow.server.api.service import ModelService
from evenflow.shares_file import TenantSettings

EngineBodyType = TypeVar("EngineBodyType", bound=EngineBody)


class RequestWriter(ABC, Generic[EngineBodyType]):
    """Turns one HTTP request into engine requests, and their outputs into a response."""

    _ID_PREFIX: ClassVar[str]

    def __init__(self, service: ModelService, body: EngineBodyType, caller: Caller, num_choices: int) -> None:
        self.num_choices = num_choices  # that run or wait at a time
        self.body = body
        self.caller = caller
        self.grammar: Grammar | None = None  # of every choice
        self.tenant = body.tenant or ""
        self.share = caller.limited_as(self.tenant)  # whose limits and whose share of the engine count
        self.cache_salt = cache_salt(caller.key, self.tenant, body.cache_salt)
        tenant = service.tenants.get(self.share, TenantSettings())
        of_class = chosen_class(body, service.client.classes, tenant.most_urgent)
        check_own_target(caller, body.tbt_seconds, service.client.policy.target, of_class, "tbt_target")
        self.service_class = of_class.name
        self.headers: dict[str, str] = {}  # of the response
        self.model = service.model_name(body.model)
        self._service = service
        self._id = f"{self._ID_PREFIX}{secrets.token_hex(12)}"

    def template_question(self) -> bytes | None:
        """What to ask the template renderer first, if anything."""
        return None

    @abstractmethod
    def prepare(self, rendered: str) -> list[Request]:
        """One engine request per choice. Tokenising takes long for long prompts: call it in a thread."""

    @abstractmethod
    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole response."""

    def num_completion_tokens(self, output: RequestOutput) -> int:
        return len(output.token_ids)

    def _encode(self, prompt: str | list[int], param: str, add_special_tokens: bool | None) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        self._service.check_prompt(prompt, param)
        return self._service.tokenizer.encode(prompt, add_special_tokens=add_special_tokens is not False)

    def _truncated(self, token_ids: list[int], max_tokens: int | None) -> list[int]:
        """The last tokens of a prompt, as many as `truncate_prompt_tokens` says; its BOS token stays."""
        most = self.body.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most == -1:
            room = self._service.client.limits.max_model_len - max(1, max_tokens or 1)
            most = max(1, min(room, self._service.gate.limits.max_prompt_tokens or room))
        if len(token_ids) <= most:
            return token_ids
        first = [token for token in token_ids[: int(most > 1)] if token == self._service.tokenizer.bos_token_id]
        return first + token_ids[len(token_ids) - most + len(first) :]

    def _request(self, prompt: list[int], sampling: SamplingParams, index: int | None) -> Request:
        """`index` is None for the only one."""
        request_id = self._id if index is None else f"{self._id}-{index}"
        return self._service.client.prepare(
            prompt,
            sampling,
            request_id=request_id,
            tenant=self.share,
            cache_salt=self.cache_salt,
            service_class=self.service_class,
        )
