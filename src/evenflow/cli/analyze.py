"""`evenflow analyze`: from datasets and traces to a decision about chunks, and settings that a vLLM takes.

Needs neither a model nor vLLM: what is estimated or assumed without them is said.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from evenflow.advisor.analysis import Analysis, DatasetAnalysis, DatasetTally
from evenflow.advisor.decision import Chunking
from evenflow.advisor.explanation import memory_pressure
from evenflow.advisor.memory import LLAMA_3_1_8B, TABLE_TOKENS, ModelShape, memory_table
from evenflow.advisor.presets import PRESET_TOKENS, preset_dataset
from evenflow.advisor.recommendation import Recommendation, decide_for, find_triggers, recommend
from evenflow.advisor.report import Advice, VllmAdvice
from evenflow.advisor.tokens import EstimatedTokens, TokenCounter
from evenflow.cli.analyze_view import draw_lengths, print_advice
from evenflow.cli.model_files import find_model, load_tokens, read_shape
from evenflow.cli.options import JsonTarget, parse_new_file, takes_options
from evenflow.cli.output import progress, table_console, write_json
from evenflow.errors import InvalidInput
from evenflow.vllm import checking
from evenflow.vllm.flags import accepted_by, command_line, installed_version, newest_version
from evenflow.vllm.logs import read_facts
from evenflow.workload.inputs import Input
from evenflow.workload.reading import ReadTally, read_inputs

_SAY_EVERY = 1000  # inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Which vLLM the settings are for; by default the one in this environment."""

    vllm_python: Annotated[
        str | None, Option(metavar="PATH", help="A Python that has vLLM: it is asked whether it takes the settings.")
    ] = None
    vllm_version: Annotated[
        str | None, Option(metavar="X.Y", help="A vLLM version, 0.10 to 0.32, that is not installed here.")
    ] = None


@takes_options
def analyze(
    *,
    data: Annotated[
        list[Path] | None,
        Argument(metavar="DATA...", help="JSONL, JSON, CSV, Parquet, a folder of texts, a trace; each is a dataset."),
    ] = None,
    preset: Annotated[
        list[str] | None, Option(metavar="KIND", help=f"Inputs typical of {', '.join(PRESET_TOKENS)}; may be repeated.")
    ] = None,
    field: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="The field that holds the prompt; dots lead inwards.",
            show_default="prompt, text, input, question or messages",
        ),
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Read only the first so many inputs of each dataset.")] = None,
    tokenizer: Annotated[
        str | None, Option(metavar="PATH", help="Count tokens by it: a model folder, tokenizer.json or .gguf file.")
    ] = None,
    model: Annotated[
        str | None,
        Option(metavar="NAME|PATH", help="Its tokenizer, its memory, its name in the command line."),
    ] = None,
    concurrency: Annotated[int | None, Option(min=1, help="Requests to be served at a time.")] = None,
    log: Annotated[Path | None, Option(metavar="PATH", help="A server's log, to look for memory pressure in.")] = None,
    vllm: VllmOptions,
    plot: Annotated[
        Path | None, Option(parser=parse_new_file, metavar="PATH", help="Draw the lengths' distribution there.")
    ] = None,
    json: JsonTarget = None,
) -> None:
    """How long inputs are, whether to chunk their prefill, and settings for vLLM."""
    if not data and not preset:
        raise InvalidInput("Give one or more files or folders to analyze, or --preset.")
    shape = LLAMA_3_1_8B if model is None else read_shape(model)
    counter = load_tokens(tokenizer or str(model)) if tokenizer or model else EstimatedTokens()
    pressure = None if log is None else memory_pressure(read_facts(log))
    with progress("Reading") as say:
        datasets = [_analyze_file(path, field, limit, counter, say) for path in data or ()]
        analysis = Analysis.of([*datasets, *map(preset_dataset, preset or ())])
        decision = decide_for(analysis)
        recommendation = recommend(analysis, decision, concurrency)
        say("Asking vLLM")
        vllm_advice = _vllm_advice(recommendation, decision.decision, model, shape, vllm)
    lengths = {*TABLE_TOKENS, analysis.tokens.p95, analysis.tokens.max}
    advice = Advice(
        analysis=analysis,
        decision=decision,
        triggers=find_triggers(analysis, decision, streams=concurrency, memory_pressure=pressure),
        recommendation=recommendation,
        shape=shape,
        is_shape_default=model is None,
        memory=memory_table(shape, recommendation.chunk, lengths),
        vllm=vllm_advice,
    )
    if plot is not None:
        draw_lengths(plot, analysis, decision)
    print_advice(table_console(json), advice)
    write_json(json, advice.as_json())


