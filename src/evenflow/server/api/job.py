"""One HTTP request as work for the engine: who asks, in which class, and one engine request for each choice."""

from __future__ import annotations

import secrets
from dataclasses import KW_ONLY, dataclass
from typing import Self

from evenflow.core.grammar import Grammar
from evenflow.core.request import SamplingParams
from evenflow.core.service_classes import Classes, ServiceClass, find_class
from evenflow.errors import InvalidRequest
from evenflow.server.access import Caller, cache_salt, check_own_target
from evenflow.server.api.request_models import EngineBody, GenerationBody, ServiceFields
from evenflow.server.api.response_size import PROMPT_TOKEN_BYTES
from evenflow.server.api.service import ModelService
from evenflow.server.engine.served_engine import Prepared
from evenflow.server.errors import ApiError

_CHOICE_BYTES = 512  # of a choice besides its tokens
_LOWERED = ("best_of", "n", "max_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "echo")


class Job:
    """Every format has one. `num_choices` of its requests run or wait at a time."""

    def __init__(
        self, service: ModelService, body: EngineBody, caller: Caller, *, id_prefix: str, num_choices: int
    ) -> None:
        self.service = service
        self.body = body
        self.caller = caller
        self.num_choices = num_choices
        self.grammar: Grammar | None = None  # of every choice
        self.shows_output = True  # False: the engine generates a token that nobody asked for
        self.tenant = body.tenant or ""
        self.share = caller.limited_as(self.tenant)  # whose limits and whose share of the engine count
        tenant = service.gate.tenant_settings(self.share)
        of_class = chosen_class(body, service.client.classes, tenant.most_urgent)
        check_own_target(caller, body.tbt_seconds, service.client.policy.target, of_class, "tbt_target")
        self.service_class = of_class.name
        self.headers: dict[str, str] = {}  # of the response
        self.model = service.model_name(body.model)
        self.id = f"{id_prefix}{secrets.token_hex(12)}"
        self._cache_salt = cache_salt(caller.key, self.tenant, body.cache_salt)

    @classmethod
    def of_choices(
        cls, service: ModelService, body: GenerationBody, caller: Caller, *, id_prefix: str, num_prompts: int = 1
    ) -> Self:
        """All choices of all prompts at once, if the server allows their number."""
        num_choices = num_prompts * body.num_choices
        service.gate.check_num_choices(num_choices)
        body.check_size(num_choices)
        return cls(service, body, caller, id_prefix=id_prefix, num_choices=num_choices)

    def encode(self, prompt: str | list[int], param: str, add_special_tokens: bool | None) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        self.service.check_prompt(prompt, param)
        return self.service.tokenizer.encode(prompt, add_special_tokens=add_special_tokens is not False)

    def truncated(self, token_ids: list[int], max_tokens: int | None) -> list[int]:
        """The last tokens of a prompt, as many as `truncate_prompt_tokens` says; its BOS token stays."""
        most = self.body.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most == -1:
            room = self.service.limits.max_model_len - max(1, max_tokens or 1)
            most = max(1, min(room, self.service.gate.limits.max_prompt_tokens or room))
        if len(token_ids) <= most:
            return token_ids
        first = [token for token in token_ids[: int(most > 1)] if token == self.service.tokenizer.bos_token_id]
        return first + token_ids[len(token_ids) - most + len(first) :]

    def request(self, prompt: list[int], sampling: SamplingParams, index: int | None) -> Prepared:
        """`index` is None for the only one."""
        return self.service.client.prepare(
            prompt,
            sampling,
            request_id=self.id if index is None else f"{self.id}-{index}",
            tenant=self.share,
            cache_salt=self._cache_salt,
            service_class=self.service_class,
        )

    def requests(
        self, body: GenerationBody, prompt: list[int], max_tokens: int, first_index: int = 0
    ) -> list[Prepared]:
        """For all choices of one prompt, numbered from `first_index`."""
        requests = []
        for index in range(first_index, first_index + body.num_choices):
            # A prompt is scored once for all its choices. Those of a stream cannot wait for each other.
            scores = index == first_index or bool(body.stream)
            sampling = body.sampling(max_tokens=max_tokens, index=index, grammar=self.grammar, scores_prompt=scores)
            requests.append(self.request(prompt, sampling, None if self.num_choices == 1 else index))
        return requests


@dataclass(frozen=True, slots=True)
class ResponseSize:
    """The most that the response of a job can take. A stream keeps nothing that it has sent: its first events count."""

    job: Job
    _: KW_ONLY
    per_prompt_token: int  # besides what is held for it, for all choices of the prompt
    per_step: int  # of the output: a token for each choice
    repeated: int = 0  # of the request's settings

    def most_bytes(self, num_prompt_tokens: int, max_tokens: int) -> int:
        per_prompt_token = self.per_prompt_token + PROMPT_TOKEN_BYTES * self.job.body.num_choices
        fixed = self.job.num_choices * _CHOICE_BYTES + self.repeated
        return fixed + num_prompt_tokens * per_prompt_token + max_tokens * self.per_step

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        size, limit = self.most_bytes(num_prompt_tokens, max_tokens), self._limit
        if size > limit:
            given = [name for name in _LOWERED if getattr(self.job.body, name, None)] or ["max_tokens"]
            message = f"The response may take {size} bytes but this server allows {limit}: lower {' or '.join(given)}."
            raise ApiError(400, message, code="response_too_large", param=given[0])

    def tokens_that_fit(self, num_prompt_tokens: int) -> int:
        """How long each choice of a prompt may get if the client does not say."""
        self.check(num_prompt_tokens, 1)
        room = self.job.service.limits.max_model_len - num_prompt_tokens
        if not self.per_step:
            return room
        return min(room, (self._limit - self.most_bytes(num_prompt_tokens, 0)) // self.per_step)

    @property
    def _limit(self) -> int:
        return self.job.service.gate.limits.max_response_size


def chosen_class(asked: ServiceFields, classes: Classes, most_urgent: str | None = None) -> ServiceClass:
    """By its name, by vLLM's priority or by OpenAI's tier, but none more urgent than `most_urgent`."""
    found = find_class(classes, asked.service_class, asked.priority)
    by_tier = _class_of_tier(asked.service_tier, classes)
    if by_tier is not None:
        if asked.service_class is None and asked.priority is None:
            found = by_tier
        elif found is not by_tier:
            raise InvalidRequest(
                f"Got service_tier={asked.service_tier!r}, which means the class {by_tier.name!r}, and another class, "
                f"{found.name!r}, by service_class or priority: give one of them."
            )
    limit = None if most_urgent is None else find_class(classes, most_urgent)
    return found if limit is None or found.rank >= limit.rank else limit


def served_tier(asked: str | None, class_name: str, classes: Classes) -> str:
    """The tier that a request was served in, as OpenAI names it."""
    by_tier = _class_of_tier(asked, classes)
    return asked if asked is not None and by_tier is not None and by_tier.name == class_name else "default"


def _class_of_tier(tier: str | None, classes: Classes) -> ServiceClass | None:
    """None: the tier leaves the class open."""
    if tier == "flex":
        return max(classes, key=lambda one: one.rank)
    if tier == "priority":
        return min(classes, key=lambda one: one.rank)
    return None
