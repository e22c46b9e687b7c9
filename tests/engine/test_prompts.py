"""What callers may give as prompts, parameters and conversations, and one clear error for anything else."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from evenflow.core.request import SamplingParams
from evenflow.engine.outputs import RequestOutput
from evenflow.engine.prompts import as_batch, as_conversations, read_prompt
from evenflow.errors import InvalidRequest
from evenflow.executors.fake import fake_continuation
from tests.engine.fakes import VOCAB, fake_async_llm, fake_engine, fake_llm

THREE = fake_continuation([1, 2], 3, VOCAB)
SAMPLED = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=3)


@pytest.mark.parametrize(
    "prompts",
    ["1 2", [1, 2], (1, 2), np.array([1, 2]), {"prompt": "1 2"}, {"prompt_token_ids": [1, 2]}, [{"prompt": "1 2"}]],
)
def test_one_prompt_in_every_shape(prompts: Any) -> None:
    [output] = fake_llm().generate(prompts, SamplingParams(max_tokens=3))
    assert output.token_ids == THREE
    is_text = "'1 2'" in repr(prompts)
    assert output.prompt == ("1 2" if is_text else None)


def test_several_prompts_in_several_shapes() -> None:
    prompts = ["1 2", {"prompt_token_ids": [1, 2], "prompt": "one two"}, [1, 2], {"prompt": "1 2"}]
    outputs = fake_llm().generate(prompts, SamplingParams(max_tokens=3))  # type: ignore[arg-type]
    assert [output.token_ids for output in outputs] == [THREE] * 4
    assert [output.prompt for output in outputs] == ["1 2", "one two", None, "1 2"]
    assert as_batch([]) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "Got 5 for prompts but expected a text, token ids, {'prompt': TEXT}"),
        (None, "Got None for prompts"),
        (b"hi", "Got b'hi' for prompts"),
        ([None], "Got None for a prompt"),
        ({}, "Got the prompt {} but expected a text"),
        ({"prompt": 5}, "Got the prompt {'prompt': 5}"),
        ({"prompt_token_ids": 5}, "Got 5 for prompt_token_ids but expected token ids"),
        ({"text": "hi"}, "Got a prompt with 'text'"),
        ({"prompt": "hi", "multi_modal_data": {}}, "Got a prompt with 'multi_modal_data'"),
        ([1, "2"], "token id '2'"),
    ],
)
def test_other_prompts_are_refused(prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fake_llm().generate(prompts)
    assert message in str(caught.value)


@pytest.mark.parametrize("params", [{"max_tokens": 5}, 0.5, "greedy", SamplingParams])
def test_parameters_of_another_type_are_refused(params: Any) -> None:
    llm = fake_llm()
    for call in (lambda: llm.generate("1 2", params), lambda: llm.prepare("1 2", params)):
        with pytest.raises(InvalidRequest, match="but expected SamplingParams, such as"):
            call()


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        (
            "hi",
            "Got 'hi' as a conversation but expected a list of messages, such as [{'role': 'user', 'content': 'hi'}]",
        ),
        (["hi"], "Got 'hi' as a conversation"),
        ({"role": "user", "content": "hi"}, "as a conversation but expected a list of messages"),
        ([{"content": "hi"}], "Got the message {'content': 'hi'}"),
        ([[]], "Got an empty conversation"),
        ([[5]], "Got the message 5"),
        (5, "Got 5 for conversations"),
    ],
)
def test_what_is_no_conversation_is_refused(conversations: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        as_conversations(conversations)
    assert message in str(caught.value)


def test_one_conversation_or_several() -> None:
    one = [{"role": "user", "content": "hi"}]
    assert as_conversations(one) == [one]
    assert as_conversations([one, one]) == [one, one]
    assert as_conversations([]) == []
    assert read_prompt({"prompt_token_ids": (1, 2)}) == ([1, 2], None)


def assert_three(output: RequestOutput) -> None:
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert [one.token_ids for one in output.outputs] == [THREE] * 3
    assert (output.outputs[0].text, output.finished) == (output.text, True)


def test_n_outputs_of_each_prompt() -> None:
    llm = fake_llm()
    first, second = llm.generate(["1 2", [1, 2]], SAMPLED)
    [alone] = llm.generate("1 2", SamplingParams(max_tokens=3))
    assert_three(first)
    assert_three(second)
    assert (first.prompt, len(alone.outputs)) == ("1 2", 1)
    one, two = SamplingParams(n=2, temperature=1.0).choices()
    assert [choice.seed for choice in (*SAMPLED.choices(), one, two)] == [5, 6, 7, None, None]


def test_n_outputs_with_async_calls() -> None:
    async def ask() -> RequestOutput:
        async with fake_async_llm(fake_engine()) as llm:
            return await llm.generate({"prompt": "1 2"}, SAMPLED)

    assert_three(asyncio.run(ask()))


def test_equal_outputs_and_streams_of_several_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="n=3 with temperature=0: all outputs would be equal"):
        SamplingParams(n=3)
    with pytest.raises(InvalidRequest, match="n=0"):
        SamplingParams(n=0)
    with pytest.raises(InvalidRequest, match="Got n=3 for a single request"):
        list(fake_llm().stream("1 2", SAMPLED))


def test_one_default_of_the_temperature() -> None:
    """Without parameters, and with any that do not name it."""
    assert SamplingParams(max_tokens=8).temperature == fake_llm().prepare("1 2").sampling.temperature == 0