def _analyze_file(
    path: Path, field: str | None, limit: int | None, counter: TokenCounter, say: Callable[[str], None]
) -> DatasetAnalysis:
    tally, read = DatasetTally(path.name, counter), ReadTally()
    inputs = read_inputs(path, field, read)
    for item in _reported(islice(inputs, limit), path, read, say):
        tally.add(item)
    if not tally.count:
        why = "; ".join(f"{count:,} x {what}" for what, count in read.unusable.most_common(3)) or "it is empty"
        raise InvalidInput(f"Got {str(path)!r} but nothing in it can be used: {why}. --field names the prompt's field.")
    is_cut_short = limit == tally.count and next(inputs, None) is not None
    return tally.analysis(dict(read.unusable), is_cut_short=is_cut_short)


def _reported(inputs: Iterator[Input], path: Path, read: ReadTally, say: Callable[[str], None]) -> Iterator[Input]:
    for number, item in enumerate(inputs, 1):
        yield item
        if number % _SAY_EVERY == 0:
            share = f", {read.num_bytes_read / read.num_bytes:.0%}" if read.num_bytes_read else ""
            say(f"Reading {path.name}: {number:,} inputs{share}")


def _vllm_advice(
    recommendation: Recommendation, chunking: Chunking, model: str | None, shape: ModelShape, options: VllmOptions
) -> VllmAdvice:
    notes = []
    if chunking is Chunking.DISABLED:
        notes.append(
            "chunked prefill is left on, as it is for every generative model: with this budget a prompt is cut only "
            "where several fill a step. "
            "--no-enable-chunked-prefill exists, but vLLM (0.12 and newer) warns that it may crash or answer wrongly"
        )
    python, version, source = _which_vllm(options)
    args = accepted_by(recommendation.settings, version)
    name = str(find_model(model)) if model == "default" else model or "MODEL"
    if python is None:
        command = command_line(name, args)
        return VllmAdvice(version, source, command, dict(args), [*notes, *args.notes.values()])
    with tempfile.TemporaryDirectory(prefix="evenflow-") as folder:
        local = Path(folder) if model is None else find_model(model)
        if model is None:
            checking.write_model_config(Path(folder), shape)
        checked = checking.check(python, local, args)
    return VllmAdvice(
        version=checked.version,
        source=source,
        command=command_line(name, checked.args),
        engine_args=dict(checked.args),
        notes=[*notes, *checked.args.notes.values()],
        accepted=checked.accepted,
        refusal=checked.refusal,
        scheduler=checked.scheduler or None,
    )


def _which_vllm(options: VllmOptions) -> tuple[str | None, str, str]:
    """The interpreter to ask, if any; the version; and where both come from."""
    if options.vllm_python and options.vllm_version:
        raise InvalidInput("Give --vllm-python or --vllm-version, not both: the interpreter's vLLM has a version.")
    if options.vllm_python:
        return options.vllm_python, checking.version_in(options.vllm_python), f"asked in {options.vllm_python}"
    if options.vllm_version:
        return None, options.vllm_version, "from a table of versions, not asked: --vllm-python names one that can be"
    if found := installed_version():
        return sys.executable, found, "asked in this environment"
    return (
        None,
        newest_version(),
        "from a table of versions: none is installed here, --vllm-python names one that is",
    )
