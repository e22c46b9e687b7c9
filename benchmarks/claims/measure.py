"""Tests the claims of docs/claims.md on this machine, one experiment after the other, and keeps the figures.

    python benchmarks/claims/measure.py --run cpu                    all of them, about twenty minutes on two cores
    python benchmarks/claims/measure.py --run cpu memory stalls      only these; the others keep their figures

The figures go to benchmarks/claims/runs/RUN.json; `make claims` turns all runs into the page. Where there is CUDA,
`memory` and `short_calls` run on it; `--recordings` takes the rest from vLLM's recorded steps on an H200.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_runs
import gpu_recordings
import torch
import torch_runs

RUNS = Path(__file__).with_name("runs")
EXPERIMENTS: dict[str, Callable[[], dict[str, Any] | None]] = {
    run.__name__: run
    for run in (
        torch_runs.memory,
        torch_runs.short_calls,
        torch_runs.vllm_defaults,
        engine_runs.chunk_times,
        engine_runs.speeds,
        engine_runs.stalls,
        engine_runs.step_parts,
        engine_runs.small_and_large,
        engine_runs.prefix_hits,
        engine_runs.data_parallel,
    )
}


def machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}, float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="the name of this machine's figures")
    parser.add_argument("--recordings", action="store_true", help="only read the recorded steps of an H200")
    parser.add_argument("experiments", nargs="*", help=", ".join(EXPERIMENTS))
    options = parser.parse_args()
    if unknown := set(options.experiments) - EXPERIMENTS.keys():
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    path = RUNS / f"{options.run}.json"
    run: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"experiments": {}}
    if options.recordings:
        run["experiments"] |= gpu_recordings.experiments()
    else:
        run["machine"] = machine()
        for name in options.experiments or EXPERIMENTS:
            print(name, file=sys.stderr, flush=True)
            if (figures := EXPERIMENTS[name]()) is not None:
                run["experiments"][name] = figures
                path.write_text(json.dumps(run, indent=1) + "\n")
    path.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
