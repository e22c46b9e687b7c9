"""The longest gap in a new SGLang process that nothing has warmed up: with the plug-in, and SGLang's own.

Each run is a process of its own, with empty caches of compiled kernels, and its first request belongs to the load.
Needs SGLang with CUDA; the plug-in is that of this checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from load_client import LoadRun  # noqa: E402
from named_loads import NAMES, named_load  # noqa: E402
from outcomes import outcome_of  # noqa: E402
from sglang_loads import Bench, start_engine  # noqa: E402

from evenflow import __version__  # noqa: E402

MODES = ("target", "plain")
_CACHES = (  # of kernels compiled at first use
    *("SGLANG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TVM_FFI_CACHE_DIR"),
)
_ENTRY_POINT = "[sglang.srt.plugins]\nevenflow = evenflow.sglang.plugin:load\n"
_SLOW_S = 0.1


async def measure(load_name: str, attention: str, folder: Path) -> None:
    engine, config = start_engine(folder, attention, is_tiny=False)
    run = LoadRun(
        Bench(engine, folder / "mode", config["vocab_size"]).generate, named_load(load_name), config["vocab_size"]
    )
    streams = await run.run()
    engine.shutdown()
    outcome = outcome_of(streams, [], run.seconds)
    slow = sorted(
        {round(end, 1) for stream in streams for start, end in pairwise(stream.token_times) if end - start > _SLOW_S}
    )
    print(
        f"longest gap {1000 * outcome.gap(1.0):.0f} ms, p99 {1000 * outcome.gap(0.99):.1f} ms; chats' longest TTFT "
        f"{max(outcome.chat_ttft, default=0.0):.2f} s; ends of gaps over {1000 * _SLOW_S:.0f} ms, s: {slow[:20]}",
        flush=True,
    )


def run_mode(mode: str, options: argparse.Namespace) -> None:
    """In a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metadata = folder / f"evenflow-{__version__}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: evenflow\nVersion: {__version__}\n")
        (metadata / "entry_points.txt").write_text(_ENTRY_POINT)
        search_path = [name, str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
            "EVENFLOW_CACHE": str(folder / "evenflow"),
            **({} if options.keep_kernels else {variable: str(folder / variable) for variable in _CACHES}),
        }
        environment.pop("EVENFLOW_TBT_TARGET", None)
        if mode == "target":
            environment["EVENFLOW_TBT_TARGET"] = options.target
        command = [sys.executable, __file__, options.load, "--attention", options.attention, "--in", name]
        print(f"== {mode}", flush=True)
        subprocess.run(command, env=environment, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load", nargs="?", default="32k", help=NAMES)
    parser.add_argument("--modes", default=",".join(MODES), help="target: with the plug-in; plain: SGLang's own")
    parser.add_argument("--target", default="50ms")
    parser.add_argument("--attention", default="fa3", help="SGLang's --attention-backend")
    parser.add_argument("--keep-kernels", action="store_true", help="use the kernels that were compiled before")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        asyncio.run(measure(options.load, options.attention, options.folder))
        return
    for mode in options.modes.split(","):
        run_mode(mode, options)


if __name__ == "__main__":
    main()
