"""The demo: what chunking changes for small requests beside large ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean
from typing import Any, Literal

from evenflow.bench.long_texts import GARDEN_DIARY, HARBOUR_LOG
from evenflow.config import EngineConfig
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.async_llm import AsyncLLM
from evenflow.errors import EngineFailed, InvalidConfig

Size = Literal["small", "large"]

DEMO_POLICY = "fixed:96"  # with a smaller budget, small requests finish sooner and all together later
_MAX_CHUNK = 64


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    name: str
    size: Size
    text: str  # without the chat template
    max_tokens: int = 32


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    name: str
    size: Size
    prompt_tokens: int  # of the user's text
    output_tokens: int
    num_chunks: int
    ttft_s: float
    latency_s: float
    finish_place: int  # 1: first of its run to finish
    text: str


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The answers to requests submitted at once, in their order."""

    policy: str
    answers: tuple[DemoAnswer, ...]
    total_s: float

    def mean_latency_s(self, size: Size) -> float:
        return fmean(answer.latency_s for answer in self.answers if answer.size == size)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(answer.output_tokens for answer in self.answers) / self.total_s

    @property
    def tokens_per_s(self) -> float:
        """Of prompts and answers."""
        return sum(answer.prompt_tokens + answer.output_tokens for answer in self.answers) / self.total_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same requests with chunking and without."""

    chunked: DemoRun
    unchunked: DemoRun

    @property
    def same_text(self) -> bool:
        return [a.text for a in self.chunked.answers] == [a.text for a in self.unchunked.answers]

    def verdict(self) -> str:
        """What chunking changed, in one line."""
        small, large = (
            _change(self.chunked.mean_latency_s(size), self.unchunked.mean_latency_s(size))
            for size in ("small", "large")
        )
        total = _change(self.chunked.total_s, self.unchunked.total_s)
        texts = "the answers are the same" if self.same_text else "the answers differ in near ties"
        return f"With chunking a small request took {small}, a large one {large}, all together {total}; {texts}."


def _change(with_chunking: float, without: float) -> str:
    ratio = without / with_chunking
    change = f"{ratio:.1f} times shorter" if ratio >= 1 else f"{1 / ratio:.1f} times longer"
    return f"{with_chunking:.1f} s instead of {without:.1f} s ({change})"


def with_demo_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The user's settings, completed so that small prompts share steps with large ones."""
    chosen = dict(settings)
    if not {"policy", "tbt_target", "max_num_batched_tokens", "enable_chunked_prefill"} & set(chosen):
        chosen["policy"] = DEMO_POLICY
    policy = EngineConfig(**chosen).resolve_policy(max_model_len=1)
    if policy.name == "unchunked":
        raise InvalidConfig("Got a policy without chunking but the demo compares chunking with none: give another.")
    if policy.target is None:  # with a target, short prompts go first anyway
        chosen.setdefault("long_prefill_token_threshold", max(1, min(_MAX_CHUNK, policy.budget // 2)))
    return chosen


def simple_prompts(llm: AsyncLLM) -> list[DemoPrompt]:
    """Four prompts of mixed length."""
    paragraph = (
        "Tom has a red bicycle. Every morning he rides it to school with his sister Anna. In the afternoon they go "
        "to the library, where Anna reads books about dinosaurs. What color is Tom's bicycle?"
    )
    return [
        DemoPrompt("question", "small", "What is the capital of France?"),
        DemoPrompt("list", "small", "Name three primary colors."),
        DemoPrompt("paragraph", "small", paragraph),
        DemoPrompt("page", "large", GARDEN_DIARY.of_length(400, _token_counter(llm))),
    ]


def mixed_prompts(llm: AsyncLLM) -> list[DemoPrompt]:
    """A large prompt, three small ones behind it, and another large one."""
    count_tokens = _token_counter(llm)
    return [
        DemoPrompt("large_1", "large", HARBOUR_LOG.of_length(2000, count_tokens)),
        DemoPrompt("small_1", "small", "What is the capital of France?"),
        DemoPrompt("small_2", "small", "What is the chemical symbol for water?"),
        DemoPrompt("small_3", "small", "How many days are in a week?"),
        DemoPrompt("large_2", "large", GARDEN_DIARY.of_length(1500, count_tokens)),
    ]


def _token_counter(llm: AsyncLLM) -> Callable[[str], int]:
    return lambda text: len(llm.tokenizer.encode(text, add_special_tokens=False))


async def compare_chunking(
    llm: AsyncLLM, prompts: Sequence[DemoPrompt], on_answer: Callable[[str], None] = lambda name: None
) -> Comparison:
    """Run the prompts under the engine's policy, then unchunked."""
    chunked = await run_at_once(llm, prompts, on_answer)
    llm.set_policy("unchunked")
    return Comparison(chunked, await run_at_once(llm, prompts, on_answer))


async def run_at_once(
    llm: AsyncLLM, prompts: Sequence[DemoPrompt], on_answer: Callable[[str], None] = lambda name: None
) -> DemoRun:
    """Submit all prompts in order, without a pause. `on_answer` gets the name of each as it finishes."""
    count_tokens, places = _token_counter(llm), count(1)

    async def answer(prompt: DemoPrompt, request: Request, prompt_tokens: int) -> DemoAnswer:
        async for delta in llm.run(request):
            output = delta.output
        if output.finish_reason == "error":
            raise EngineFailed(f"{prompt.name}: {output.error}")
        on_answer(prompt.name)
        return DemoAnswer(
            name=prompt.name,
            size=prompt.size,
            prompt_tokens=prompt_tokens,
            output_tokens=len(output.token_ids),
            num_chunks=len(output.chunks),
            ttft_s=output.token_times_s[0],
            latency_s=output.token_times_s[-1],
            finish_place=next(places),
            text=output.text.strip(),
        )

    sizes = [count_tokens(prompt.text) for prompt in prompts]
    # With the policy as the tenant, a run finds nothing of an earlier one in the prefix cache.
    requests = [_prepare(llm, prompt, tenant=llm.policy) for prompt in prompts]
    answers = await asyncio.gather(*map(answer, prompts, requests, sizes))
    ends = [request.arrival_time + answer.latency_s for request, answer in zip(requests, answers, strict=True)]
    return DemoRun(llm.policy, tuple(answers), max(ends) - requests[0].arrival_time)


def _prepare(llm: AsyncLLM, prompt: DemoPrompt, tenant: str) -> Request:
    text_or_ids: str | list[int] = prompt.text
    if llm.tokenizer.has_chat_template:
        text_or_ids = llm.encode_chat([{"role": "user", "content": prompt.text}])
    return llm.prepare(text_or_ids, SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens), tenant=tenant)
