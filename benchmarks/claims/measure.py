"""Tests the claims of docs/claims.md on this machine, one experiment after the other, and keeps the figures.

    python benchmarks/claims/measure.py --run cpu                    all of them, about twenty minutes on two cores
    python benchmarks/claims/measure.py --run cpu memory stalls      only these; the others keep their figures

The figures go to benchmarks/claims/runs/RUN.json; `make claims` turns all runs into the page. Where there is CUDA,
`memory`, `short_calls` and a part of `step_parts` run on it; `--recordings` takes more from vLLM's recorded steps on an
H200, and `--served` from a server that `gpu/serve_loads.py` ran.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_recordings
import torch
import torch_runs

RUNS = Path(__file__).with_name("runs")
Experiment = Callable[[], dict[str, Any] | None]


def experiments() -> dict[str, Experiment]:
    """Those that can run here: evenflow's engine needs a CPU and its own dependencies."""
    found: dict[str, Experiment] = {
        run.__name__: run for run in (torch_runs.memory, torch_runs.short_calls, torch_runs.vllm_defaults)
    }
    if torch.cuda.is_available():
        return found | {"step_parts": torch_runs.step_parts_on_cuda}
    import engine_runs

    on_the_engine = (
        engine_runs.chunk_times,
        engine_runs.speeds,
        engine_runs.stalls,
        engine_runs.step_parts,
        engine_runs.small_and_large,
        engine_runs.prefix_hits,
        engine_runs.data_parallel,
    )
    return found | {run.__name__: run for run in on_the_engine}


def machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}, float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="the name of this machine's figures")
    parser.add_argument("--recordings", action="store_true", help="only read the recorded steps of an H200")
    parser.add_argument("--served", type=Path, help="only read this file, written by gpu/serve_loads.py claims=FILE")
    available = experiments()
    parser.add_argument("experiments", nargs="*", help=", ".join(available))
    options = parser.parse_args()
    if unknown := set(options.experiments) - available.keys():
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}; there are {', '.join(available)}")
    path = RUNS / f"{options.run}.json"
    run: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"experiments": {}}
    if options.recordings:
        _take(run, gpu_recordings.experiments())
    elif options.served is not None:
        _take(run, json.loads(options.served.read_text()))
    else:
        run["machine"] = machine()
        for name in options.experiments or available:
            print(name, file=sys.stderr, flush=True)
            if (figures := available[name]()) is not None:
                _take(run, {name: figures})
                path.write_text(json.dumps(run, indent=1) + "\n")
    path.write_text(json.dumps(run, indent=1) + "\n")


def _take(run: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Figures that were not measured this time keep their values."""
    for name, figures in found.items():
        run["experiments"].setdefault(name, {}).update(figures)


if __name__ == "__main__":
    main()
