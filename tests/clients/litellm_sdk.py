"""LiteLLM's SDK, through its provider for servers with OpenAI's API."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are not looked up on the internet

import litellm
from checking import ADDRESS, MODEL, check, raised, run_checks

litellm.suppress_debug_info = True

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def settings(**changes: Any) -> dict[str, Any]:
    common = {"model": f"openai/{MODEL}", "api_base": f"{ADDRESS}/v1", "api_key": "none", "num_retries": 0}
    return {**common, "max_tokens": 12, "temperature": 0, **changes}


@check
def a_chat_is_answered() -> None:
    answer = litellm.completion(messages=QUESTION, **settings())
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


@check
def a_chat_is_streamed_with_its_usage() -> None:
    options = {"include_usage": True}
    chunks = list(litellm.completion(messages=QUESTION, stream=True, stream_options=options, **settings()))
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0


@check
def a_text_is_completed() -> None:
    answer = litellm.text_completion(prompt="Once upon a time", **settings(model=f"text-completion-openai/{MODEL}"))
    assert answer.choices[0].text


@check
def many_at_once_are_all_answered() -> None:
    async def main() -> None:
        asked = [litellm.acompletion(messages=QUESTION, **settings(max_tokens=3)) for _ in range(8)]
        for answer in await asyncio.gather(*asked):
            assert answer.choices[0].message.content

    asyncio.run(main())


@check
def errors_are_of_its_own_classes() -> None:
    for kind, changes in (
        (litellm.NotFoundError, {"model": "openai/no-such-model"}),
        (litellm.BadRequestError, {"temperature": 3}),
        (litellm.ContextWindowExceededError, {"max_tokens": 10**6}),
    ):
        raised(kind, partial(litellm.completion, messages=QUESTION, **settings(**changes)))


run_checks()
