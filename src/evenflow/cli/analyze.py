"""`evenflow analyze`: from datasets and traces to a decision about chunked prefill, and settings for vLLM and SGLang.

Needs neither a model nor vLLM: the report says what was estimated or assumed without them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from evenflow.advisor import sglang_flags, vllm_flags
from evenflow.advisor.analysis import PRESET_TOKENS, Analysis, preset_dataset
from evenflow.advisor.datasets import analyze_file
from evenflow.advisor.decision import Chunking
from evenflow.advisor.explanation import how_to_target, memory_pressure
from evenflow.advisor.memory import LLAMA_3_1_8B, TABLE_TOKENS, ModelShape, memory_table
from evenflow.advisor.recommendation import decide_for, find_triggers, recommend
from evenflow.advisor.report import Advice, SglangAdvice, VllmAdvice
from evenflow.advisor.token_counts import EstimatedTokens, TokenCounter
from evenflow.bench.plots import pyplot
from evenflow.cli.analyze_view import draw_lengths, print_advice
from evenflow.cli.completion import complete_model
from evenflow.cli.explain import read_log
from evenflow.cli.model_files import load_tokens, read_shape
from evenflow.cli.options import JsonTarget, file_option, option, takes_options
from evenflow.cli.output import progress, text_console, write_json
from evenflow.errors import InvalidInput
from evenflow.model.hub.cached_models import find_model
from evenflow.vllm.checking import Checked, check, write_model_config
from evenflow.vllm.launch import VLLM

_WHY_IT_STAYS_ON = (
    "chunked prefill stays on, as for every generative model: with this budget a prompt is cut only if several prompts "
    "fill a step. --no-enable-chunked-prefill exists, but since 0.12 vLLM warns that it may crash or give wrong answers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeOptions:
    """What to analyze beside the files, how to read them, and for which vLLM."""

    preset: list[str] | None = option(f"Typical input lengths: {', '.join(PRESET_TOKENS)}; repeatable.", metavar="KIND")
    field: str | None = option("Prompt field such as body.text.", metavar="NAME", show_default="the usual ones")
    limit: int | None = option("Read only this many inputs of each dataset.", min=1)
    tokenizer: str | None = option("Count tokens with this model folder, tokenizer.json or .gguf file.", metavar="PATH")
    model: str | None = option(
        "Use this model's tokenizer, memory figures and name.", metavar="MODEL", autocompletion=complete_model
    )
    concurrency: int | None = option("Requests to serve at a time.", min=1)
    log: str | None = option("A server's log, to look for memory pressure in.", metavar="PATH")
    vllm_python: str | None = option("A Python that has vLLM, to check the settings with.", metavar="PATH")
    vllm_version: str | None = option("A vLLM version, 0.10 to 0.32, that need not be installed.", metavar="X.Y")
    plot: Path | None = file_option("Plot the distribution of lengths to this file.")
    json: JsonTarget = None


@takes_options
def analyze(
    *,
    data: Annotated[
        list[Path] | None, Argument(metavar="DATA", help="JSONL, JSON, CSV or Parquet files, folders of texts, traces.")
    ] = None,
    options: AnalyzeOptions,
) -> None:
    """Show how long inputs are, and which settings suit them.

    Says whether to chunk prefill and why, what that saves in memory, and which settings to give vLLM or SGLang.
    """
    # Everything that can be wrong is checked before the data is read.
    presets = [preset_dataset(name) for name in options.preset or ()]
    if not data and not presets:
        raise InvalidInput("Got nothing to analyze: give files or folders, or --preset.")
    python, version, source = _which_vllm(options.vllm_python, options.vllm_version)
    model, concurrency = options.model, options.concurrency
    shape = LLAMA_3_1_8B if model is None else read_shape(model)
    tokens_of = options.tokenizer or model
    counter: TokenCounter = EstimatedTokens() if tokens_of is None else load_tokens(tokens_of)
    pressure = None if options.log is None else memory_pressure(read_log(options.log))
    if options.plot is not None:
        pyplot()
    with progress("Reading") as say:
        files = [analyze_file(path, counter, field=options.field, limit=options.limit, say=say) for path in data or ()]
        analysis = Analysis.of([*files, *presets])
        decision = decide_for(analysis)
        recommendation = recommend(analysis, decision, concurrency, version)
        say("Checking the settings with vLLM")
        args = vllm_flags.accepted_by(recommendation.settings, version)
        checked = Checked(version, args) if python is None else _check(python, args, model, shape)
    chunk = recommendation.max_per_prompt
    advice = Advice(
        analysis=analysis,
        decision=decision,
        triggers=find_triggers(analysis, decision, streams=concurrency, memory_pressure=pressure),
        recommendation=recommendation,
        shape=shape,
        memory=memory_table(shape, chunk, {*TABLE_TOKENS, analysis.tokens.p95, analysis.tokens.max}),
        vllm=_vllm_advice(checked, source, model, decision.decision),
        sglang=_sglang_advice(model, recommendation.settings),
    )
    if options.plot is not None:
        draw_lengths(options.plot, analysis, decision)
    print_advice(text_console(options.json), advice)
    write_json(options.json, advice.as_json())


def _check(python: str, args: vllm_flags.EngineArgs, model: str | None, shape: ModelShape) -> Checked:
    if model is not None:
        return check(python, find_model(model), args)
    with tempfile.TemporaryDirectory(prefix="evenflow-") as folder:
        write_model_config(Path(folder), shape)
        return check(python, Path(folder), args)


def _sglang_advice(model: str | None, settings: Mapping[str, Any]) -> SglangAdvice:
    unknown = sglang_flags.command_flags(settings).unknown
    return SglangAdvice(
        version=sglang_flags.NEWEST_VERSION,
        command=sglang_flags.command_line(_model_name(model), settings),
        target=how_to_target("sglang", _model_name(model)),
        notes=[f"{name} is left out: SGLang has no such setting" for name in unknown],
    )


def _model_name(model: str | None) -> str:
    return str(find_model(model)) if model == "default" else model or "MODEL"


def _vllm_advice(checked: Checked, source: str, model: str | None, chunking: Chunking) -> VllmAdvice:
    disabled = [_WHY_IT_STAYS_ON] if chunking is Chunking.DISABLED else []
    return VllmAdvice(
        version=checked.version,
        source=source,
        command=vllm_flags.command_line(_model_name(model), checked.args),
        target=how_to_target("vllm", _model_name(model)),
        engine_args=dict(checked.args),
        notes=[*disabled, *checked.args.notes.values()],
        accepted=checked.accepted,
        refusal=checked.refusal,
        scheduler=checked.scheduler,
    )


def _which_vllm(python: str | None, version: str | None) -> tuple[str | None, str, str]:
    """The interpreter to check with, if any; vLLM's version; and where both come from."""
    if python and version:
        raise InvalidInput("Give --vllm-python or --vllm-version, not both: the interpreter's vLLM has a version.")
    if python:
        return python, VLLM.version_in(python), f"checked in {python}"
    if version:
        vllm_flags.check_known(version)
        return None, version, "from a table of versions; --vllm-python checks with a vLLM"
    if found := vllm_flags.installed_version():
        return sys.executable, found, "checked in this environment"
    newest = vllm_flags.NEWEST_VERSION
    return None, newest, "from a table of versions: vLLM is not installed here; --vllm-python names one"
