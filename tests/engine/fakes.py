"""An LLM over the fake executor, with a codec whose text is easy to read: token 7 is " 7"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from evenflow.core.plan import ExecutorCaps, StepPlan, StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.tier import TierConfig
from evenflow.engine.async_llm import AsyncLLM
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake, Limits
from evenflow.engine.llm import LLM
from evenflow.engine.recorder import Recorder
from evenflow.executors.fake import FakeExecutor

VOCAB = 500
_numbers = count()


class NumberDecoder:
    def push(self, token_id: int) -> str:
        return f" {token_id}"

    def flush(self) -> str:
        return ""


class NumberCodec:
    eos_token_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    encode_inside = encode

    def stream_decoder(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> NumberDecoder:
        return NumberDecoder()


def fake_engine(
    policy: str = "fixed:64",
    *,
    depth: int = 1,
    num_blocks: int = 200,
    max_num_seqs: int = 8,
    max_model_len: int = 400,
    cost: Callable[[StepShape], float] = lambda shape: 0.001 * shape.total_rows,
    disturb: Callable[[StepPlan], Mapping[int, str] | None] = lambda plan: None,
    enable_prefix_caching: bool = True,
    tier: TierConfig | None = None,
    record: Any = None,
) -> Engine:
    config = SchedulerConfig(
        num_blocks=num_blocks,
        policy=PolicySpec.parse(policy),
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=enable_prefix_caching,
        tier=tier,
    )
    executor = FakeExecutor(
        vocab_size=VOCAB,
        caps=ExecutorCaps(max_steps_in_flight=depth),
        cost=cost,
        disturb=disturb,
        restore_seconds=tier.restore_seconds if tier is not None else 0.0,
    )
    scheduler = Scheduler(config, executor.caps)
    return Engine(
        scheduler,
        executor,
        Limits(max_model_len, VOCAB),
        recorder=Recorder(record, scheduler) if record else None,
        clock=executor.clock,
    )


def intake_of(engine: Engine, with_text: bool = True) -> Intake:
    codec = NumberCodec() if with_text else None
    return Intake(engine.limits, engine.scheduler.block_size, codec, clock=engine.clock)


def prepare(engine: Engine, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None = None) -> Request:
    """A request for an engine that is stepped without text."""
    number = f"r{next(_numbers)}"
    return intake_of(engine).prepare(prompt, sampling, policy=engine.policy, request_id=request_id or number)


def fake_llm(policy: str = "fixed:64", *, with_text: bool = True, **options: Any) -> LLM:
    engine = fake_engine(policy, **options)
    return LLM.over(engine, intake_of(engine, with_text))


def fake_async_llm(engine: Engine) -> AsyncLLM:
    return AsyncLLM.over(engine, intake_of(engine))
