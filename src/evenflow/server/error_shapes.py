"""How an error's body looks: as in OpenAI's API or, for the paths of Anthropic's and Ollama's, as in those.

The path alone decides, because an error may come before any route is known: a bad head, a wrong key, a large body.
"""

from __future__ import annotations

import secrets
from typing import Any

MESSAGES_PATH = "/v1/messages"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether clients of Anthropic's API use this path."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def is_ollama(path: str) -> bool:
    """Whether clients of Ollama's API use this path."""
    return path.startswith("/api/")


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def anthropic_error(status: int, message: str, code: str | None, request_id: str) -> dict[str, Any]:
    """The body. `code` is evenflow's own name of the cause, which its OpenAI errors have too."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if code is not None:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error, "request_id": request_id}
