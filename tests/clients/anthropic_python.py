"""The official Python client of Anthropic's API."""

from __future__ import annotations

import asyncio
from functools import partial

import agent_trace
import anthropic
from checking import ADDRESS, MODEL, check, raised, run_checks

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CLIENT = anthropic.Anthropic(base_url=ADDRESS, api_key="none", max_retries=0, timeout=120)
GREEDY = {"extra_body": {"temperature": 0}}  # this client has no argument for it any more
create = partial(CLIENT.messages.create, model=MODEL, max_tokens=12, messages=QUESTION, **GREEDY)
stream = partial(CLIENT.messages.stream, model=MODEL, max_tokens=12, messages=QUESTION, **GREEDY)

TOOL = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


@check
def a_message_is_answered() -> None:
    message = create()
    assert message.type == "message"
    assert message.role == "assistant"
    assert message.id.startswith("msg_")
    assert message._request_id.startswith("req_")
    assert "Paris" in message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.output_tokens <= 12


@check
def blocks_and_a_system_prompt_are_read() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "You answer in one word.", **cached}]
    blocks = [{"type": "text", "text": "What is the capital", **cached}, {"type": "text", "text": "of France?"}]
    message = create(system=system, messages=[{"role": "user", "content": blocks}], metadata={"user_id": "me"})
    assert "Paris" in message.content[0].text


@check
def a_streamed_message_says_the_same_as_a_whole_one() -> None:
    whole = create()
    with stream() as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@check
def raw_events_come_in_their_order() -> None:
    kinds = [event.type for event in create(stream=True)]
    assert kinds[0] == "message_start"
    assert [kind for kind in kinds if kind not in ("content_block_delta", "ping")] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@check
def a_stop_sequence_is_named_and_left_out() -> None:
    message = create(max_tokens=20, stop_sequences=["Paris", "London"])
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == "Paris"
    assert all("Paris" not in block.text for block in message.content)


@check
def tokens_are_counted_as_they_are_used() -> None:
    for fields in ({}, {"system": "Be brief."}, {"tools": [TOOL]}):
        counted = CLIENT.messages.count_tokens(model=MODEL, messages=QUESTION, **fields)
        used = create(max_tokens=1, **fields).usage
        assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


@check
def a_prompt_that_was_sent_before_is_read_from_the_cache() -> None:
    system = "You are careful. " * 40
    create(system=system, max_tokens=1)
    assert create(system=system, max_tokens=1).usage.cache_read_input_tokens > 100


@check
def a_tool_is_called_and_its_result_taken() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = create(messages=WEATHER, tools=[TOOL], tool_choice=choice, max_tokens=80)
        assert message.stop_reason == "tool_use"
        call = message.content[-1]
        assert call.type == "tool_use"
        assert call.name == "get_weather"
        assert "city" in call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*WEATHER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    following = create(messages=turns, tools=[TOOL], tool_choice={"type": "none"})
    assert following.content[0].text


@check
def a_streamed_call_is_put_together_by_the_client() -> None:
    with stream(messages=WEATHER, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=80) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        final = events.get_final_message()
    assert final.stop_reason == "tool_use"
    assert "".join(pieces)
    assert "city" in final.content[-1].input


@check
def an_output_schema_is_kept() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    message = create(max_tokens=40, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert message.content[0].text.startswith("{")


@check
def the_assistants_last_text_is_continued() -> None:
    whole = create(max_tokens=8).content[0].text
    begun = whole[: len(whole) // 2]
    continued = create(messages=[*QUESTION, {"role": "assistant", "content": begun}], max_tokens=8)
    assert continued.content[0].text, continued
    assert not continued.content[0].text.startswith(whole[:4]), (whole, continued)


@check
def errors_are_of_the_clients_own_classes() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    refused = [
        (anthropic.NotFoundError, {"model": "no-such-model"}, "not_found_error", "no-such-model"),
        (anthropic.BadRequestError, {"max_tokens": 0}, "invalid_request_error", "max_tokens"),
        (anthropic.BadRequestError, {"messages": []}, "invalid_request_error", "messages"),
        (
            anthropic.BadRequestError,
            {"messages": [{"role": "user", "content": [image]}]},
            "invalid_request_error",
            "'image'",
        ),
        (anthropic.BadRequestError, {"extra_body": {"unknown": 1}}, "invalid_request_error", "unknown"),
        (anthropic.RequestTooLargeError, {"system": "a" * (9 << 20)}, "request_too_large", "body"),
    ]
    for kind, changes, name, words in refused:
        error = raised(kind, partial(create, **changes))
        assert error.type == name, (changes, error.type)
        assert words in str(error), str(error)
        assert error.request_id.startswith("req_")


@check
def a_coding_agents_session_is_taken_turn_by_turn() -> None:
    cached = []
    for number, num_turns in enumerate((1, 3, 5)):
        body = agent_trace.request(MODEL, num_turns, billing=str(number))
        extra = {name: body.pop(name) for name in ("temperature", "context_management")}
        events = list(CLIENT.messages.create(**body | {"max_tokens": 8}, extra_body=extra))
        assert events[-1].type == "message_stop"
        cached.append(events[0].message.usage.cache_read_input_tokens)
    assert cached[0] < cached[1] < cached[2]


@check
def a_stream_that_is_closed_early_ends() -> None:
    with stream(max_tokens=500) as events:
        for _ in events.text_stream:
            break


@check
def many_at_once_are_all_answered() -> None:
    async def main() -> None:
        async with anthropic.AsyncAnthropic(base_url=ADDRESS, api_key="none", timeout=120) as client:

            async def one(number: int) -> int:
                messages = [{"role": "user", "content": f"Count from {number}"}]
                async with client.messages.stream(model=MODEL, max_tokens=5, messages=messages) as events:
                    return (await events.get_final_message()).usage.output_tokens

            assert all(await asyncio.gather(*(one(number) for number in range(16))))

    asyncio.run(main())


run_checks()
