"""The process that renders chat templates, which are code that came with a model: its time and memory are bounded.

It imports little, so that it starts fast and stays small.
"""

from __future__ import annotations

import json
import signal
import socket

import msgspec

from evenflow.errors import InvalidRequest
from evenflow.framing import FrameReader, frame
from evenflow.host import limit_memory
from evenflow.model.text.chat_template import ChatTemplate
from evenflow.model.text.special_tokens import SpecialTokens
from evenflow.server.engine.helper_process import Numbered, quiet_main, read_numbered

MAX_BYTES = 256 << 20  # besides what the process has before
_RECEIVE_BYTES = 1 << 18


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """A conversation as text, or why the template refuses it."""

    text: str = ""
    problem: str = ""


def run(connection: socket.socket, template: ChatTemplate, special_tokens: SpecialTokens, max_cpu_s: float) -> None:
    """Answer questions until the front closes the connection. The timer kills the process, even inside the library."""
    limit_memory(MAX_BYTES)
    frames = FrameReader()

    def serve() -> None:
        while data := connection.recv(_RECEIVE_BYTES):
            for content in frames.feed(data):
                asked = read_numbered(content)
                signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
                answer = msgspec.msgpack.encode(_render(template, special_tokens, asked.content))
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.sendall(frame(Numbered(asked.number, answer)))

    quiet_main(serve)


def _render(template: ChatTemplate, special_tokens: SpecialTokens, question: bytes) -> Rendered:
    asked = json.loads(question)
    protected = special_tokens if asked.pop("protect") else None
    variables = asked.pop("variables")
    try:
        return Rendered(template.render(**asked, protected=protected, **variables))
    except InvalidRequest as error:
        return Rendered(problem=str(error).encode(errors="replace").decode())
