"""/v1/responses through the official client and as plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from evenflow.model.text.chat_template import ChatTemplate
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.api.responses.models import DeletedResponse, InputItemList, ResponseObject
from tests.models import byte_level_tokenizer
from tests.server.engines import scripted_engine
from tests.server.serving import MODEL, RunningServer, running_server, scripted_server, small_tokenizer

PATH = "/v1/responses"
SCRIPT = "It is 20° in Zürich, they say. "
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(script=SCRIPT) as running:
        yield running


@pytest.fixture(scope="module")
def caller() -> Iterator[RunningServer]:
    """Its model says a word, calls a function, and ends."""
    with scripted_server(script=f"Let me see. {CALL}<|end|>") as running:
        yield running


def num_tokens(text: str) -> int:
    return len(small_tokenizer().encode(text, add_special_tokens=False))


def events_of(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream, after checking what holds for each."""
    with httpx.stream("POST", server.url + PATH, json={**body, "stream": True}, timeout=30, verify=False) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    events = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


# ---- whole ----


def test_the_openai_client_gets_a_whole_response(server: RunningServer) -> None:
    answer = server.openai().responses.create(
        model=MODEL, input="How is it?", instructions="Be brief.", max_output_tokens=num_tokens(SCRIPT)
    )
    assert answer.output_text == SCRIPT
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.model, answer.instructions) == ("incomplete", MODEL, "Be brief.")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert answer.usage is not None
    assert answer.usage.output_tokens == num_tokens(SCRIPT)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_settings_are_returned_and_the_response_is_as_described(server: RunningServer) -> None:
    body = {
        "input": "Hi",
        "max_output_tokens": 3,
        "temperature": 0.5,
        "metadata": {"run": "7"},
        "user": "me",
        "tools": [WEATHER],
        "tool_choice": "none",
        "reasoning": {"effort": "low"},
        "store": False,
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "service_tier": "auto",
    }
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    ResponseObject.model_validate_json(response.content, strict=True)
    told = response.json()
    assert (told["temperature"], told["top_p"], told["metadata"]) == (0.5, 1.0, {"run": "7"})
    assert (told["tools"], told["tool_choice"], told["store"]) == ([WEATHER], "none", False)
    assert told["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def test_an_answer_that_ends_is_complete(caller: RunningServer) -> None:
    answer = caller.openai().responses.create(model=MODEL, input="Hi")
    assert (answer.status, answer.incomplete_details) == ("completed", None)
    assert answer.output_text == f"Let me see. {CALL}", "without tools it is text"


def test_items_are_the_same_conversation_as_a_chat(server: RunningServer) -> None:
    """The chat's prompt has as many tokens, with one system message and the call beside the assistant's text."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    chat = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Hello\nthere"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {"role": "user", "content": "And now?"},
    ]
    arguments = {"call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Bern"}'}
    parts = [{"type": "input_text", "text": "Hello"}, {"type": "input_text", "text": "there"}]
    said = [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]
    items = [
        {"type": "message", "role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": said},
        {"id": "fc_1", "type": "function_call", "status": "completed", **arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "sunny"}]},
        {"role": "user", "content": "And now?"},
    ]
    usage = server.post("/v1/chat/completions", {"messages": chat, "max_tokens": 1}).json()["usage"]
    body = {"input": items, "instructions": "Be brief.", "max_output_tokens": 1, "tenant": "another"}
    assert server.post(PATH, body).json()["usage"]["input_tokens"] == usage["prompt_tokens"]


def test_logprobs_come_when_they_are_included(server: RunningServer) -> None:
    body = {"input": "Hi", "max_output_tokens": 6, "include": LOGPROBS, "top_logprobs": 2}
    response = server.post(PATH, body)
    ResponseObject.model_validate_json(response.content, strict=True)
    [part] = response.json()["output"][0]["content"]
    rows = part["logprobs"]
    assert bytes(byte for row in rows for byte in row["bytes"]).decode(errors="replace") == part["text"]
    assert all(row["logprob"] == -0.5 and len(row["top_logprobs"]) == 2 for row in rows)
    deltas = [event for event in events_of(server, body) if event["type"] == "response.output_text.delta"]
    assert [row for delta in deltas for row in delta["logprobs"]] == rows


def test_the_template_gets_the_reasoning_effort() -> None:
    def tokenizer() -> Tokenizer:
        template = "{{ 'Think long. ' * 5 if reasoning_effort == 'high' }}{{ messages[0]['content'] }}"
        chat_template = ChatTemplate({"default": template}, {})
        return Tokenizer(byte_level_tokenizer(), bos_token_id=1, eos_token_ids=(2,), chat_template=chat_template)

    with running_server(scripted_engine, tokenizer) as server:
        low, high = (
            server.post(PATH, {"input": "Hi", "max_output_tokens": 1, "reasoning": {"effort": effort}}).json()
            for effort in ("low", "high")
        )
    assert high["reasoning"] == {"effort": "high", "summary": None}
    assert high["usage"]["input_tokens"] > low["usage"]["input_tokens"]


# ---- tools ----


def test_a_call_is_an_item_of_its_own(caller: RunningServer) -> None:
    client = caller.openai()
    answer = client.responses.create(model=MODEL, input="How is the weather?", tools=[WEATHER])
    message, call = answer.output
    assert (message.type, call.type) == ("message", "function_call")
    assert answer.output_text == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Bern"})
    history: Any = [{"role": "user", "content": "How is the weather?"}, *answer.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    again = client.responses.create(model=MODEL, input=history, tools=[WEATHER], tool_choice="none")
    assert again.status == "completed"


def test_tools_can_be_narrowed(caller: RunningServer) -> None:
    other = {"type": "function", "name": "get_time"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}

    def tokens(**fields: Any) -> int:
        body = {"input": "Hi", "max_output_tokens": 1, "store": False, **fields}
        return int(caller.post(PATH, body).json()["usage"]["input_tokens"])

    assert tokens(tools=[other, WEATHER], tool_choice=allowed) == tokens(tools=[WEATHER])
    assert tokens(tools=[other, WEATHER], tool_choice=allowed) < tokens(tools=[other, WEATHER])
    refused = caller.post(PATH, {"input": "Hi", "tools": [other], "tool_choice": allowed})
    assert refused.status_code == 400
    assert "'get_weather' in tool_choice.tools" in refused.json()["error"]["message"]


def test_schemas_with_any_number_are_returned(caller: RunningServer) -> None:
    """Before, an integer over 64 bits failed while the response was written."""
    tool = {**WEATHER, "parameters": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**40}}}}
    response = caller.post(PATH, {"input": "Hi", "tools": [tool]})
    assert response.status_code == 200, response.text
    assert response.json()["tools"] == [tool]


# ---- streams ----


def test_the_events_of_text_and_a_call(caller: RunningServer) -> None:
    body = {"input": "How is the weather?", "tools": [WEATHER]}
    events = events_of(caller, body)
    types = [event["type"].removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(types) if not at or types[at - 1] != kind]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    by_type = {event["type"]: event for event in events}
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(texts) == by_type["response.output_text.done"]["text"] == "Let me see."
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == by_type["response.function_call_arguments.done"]["arguments"] == '{"city": "Bern"}'
    final = events[-1]["response"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
    assert [event["output_index"] for event in events if "output_index" in event][-1] == 1
    whole = caller.post(PATH, body).json()
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert final.keys() == whole.keys()


def test_text_after_a_call_follows_it() -> None:
    script = f"{CALL}\nDone.<|end|>"
    with scripted_server(script=script) as server:
        body = {"input": "Hi", "tools": [WEATHER]}
        whole = server.post(PATH, body).json()["output"]
        assert [item["type"] for item in whole] == ["function_call", "message"]
        assert whole[1]["content"][0]["text"].strip() == "Done."
        assert without_ids(events_of(server, body)[-1]["response"]["output"]) == without_ids(whole)


def test_an_empty_answer_is_an_empty_message() -> None:
    with scripted_server(script="<|end|>") as server:
        for answer in (server.post(PATH, {"input": "Hi"}).json(), events_of(server, {"input": "Hi"})[-1]["response"]):
            assert [part["text"] for item in answer["output"] for part in item["content"]] == [""]
            assert answer["status"] == "completed"


def test_the_openai_client_streams(server: RunningServer) -> None:
    with server.openai().responses.stream(model=MODEL, input="Hi", max_output_tokens=num_tokens(SCRIPT)) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == SCRIPT
    last = list(server.openai().responses.create(model=MODEL, input="Hi", max_output_tokens=2, stream=True))[-1]
    assert last.type == "response.incomplete"
    assert last.response.usage is not None


def test_a_stream_that_fails_says_so() -> None:
    with scripted_server(script=SCRIPT, step_s=0.01) as server:
        stream = server.openai().responses.create(model=MODEL, input="Hi", stream=True)
        seen = []
        for event in stream:
            if event.type == "response.output_text.delta" and "response.output_text.delta" not in seen:
                server.server.should_exit = True
            seen.append(event.type)
    assert seen[-3:] == ["response.output_item.done", "error", "response.failed"]
    assert event.type == "response.failed"
    assert (event.response.status, event.response.output[0].status) == ("failed", "incomplete")  # type: ignore[union-attr]
    assert event.response.error is not None
    assert "shutting down" in event.response.error.message


# ---- stored ----


def test_a_stored_response_is_read_continued_and_deleted(caller: RunningServer) -> None:
    client = caller.openai()
    first = client.responses.create(model=MODEL, input="Weather?", instructions="Be brief.", tools=[WEATHER])
    assert client.responses.retrieve(first.id) == first
    result: Any = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"}  # type: ignore[union-attr]
    second = client.responses.create(model=MODEL, input=[result], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    whole: Any = [{"role": "user", "content": "Weather?"}, *first.output, result]
    again = client.responses.create(model=MODEL, input=whole)
    assert second.usage is not None
    assert again.usage is not None
    assert second.usage.input_tokens == again.usage.input_tokens, "without the first's instructions"
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in listed] == ["message", "message", "function_call", "function_call_output"]
    assert listed[0].content[0].text == "Weather?"  # type: ignore[union-attr]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.retrieve(first.id)
    assert refused.value.code == "response_not_found"
    assert client.responses.create(model=MODEL, input="Thanks", previous_response_id=second.id).status == "completed"


def test_a_streamed_response_is_stored_too(caller: RunningServer) -> None:
    final = events_of(caller, {"input": "Hi"})[-1]["response"]
    assert caller.get(f"{PATH}/{final['id']}").json() == final
    found = caller.get(f"{PATH}/{final['id']}/input_items")
    assert InputItemList.model_validate_json(found.content, strict=True).data[0]["content"][0]["text"] == "Hi"
    deleted = caller.request("DELETE", f"{PATH}/{final['id']}")
    assert DeletedResponse.model_validate_json(deleted.content, strict=True).id == final["id"]


def test_half_a_response_is_not_stored() -> None:
    with scripted_server(script=SCRIPT, step_s=0.01) as server:
        with server.openai().responses.create(model=MODEL, input="Hi", stream=True) as stream:
            made = next(stream)
        assert made.type == "response.created"
        server.until(lambda: server.server.service.gate.num_inside == 0)
        assert server.get(f"{PATH}/{made.response.id}").status_code == 404


def test_what_need_not_be_stored_is_not(caller: RunningServer) -> None:
    answer = caller.post(PATH, {"input": "Hi", "store": False}).json()
    assert caller.get(f"{PATH}/{answer['id']}").status_code == 404
    refused = caller.post(PATH, {"input": "Hi", "previous_response_id": answer["id"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_pages_of_input_items_have_bounds(caller: RunningServer) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    path = f"{PATH}/{caller.post(PATH, {'input': items}).json()['id']}/input_items"
    newest = caller.get(f"{path}?limit=2").json()
    assert [item["content"][0]["text"] for item in newest["data"]] == ["4", "3"]
    assert newest["has_more"]
    rest = caller.get(f"{path}?after={newest['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
    assert not rest["has_more"]
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_0"):
        assert caller.get(f"{path}?{query}").status_code == 400


def test_only_the_key_that_made_a_response_may_use_it() -> None:
    with scripted_server(script="Yes.<|end|>", settings={"api_keys": ["one", "two"]}) as server:
        assert server.post(PATH, {"input": "Hi"}).status_code == 401
        mine, other = server.openai(api_key="one").responses, server.openai(api_key="two").responses
        made = mine.create(model=MODEL, input="A secret")
        for call in (other.retrieve, other.delete, other.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.BadRequestError):
            other.create(model=MODEL, input="What did I say?", previous_response_id=made.id)
        tenant = {"tenant": "another"}
        with pytest.raises(openai.BadRequestError):
            mine.create(model=MODEL, input="And?", previous_response_id=made.id, extra_body=tenant)
        assert mine.create(model=MODEL, input="And?", previous_response_id=made.id).output_text == "Yes."


# ---- refused ----

_REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": []}, "input", "at least 1"),
    ({"input": ""}, "input", "at least 1"),
    ({"input": 5}, "input", "string"),
    ({"input": [{"role": "x", "content": "a"}]}, "input[0].role", "got 'x' but expected 'user'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "required"),
    ({"input": [{"role": "user", "content": "a", "name": "b"}]}, "input[0].name", "Unknown field"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "'item_reference'"),
    ({"input": [{"type": {}}]}, "input[0]", "got type {}"),
    ({"input": [5]}, "input[0]", "expected an object"),
    ({"input": [{"role": "user", "content": [{}]}]}, "input[0].content[0]", "got type None but expected 'input_text'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "reads only text"),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": {}}]},
        "input[0].arguments",
        "string",
    ),
    ({"input": [{"type": "reasoning", "summary": []}]}, None, "only reasoning items"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'"),
    ({"tools": [WEATHER, WEATHER]}, None, "two tools"),
    ({"tool_choice": {"type": "function", "name": "x"}}, None, "tools are: none"),
    ({"tools": [WEATHER], "include": LOGPROBS}, None, "tool_choice is 'none'"),
    ({"top_logprobs": 2}, None, "include"),
    ({"include": ["all"]}, "include[0]", "'all'"),
    ({"truncation": "auto"}, "truncation", "'auto'"),
    ({"background": True}, "background", "only false"),
    ({"conversation": "conv_1"}, "conversation", "use previous_response_id"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "send instructions"),
    ({"n": 2}, "n", "Unknown field"),
    ({"messages": []}, "messages", "Unknown field"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
    ({"metadata": {"a": 1}}, "metadata", "string"),
    ({"text": {"format": {"type": "xml"}}}, "text", "'xml'"),
    ({"reasoning": {"effort": "<|end|>"}}, "reasoning", "'<|end|>'"),
]


@pytest.mark.parametrize(("fields", "param", "words"), _REFUSED)
def test_what_is_refused_is_named(server: RunningServer, fields: dict[str, Any], param: str | None, words: str) -> None:
    response = server.post(PATH, {"input": "Hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"] == param


def test_a_conversation_over_the_context_is_refused(server: RunningServer) -> None:
    for body in ({"input": "a " * 100_000}, {"input": "Hi", "max_output_tokens": 10**6}):
        error = server.post(PATH, body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError):
        server.openai().responses.create(model="other", input="Hi")


def test_stored_conversations_count_as_part_of_the_prompt(server: RunningServer) -> None:
    text = SCRIPT * (600 // num_tokens(SCRIPT))
    first = server.post(PATH, {"input": text, "max_output_tokens": 1}).json()
    assert first["status"] == "incomplete"
    body = {"input": text, "previous_response_id": first["id"], "max_output_tokens": 1}
    assert server.post(PATH, body).json()["error"]["code"] == "context_length_exceeded"


def test_limits_of_a_server_hold() -> None:
    limits = {"max_body_size": 1000, "max_waiting": 0}
    with scripted_server(settings={"limits": limits}, max_num_seqs=1, step_s=0.02) as server:
        assert server.post(PATH, {"input": "a" * 2000}).status_code == 413
        assert server.post(PATH, content="input=Hi").status_code == 415
        with httpx.stream(
            "POST", server.url + PATH, json={"input": "Hi", "stream": True}, timeout=30, verify=False
        ) as response:
            parts = response.iter_raw()
            next(parts)
            refused = server.post(PATH, {"input": "Hi"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        server.until(lambda: server.server.service.gate.num_inside == 0)
