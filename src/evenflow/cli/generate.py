"""`evenflow generate`: streams the answer to one prompt, then prints its figures."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from evenflow.cli.options import ModelOptions, ReportOptions, SchedulingOptions, engine_settings, takes_options
from evenflow.cli.output import loading, text_console, write_json
from evenflow.core.request import SamplingParams
from evenflow.engine.llm import LLM
from evenflow.engine.loaded_model import Prompt
from evenflow.engine.outputs import RequestOutput
from evenflow.errors import EngineFailed, InvalidRequest

_DEFAULT_MAX_TOKENS = 128  # less if the context ends before


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The fields of SamplingParams that the command offers."""

    max_tokens: Annotated[
        int | None, Option(help="Maximum tokens to generate; must fit the context.", show_default="128")
    ] = None
    temperature: Annotated[float, Option(help="0 always picks the likeliest token.")] = 0.0
    top_p: Annotated[float, Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0
    top_k: Annotated[int, Option(help="Sample from this many of the likeliest tokens; 0: from all.")] = 0
    min_p: Annotated[float, Option(help="Minimum probability of a token, relative to the likeliest one.")] = 0.0
    seed: Annotated[int | None, Option(help="Makes sampling repeatable.", show_default="random")] = None
    stop: Annotated[list[str], Option(metavar="TEXT", help="Stop before this text; may be repeated.")] = ()  # type: ignore[assignment]
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on after the model's end-of-text token.")] = False


@takes_options
def generate(
    *,
    prompt: Annotated[str | None, Argument(help="The prompt, sent unchanged.", show_default=False)] = None,
    prompt_file: Annotated[
        str | None, Option(metavar="PATH|-", help="Read the prompt from this file, or from standard input with -.")
    ] = None,
    chat: Annotated[bool, Option("--chat", help="Apply the chat template to the prompt as the user's turn.")] = False,
    sampling: SamplingOptions,
    model: ModelOptions,
    scheduling: SchedulingOptions,
    report: ReportOptions,
) -> None:
    """Answer one prompt.

    The text streams to standard output, and a line of figures goes to standard error.
    """
    text = _read_prompt(prompt, prompt_file)
    max_tokens = _DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
    params = SamplingParams(**asdict(sampling) | {"max_tokens": max_tokens})
    settings = engine_settings(model, scheduling)
    with loading(model.model):
        llm = LLM(record=report.record, **settings)
    with llm:
        ids = llm.encode_chat([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
        llm.engine.limits.check_length(len(ids), sampling.max_tokens)
        output = _stream(llm, ids, params, report)
    print(_summary(output, llm.policy), file=sys.stderr)
    figures = {
        "model": llm.config.model,
        "weights": llm.config.weights,
        "policy": llm.policy,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "ttft_s": output.ttft_s,
        "total_s": output.latency_s,
        "chunks": [chunk._asdict() for chunk in output.chunks],
    }
    write_json(report.json, figures)


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("Expected a prompt or a --prompt-file, and not both.", param_hint="PROMPT")
    try:
        if prompt is not None:
            content = prompt.encode()  # fails if the argument holds bytes that are not UTF-8
        else:
            content = sys.stdin.buffer.read() if prompt_file == "-" else Path(str(prompt_file)).read_bytes()
        text = content.decode()
    except OSError as error:
        raise InvalidRequest(f"Got --prompt-file {prompt_file!r} but it cannot be read: {error.strerror}.") from error
    except UnicodeError as error:
        raise InvalidRequest(f"Got a prompt that is not UTF-8 text: {error}.") from error
    if not text:
        raise InvalidRequest("Got an empty prompt but expected at least one character.")
    return text


def _stream(llm: LLM, prompt: Prompt, sampling: SamplingParams, report: ReportOptions) -> RequestOutput:
    stream = text_console(report.json).file
    for delta in llm.stream(prompt, sampling):
        stream.write(delta.text)
        stream.flush()
        output = delta.output
    if output.finish_reason == "error":
        raise EngineFailed(output.error)
    if stream.isatty() or stream is sys.stderr:  # the summary goes on a new line
        stream.write("\n")
        stream.flush()
    return output


def _summary(output: RequestOutput, policy: str) -> str:
    num_tokens, num_chunks = len(output.token_ids), len(output.chunks)
    total_s = output.token_times_s[-1]
    return (
        f"{len(output.prompt_token_ids)} prompt tokens in {num_chunks} chunk{'s' * (num_chunks > 1)} ({policy}), "
        f"TTFT {output.token_times_s[0]:.2f} s; {num_tokens} tokens in {total_s:.2f} s, "
        f"{num_tokens / total_s:.1f} tokens/s; finish reason: {output.finish_reason}"
    )
