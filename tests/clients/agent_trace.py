"""A session as a coding agent sends it over Anthropic's API: one request per turn, each with all that went before.

Has only the standard library: it also runs in a client's environment.
"""

from __future__ import annotations

from typing import Any

_CACHED = {"cache_control": {"type": "ephemeral"}}
_RULES = "\n".join(f"{number}. Read a file before you change it, and run its tests afterwards." for number in range(8))
_TOOL_NAMES = (
    *("Read", "Write", "Edit", "Glob", "Grep", "Bash", "BashOutput", "KillShell", "TodoWrite", "Task", "WebFetch"),
    *("NotebookEdit", "mcp__github__list_issues", "mcp__github__create_pull_request", "mcp__browser__screenshot"),
)


def _tool(name: str) -> dict[str, Any]:
    properties = {
        "file_path": {"type": "string", "description": "An absolute path"},
        "limit": {"type": "integer", "minimum": 0},
    }
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties}
    return {"name": name, "description": f"Runs {name}.", "input_schema": {**schema, "required": ["file_path"]}}


def _call(number: int, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number:024d}", "name": name, "input": {"file_path": f"/src/{number}.py"}}


def _result(number: int, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number:024d}", "content": content, **fields}


TURNS: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "<system-reminder>\nThe date is 2026-11-02.\n</system-reminder>"},
            {"type": "text", "text": "Mend the test that fails.", **_CACHED},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Which one fails?", "signature": "c2lnbmVk"},
            {"type": "text", "text": "I read the two files first."},
            _call(1, "Read"),
            _call(2, "Read"),
        ],
    },
    {
        "role": "user",
        "content": [
            _result(1, [{"type": "text", "text": "1\tdef add(a, b):\n2\t    return a - b"}]),
            _result(2, "<tool_use_error>File does not exist.</tool_use_error>", is_error=True, **_CACHED),
        ],
    },
    {"role": "assistant", "content": [_call(3, "Edit")]},
    {"role": "user", "content": [_result(3, None), {"type": "text", "text": "Go on.", **_CACHED}]},
]


def request(model: str, num_turns: int, billing: str = "0") -> dict[str, Any]:
    """The request of a turn, whose last message is the user's. `billing` differs in every request of such agents."""
    return {
        "model": model,
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={billing};"},
            {"type": "text", "text": "You are a coding agent.", **_CACHED},
            {"type": "text", "text": f"# Rules\n{_RULES}", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": TURNS[:num_turns],
        "tools": [*map(_tool, _TOOL_NAMES[:-1]), {**_tool(_TOOL_NAMES[-1]), **_CACHED}],
        "metadata": {"user_id": "user_0123_account__session_4567"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
