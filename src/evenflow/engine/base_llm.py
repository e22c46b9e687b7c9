"""The base of `LLM` and `AsyncLLM`: loading a model, its settings, preparing requests."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self, Unpack

from evenflow.config import EngineConfig, EngineSettings
from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.build import build_engine
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake
from evenflow.engine.prompts import Conversation, Prompt, check_conversation, read_prompt
from evenflow.errors import EngineFailed, InvalidRequest

DEFAULT_SAMPLING = SamplingParams(max_tokens=128)


def check_sampling(given: SamplingParams | None) -> SamplingParams:
    """The given ones; None: the default."""
    if given is None:
        return DEFAULT_SAMPLING
    if not isinstance(given, SamplingParams):
        example = "SamplingParams(max_tokens=64, temperature=0.8)"
        raise InvalidRequest(f"Got sampling_params={repr(given)[:100]} but expected SamplingParams, such as {example}.")
    return given


class BaseLLM(ABC):
    """Settings are the fields of EngineConfig. With `record`, every step is written there as a JSON line."""

    def __init__(
        self, model: str | Path = "default", *, record: str | Path | None = None, **settings: Unpack[EngineSettings]
    ) -> None:
        known = [name for name in EngineConfig.__dataclass_fields__ if name != "model"]
        if unknown := sorted(set(settings) - set(known)):
            raise TypeError(f"unknown setting {unknown[0]!r}; known are {', '.join(known)}")
        built = build_engine(EngineConfig(model=str(model), **settings), record)
        self.config = built.config
        self.tokenizer = built.tokenizer
        self.target_reason, self.busy_notice = built.target_reason, built.busy_notice
        self._start(built.engine, built.intake)

    @classmethod
    def over(cls, engine: Engine, intake: Intake) -> Self:
        """Wrap an existing engine, such as one with a fake executor."""
        model = cls.__new__(cls)
        model._start(engine, intake)
        return model

    def _start(self, engine: Engine, intake: Intake) -> None:
        self._intake = intake
        self._policy = engine.policy
        self._process_id = os.getpid()

    @property
    def _is_here(self) -> bool:
        """False in a fork of the process, which lacks the engine's threads."""
        return os.getpid() == self._process_id

    def _check_process(self) -> None:
        if not self._is_here:
            raise EngineFailed(
                f"this model was loaded by process {self._process_id} and does not run in a fork of it: load it in "
                "the new process, which multiprocessing should start by 'spawn'"
            )

    @property
    def policy(self) -> str:
        return str(self._policy)

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of a prompt and its output."""
        return self._intake.limits.max_model_len

    def set_policy(self, policy: str | PolicySpec) -> None:
        """Change the policy from the next step on; the model, its KV cache and the requests stay."""
        spec = self.config.with_policy(policy).resolve_policy(self.max_model_len)
        self._set_policy(spec.bounded(self.config.max_num_batched_tokens))

    def set_target(self, target: float | str | None, paced: bool | None = None) -> None:
        """Change the target from the next step on, paced as before unless stated; None: no target."""
        self._set_policy(self._policy.with_target(target, paced))

    @abstractmethod
    def _set_policy(self, policy: PolicySpec) -> None: ...

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        cache_salt: str | None = None,
        service_class: str | None = None,
        priority: int | None = None,
    ) -> Request:
        """Check and tokenise a request without running it; its arrival is now. Callable on any thread.

        `tenant`, `service_class` and `priority`: see docs/shares.md. `cache_salt`: prompts with different salts share
        no cached prefixes; None: the tenant's name.
        """
        return self._intake.prepare(
            read_prompt(prompt)[0],
            check_sampling(sampling_params),
            policy=self._policy,
            request_id=request_id,
            tenant=tenant,
            cache_salt=cache_salt,
            service_class=service_class,
            priority=priority,
        )

    def encode_chat(self, messages: Conversation) -> list[int]:
        """The token ids of a conversation up to the start of the reply."""
        return self.tokenizer.encode_chat(check_conversation(messages))
