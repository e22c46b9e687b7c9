"""`evenflow generate`: streams the answer to one prompt, then prints its figures."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Annotated

import typer
from typer import Argument, FileBinaryRead, Option

from evenflow.cli.interrupts import stopping_after_step
from evenflow.cli.options import (
    ModelOptions,
    ReportOptions,
    SchedulingOptions,
    engine_facts,
    engine_settings,
    option,
    takes_options,
)
from evenflow.cli.output import loading, progress, text_console, write_json
from evenflow.core.request import SamplingParams
from evenflow.counts import counted
from evenflow.engine.llm import LLM
from evenflow.engine.outputs import RequestOutput
from evenflow.errors import EngineFailed, InvalidRequest

_DEFAULT_MAX_TOKENS = 128  # less if the context ends before


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The fields of SamplingParams that the command offers."""

    max_tokens: int | None = option("Maximum tokens to generate; must fit the context.", show_default="128")
    temperature: float = option("0 always picks the likeliest token.", default=0.0)
    top_p: float = option("Sample from the likeliest tokens with this total probability.", default=1.0)
    top_k: int = option("Sample from this many of the likeliest tokens; 0: from all.", default=0)
    min_p: float = option("Minimum probability of a token, relative to the likeliest one.", default=0.0)
    seed: int | None = option("Makes sampling repeatable.", show_default="random")
    stop: list[str] = option("Stop before this text; repeatable.", default=(), metavar="TEXT")
    ignore_eos: bool = option("Go on after the model's end-of-text token.", "--ignore-eos", default=False)


@takes_options
def generate(
    *,
    prompt: Annotated[
        str | None, Argument(help="The prompt, sent unchanged; - for standard input.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        FileBinaryRead | None,
        Option(metavar="PATH|-", help="Read the prompt from this file, or from standard input with -."),
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
    with stopping_after_step(), llm:
        ids = llm.encode_chat([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
        llm.engine.limits.check_length(len(ids), sampling.max_tokens)
        output = _stream(llm, ids, params, report)
    print(_summary(output, llm.policy), file=sys.stderr)
    figures = {
        **engine_facts(llm.config),
        "policy": llm.policy,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "ttft_s": output.ttft_s,
        "total_s": output.latency_s,
        "prefill_tokens_per_s": output.prefill_tokens_per_s,
        "decode_tokens_per_s": output.decode_tokens_per_s,
        "chunks": [chunk._asdict() for chunk in output.chunks],
    }
    write_json(report.json, figures)


def _read_prompt(prompt: str | None, prompt_file: FileBinaryRead | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("Expected a prompt or a --prompt-file, and not both.", param_hint="PROMPT")
    file = sys.stdin.buffer if prompt == "-" else prompt_file
    try:
        # Bytes of an argument that are not UTF-8 are surrogates in its text, which cannot be encoded.
        text = (file.read() if file is not None else str(prompt).encode()).decode()
    except UnicodeError as error:
        raise InvalidRequest(f"Got a prompt that is not UTF-8 text: {error}.") from error
    if not text:
        raise InvalidRequest("Got an empty prompt but expected at least one character.")
    return text


def _stream(llm: LLM, prompt: list[int], sampling: SamplingParams, report: ReportOptions) -> RequestOutput:
    stream = text_console(report.json).file
    deltas = llm.stream(prompt, sampling)
    with progress(f"Reading the prompt ({counted(len(prompt), 'token')})"):
        first = next(deltas)
    for delta in chain([first], deltas):
        stream.write(delta.text)
        stream.flush()
        output = delta.output
    if output.finish_reason == "error":
        raise EngineFailed(output.error)
    stream.write("\n")
    stream.flush()
    return output


def _summary(output: RequestOutput, policy: str) -> str:
    num_prompt_tokens, num_chunks = len(output.prompt_token_ids), len(output.chunks)
    decode = "" if output.decode_tokens_per_s is None else f", decode {output.decode_tokens_per_s:.1f} tokens/s"
    return (
        f"{counted(num_prompt_tokens, 'prompt token')} in {counted(num_chunks, 'chunk')} ({policy}), "
        f"TTFT {output.ttft_s:.2f} s, prefill {output.prefill_tokens_per_s:.0f} tokens/s; "
        f"{counted(len(output.token_ids), 'token')} in {output.latency_s:.2f} s{decode}; "
        f"finish reason: {output.finish_reason}"
    )
