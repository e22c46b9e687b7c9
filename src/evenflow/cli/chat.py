"""`evenflow chat`: a conversation in the terminal, with the embedded engine or with a server."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from evenflow.cli.chat_partners import EmbeddedPartner, Partner, ServedPartner
from evenflow.cli.options import ModelOptions, SchedulingOptions, engine_settings, option, takes_options
from evenflow.cli.output import loading
from evenflow.cli.sides import is_address, server_arguments
from evenflow.core.request import SamplingParams
from evenflow.engine.async_llm import AsyncLLM
from evenflow.errors import EndpointFailed, InvalidInput, InvalidRequest

_HELP = "/reset begins a new conversation, /exit or Ctrl-D ends the chat, Ctrl-C stops an answer."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Who answers, and how."""

    url: str | None = option("Chat with a server; --model is then a name there.", metavar="URL")
    system: str | None = option("System prompt: what the model should be or do.", metavar="TEXT")
    temperature: float = option("0 always picks the likeliest token.", default=0.0)
    max_tokens: int | None = option("Maximum tokens of an answer.", show_default="up to the end of the context")
    seed: int | None = option("Makes sampling repeatable.", show_default="random")

    def sampling(self) -> SamplingParams:
        """Checks the values."""
        max_tokens = 1 if self.max_tokens is None else self.max_tokens  # an answer's end depends on its conversation
        return SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=max_tokens)

    def first_messages(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


@takes_options
def chat(*, options: ChatOptions, model: ModelOptions, scheduling: SchedulingOptions) -> None:
    """Chat with a model.

    Type a message; the answer streams. /reset begins a new conversation, /exit ends the chat. A server that needs a
    key gets the one in $EVENFLOW_API_KEY.
    """
    settings, sampling = engine_settings(model, scheduling), options.sampling()
    if options.url is not None and not is_address(options.url):
        raise InvalidInput(f"Got --url {options.url!r} but expected an address such as http://127.0.0.1:8000.")
    others = sorted(set(settings) - {"model", "weights"})
    if options.url is not None and others:
        flag = others[0].replace("_", "-")
        raise InvalidInput(f"Got --{flag} with --url, but a server has settings of its own: leave one out.")
    asyncio.run(_run(options, settings, sampling))


async def _run(options: ChatOptions, settings: dict[str, Any], sampling: SamplingParams) -> None:
    async with _partner(options, settings, sampling) as (partner, name):
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # lets input() edit lines and recall earlier ones
            print(f"Chat with {name}. {_HELP}", file=sys.stderr)
        await _talk(partner, options)


@asynccontextmanager
async def _partner(
    options: ChatOptions, settings: dict[str, Any], sampling: SamplingParams
) -> AsyncIterator[tuple[Partner, str]]:
    """Who answers, with a name for the user."""
    if options.url is None:
        with loading(settings["model"]):
            llm = AsyncLLM(**settings)
        async with llm:
            yield EmbeddedPartner(llm, sampling, options.max_tokens), f"{llm.config.model} ({llm.policy})"
        return
    fields = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed}
    server = ServedPartner(*server_arguments(options.url, settings["model"]))
    server.sampling = {name: value for name, value in fields.items() if value is not None}
    async with server.open():
        yield server, f"{server.model} at {server.name}"


async def _talk(partner: Partner, options: ChatOptions) -> None:
    messages = options.first_messages()
    while (line := _read_line()) is not None:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            messages = options.first_messages()
            print("A new conversation.", file=sys.stderr)
        elif re.fullmatch(r"/\w*", text):
            print(f"There is no {text}. {_HELP}", file=sys.stderr)
        elif text:
            messages.append({"role": "user", "content": text})
            answer = await _stream_answer(partner, messages)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _read_line() -> str | None:
    """What the user types; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


async def _stream_answer(partner: Partner, messages: list[dict[str, str]]) -> str | None:
    """Prints the answer as it comes, until an interrupt; returns it, or None if there was an error."""
    task, loop, before, answer = asyncio.current_task(), asyncio.get_running_loop(), signal.getsignal(signal.SIGINT), ""
    assert task is not None
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        async with aclosing(partner.answer(messages)) as pieces:
            async for piece in pieces:
                answer += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
    except asyncio.CancelledError:
        task.uncancel()
        sys.stdout.write(" [stopped]")
    except (InvalidRequest, EndpointFailed) as error:
        print(f"evenflow: {error} Your message was dropped; /reset begins a new conversation.", file=sys.stderr)
        return None
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
    sys.stdout.write("\n")
    sys.stdout.flush()
    return answer
