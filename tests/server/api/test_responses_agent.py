"""What a coding agent sends to /v1/responses over several turns: it keeps the conversation itself and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest

from tests.server.serving import MODEL, RunningServer, scripted_server

TOOL_NAMES = ("shell", "read_file", "write_file", "apply_patch", "list_dir", "grep", "update_plan", "view_image")
INSTRUCTIONS = "You are a coding agent in a terminal. Work step by step, and run the tests before you finish. " * 40
COMMAND = {"command": ["bash", "-lc", "ls -la"], "workdir": "/repo"}
SCRIPT = (
    "I will look at the files first.\n"
    f'<tool_call>\n{{"name": "shell", "arguments": {json.dumps(COMMAND)}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "update_plan", "arguments": {"plan": "1. look\\n2. \\"fix\\""}}\n</tool_call><|end|>'
)


def tool(name: str) -> dict[str, Any]:
    properties = {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments"},
        "workdir": {"type": "string"},
        "plan": {"type": "string"},
    }
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"type": "function", "name": name, "description": name, "strict": False, "parameters": parameters}


SETTINGS: dict[str, Any] = {
    "model": MODEL,
    "instructions": INSTRUCTIONS,
    "tools": [tool(name) for name in TOOL_NAMES],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "auto",
    "prompt_cache_key": "0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000",
    "text": {"verbosity": "medium"},
    "extra_body": {"client_metadata": {"installation": "1"}},
}


def text(role: str, content: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": content}]}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(script=SCRIPT, max_model_len=30_000) as running:
        yield running


def turn(client: openai.OpenAI, history: list[Any]) -> Any:
    """Stream one turn, append its finished items to the history as agents do, and return the response."""
    for event in client.responses.create(**SETTINGS, input=history, stream=True):
        if event.type == "response.output_item.done":
            history.append(event.item.model_dump(exclude_none=True))
        elif event.type == "response.completed":
            return event.response
    raise AssertionError("the stream did not complete")


def test_an_agent_works_over_several_turns(server: RunningServer) -> None:
    client = server.openai()
    history: list[Any] = [
        text("developer", "<permissions>The sandbox is read-only.</permissions>"),
        text("user", "<environment_context>\n  <cwd>/repo</cwd>\n</environment_context>"),
        text("user", "Fix the failing test."),
    ]
    usages = []
    for number in range(3):
        response = turn(client, history)
        message, shell, plan = response.output
        assert message.content[0].text.strip() == "I will look at the files first."
        assert (shell.name, json.loads(shell.arguments)) == ("shell", COMMAND)
        assert (plan.name, json.loads(plan.arguments)) == ("update_plan", {"plan": '1. look\n2. "fix"'})
        assert shell.call_id != plan.call_id
        history.append({"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA"})
        history += [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"done {number}"}
            for call in (shell, plan)
        ]
        usages.append(response.usage)
    for before, after in pairwise(usages):
        assert after.input_tokens > before.input_tokens
        assert after.input_tokens_details.cached_tokens > 0.9 * before.input_tokens, "a turn extends the one before"
    assert client.get(f"/requests/{response.id}/chunks", cast_to=object)["requests"][0]["chunks"]  # type: ignore[index]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
