"""The official Python client of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import math
from functools import partial

import openai
from checking import ADDRESS, MODEL, check, raised, run_checks
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CLIENT = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0, timeout=120)
CHAT = CLIENT.chat.completions
COMPLETIONS = CLIENT.completions
RESPONSES = CLIENT.responses


@check
def models_are_listed() -> None:
    assert MODEL in [model.id for model in CLIENT.models.list()]
    assert CLIENT.models.retrieve(MODEL).object == "model"


@check
def a_chat_is_answered() -> None:
    answer = CHAT.create(model=MODEL, messages=QUESTION, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def a_streamed_chat_says_the_same_as_a_whole_one() -> None:
    whole = CHAT.create(model=MODEL, messages=QUESTION, max_completion_tokens=10, temperature=0)
    chunks = list(CHAT.create(model=MODEL, messages=QUESTION, max_completion_tokens=10, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


@check
def the_stream_helper_accumulates_the_answer() -> None:
    with CHAT.stream(model=MODEL, messages=QUESTION, max_tokens=8, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "Paris" in final.choices[0].message.content


@check
def usage_comes_with_the_last_chunk() -> None:
    options = {"include_usage": True}
    *others, last = CHAT.create(model=MODEL, messages=QUESTION, max_tokens=4, stream=True, stream_options=options)
    assert last.choices == []
    assert last.usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in others)


@check
def usage_may_come_with_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(COMPLETIONS.create(model=MODEL, prompt="One", max_tokens=4, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


@check
def completions_take_text_ids_and_batches() -> None:
    text = COMPLETIONS.create(model=MODEL, prompt="Once upon a time", max_tokens=5, temperature=0)
    assert text.choices[0].text
    assert text.choices[0].finish_reason == "length"
    ids = COMPLETIONS.create(model=MODEL, prompt=[100, 200, 300], max_tokens=2)
    assert ids.usage.prompt_tokens == 3
    batch = COMPLETIONS.create(model=MODEL, prompt=["One", "Two"], n=2, max_tokens=2)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]


@check
def completions_stream() -> None:
    chunks = list(COMPLETIONS.create(model=MODEL, prompt=["One", "Two"], max_tokens=3, temperature=0, stream=True))
    ends = {chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason}
    assert ends == {0, 1}


@check
def stop_strings_end_an_answer_and_are_left_out() -> None:
    answer = CHAT.create(model=MODEL, messages=QUESTION, max_tokens=20, temperature=0, stop=["Paris"])
    assert "Paris" not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


@check
def n_answers_differ_and_a_seed_repeats_them() -> None:
    def texts() -> list[str]:
        answer = CHAT.create(model=MODEL, messages=QUESTION, n=3, seed=7, temperature=1.5, max_tokens=6)
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) > 1
    assert texts() == first


@check
def logprobs_of_a_chat_are_probabilities() -> None:
    answer = CHAT.create(
        model=MODEL, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert len(answer.logprobs.content) == 4
    for entry in answer.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.001
    said = b"".join(bytes(entry.bytes) for entry in answer.logprobs.content).decode()
    assert said == answer.message.content


@check
def echo_gives_the_logprobs_of_the_prompt() -> None:
    answer = COMPLETIONS.create(model=MODEL, prompt="The sky is blue", max_tokens=0, echo=True, logprobs=2).choices[0]
    assert answer.text == "The sky is blue"
    assert answer.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in answer.logprobs.token_logprobs[1:])
    assert "".join(answer.logprobs.tokens) == "The sky is blue"


@check
def response_format_gives_json_of_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "is_capital": {"type": "boolean"}},
        "required": ["city", "is_capital"],
        "additionalProperties": False,
    }
    answer = CHAT.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    )
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"city", "is_capital"}
    assert isinstance(found["is_capital"], bool)


class City(BaseModel):
    """What `parse` is to find."""

    name: str
    is_capital: bool


@check
def parse_reads_a_pydantic_model() -> None:
    answer = CHAT.parse(model=MODEL, messages=QUESTION, max_tokens=80, temperature=0, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


@check
def a_required_tool_is_called_and_its_result_taken() -> None:
    answer = CHAT.create(
        model=MODEL, messages=WEATHER, tools=[TOOL], tool_choice="required", max_tokens=80, temperature=0
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    call = answer.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert "city" in json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turn = [*WEATHER, answer.message, result]
    following = CHAT.create(model=MODEL, messages=turn, tools=[TOOL], tool_choice="none", max_tokens=8)
    assert following.choices[0].message.content


@check
def a_tool_call_is_streamed_in_pieces() -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    chunks = CHAT.create(
        model=MODEL, messages=WEATHER, tools=[TOOL], tool_choice=choice, max_tokens=80, temperature=0, stream=True
    )
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert pieces[0].function.name == "get_weather"
    assert pieces[0].id
    assert "city" in json.loads("".join(piece.function.arguments or "" for piece in pieces))


@check
def a_response_is_whole_and_streamed_the_same() -> None:
    body = {"model": MODEL, "input": "What is the capital of France?", "max_output_tokens": 12, "temperature": 0}
    whole = RESPONSES.create(**body)
    assert whole.object == "response"
    assert "Paris" in whole.output_text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(RESPONSES.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == whole.output_text
    with RESPONSES.stream(**body) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == whole.output_text


@check
def a_response_continues_a_stored_one() -> None:
    first = RESPONSES.create(model=MODEL, input="My name is Ada.", max_output_tokens=8)
    assert RESPONSES.retrieve(first.id) == first
    second = RESPONSES.create(model=MODEL, input="What is my name?", previous_response_id=first.id, max_output_tokens=8)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert len(list(RESPONSES.input_items.list(second.id))) == 3
    RESPONSES.delete(first.id)
    error = raised(openai.NotFoundError, partial(RESPONSES.retrieve, first.id))
    assert error.code == "response_not_found"
    error = raised(
        openai.BadRequestError, partial(RESPONSES.create, model=MODEL, input="Hi", previous_response_id=first.id)
    )
    assert error.code == "previous_response_not_found"


@check
def a_response_calls_a_tool_and_reads_its_result() -> None:
    tool = {"type": "function", **TOOL["function"], "strict": True}
    body = {"model": MODEL, "tools": [tool], "temperature": 0}
    history = [{"role": "user", "content": WEATHER[0]["content"]}]
    with RESPONSES.stream(**body, input=history, tool_choice="required", max_output_tokens=80) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        [call] = stream.get_final_response().output
    assert call.name == "get_weather"
    assert "city" in json.loads("".join(pieces))
    history += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert RESPONSES.create(**body, input=history, tool_choice="none", max_output_tokens=8).output_text


@check
def a_response_is_parsed_into_a_model() -> None:
    class City(BaseModel):
        name: str
        is_capital: bool

    answer = RESPONSES.parse(
        model=MODEL, input="Describe Paris as JSON.", text_format=City, max_output_tokens=60, temperature=0
    )
    assert isinstance(answer.output_parsed, City)


@check
def errors_are_of_the_clients_own_classes() -> None:
    refused = [
        (openai.NotFoundError, {"model": "no-such-model"}, "model_not_found"),
        (openai.BadRequestError, {"temperature": 3}, None),
        (openai.BadRequestError, {"messages": []}, None),
        (openai.BadRequestError, {"n": 0}, None),
        (openai.BadRequestError, {"extra_body": {"use_beam_search": True}}, "unsupported_parameter"),
        (openai.BadRequestError, {"max_tokens": 10**6}, "context_length_exceeded"),
    ]
    for kind, changes, code in refused:
        error = raised(kind, partial(CHAT.create, **{"model": MODEL, "messages": QUESTION, **changes}))
        assert error.code == code, (changes, error.code)
        assert error.type == "invalid_request_error"


@check
def a_stream_that_is_closed_early_ends() -> None:
    with CHAT.create(model=MODEL, messages=QUESTION, max_tokens=500, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break


@check
def many_at_once_are_all_answered() -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key="none", timeout=120) as client:

            async def one(number: int) -> int:
                stream = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": f"Count from {number}"}],
                    max_tokens=5,
                    stream=True,
                    extra_body={"tenant": f"tenant-{number % 3}", "ignore_eos": True},
                )
                return len([chunk async for chunk in stream if chunk.choices[0].delta.content])

            assert all(await asyncio.gather(*(one(number) for number in range(16))))

    asyncio.run(main())


run_checks()
