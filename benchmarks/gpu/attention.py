"""One layer of Llama 3.1 8B on a GPU, kernel by kernel: attention by each backend, the fused operations, the linears.

    PYTHONPATH=src python benchmarks/gpu/attention.py --json kernels.json
    PYTHONPATH=src python benchmarks/gpu/attention.py attention --backends triton,deterministic
    PYTHONPATH=src python benchmarks/gpu/attention.py tuning

Times are medians of captured graphs, so that launches do not count; `plan` and `launch` are the host's. `ideal` is what
the work takes at the speeds that this GPU reaches in the same run for a plain read and a large matrix product. Runs
take several memories in turn, so that the cache holds little. Figures are in the JSON file as they come, and one that
fails leaves the others to be measured. `--tiny` tests the script on any machine, in plain torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from model_shapes import LLAMA_8B
from stages import Stages
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention.backend import AttentionBackend, StepLayout
from evenflow.model.cuda.backends import BACKEND_VARIABLE, choose_attention, choose_operations
from evenflow.model.cuda.operations import Operations
from evenflow.model.formats.hf_config import read_config
from evenflow.model.formats.typed_values import TypedValues

TINY = LLAMA_8B | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 16}
BLOCK_SIZE = 16
NUM_MEMORIES = 4  # layers' worth of memory that runs take in turn
RUNS_PER_GRAPH, NUM_REPLAYS, NUM_HOST_RUNS = 8, 7, 15
SECTIONS = ("attention", "operations", "linears")
TUNING = "tuning"  # tries other sizes of our own kernels; not among the sections that run by default
OPERATION_ROWS = (64, 512, 2048)
LINEAR_ROWS = (1, 32, 64, 128, 256, 512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of one step; chunks are (start, length)."""

    name: str
    decodes: Sequence[int] = ()
    chunks: Sequence[tuple[int, int]] = ()


CASES = (
    Case("chunk 512 at 32K", chunks=[(32_768, 512)]),
    Case("chunk 64 at 32K", chunks=[(32_768, 64)]),
    Case("chunk 2,048 at 8K", chunks=[(8_192, 2_048)]),
    Case("decode 1 x 1,124", [1_124]),
    Case("decode 64 x 1,124", [1_124] * 64),
    Case("decode 256 x 1,124", [1_124] * 256),
    Case("decode 8 x 32K", [32_768] * 8),
    Case("decode 64 x 1,124 and chunk 512 at 32K", [1_124] * 64, [(32_768, 512)]),
)
# Sizes of the Triton kernels to try, by the case that they run: changes to the ones that are used.
TUNED: dict[str, list[dict[str, int]]] = {
    "chunk 512 at 32K": [
        {},
        {"num_stages": 3},
        {"num_stages": 7},
        {"width": 128, "num_stages": 3},
        {"width": 32},
        {"rows": 64, "num_warps": 4},
    ],
    "decode 64 x 1,124": [
        {},
        {"num_stages": 2},
        {"num_stages": 4},
        {"width": 64, "num_warps": 2},
        {"width": 64},
        {"width": 32, "num_warps": 1, "num_stages": 5},
    ],
}
TINY_CASES = (Case("decode 2 x 20 and chunk 4 at 16", [20] * 2, [(16, 4)]),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`percent`: of the ideal speed. Host times are None where nothing is planned."""

    what: str
    by: str
    seconds: float
    ideal_seconds: float
    plan_seconds: float | None = None
    launch_seconds: float | None = None

    @property
    def percent(self) -> float:
        return 100 * self.ideal_seconds / self.seconds

    def line(self) -> str:
        host = ""
        if self.plan_seconds is not None and self.launch_seconds is not None:
            host = f"  plan {self.plan_seconds * 1e6:6.0f} us  launch {self.launch_seconds * 1e6:5.0f} us"
        return f"{self.what:<42} {self.by:<38} {self.seconds * 1e6:9.1f} us  {self.percent:5.1f}%{host}"


Trial = tuple[str, Callable[[], Figure]]  # its name, and what measures it


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device reaches."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, num_bytes: float, flops: float = 0.0) -> float:
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


class Bench:
    """Measures on one device."""

    def __init__(self, device: torch.device, is_tiny: bool) -> None:
        self.device, self.is_tiny = device, is_tiny
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.config: ModelConfig = read_config(TypedValues("config.json", TINY if is_tiny else LLAMA_8B), None, ())

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def seconds(self, run: Callable[[int], object]) -> float:
        """Of one run; `run` is given the number of the memory to use."""
        numbers = [index % NUM_MEMORIES for index in range(RUNS_PER_GRAPH)]
        for number in numbers[:NUM_MEMORIES]:
            run(number)
        if self.device.type != "cuda":
            return median(_host_seconds(lambda: run(0)) for _ in range(3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in numbers:
                run(number)
        return median(self._replay_seconds(graph) for _ in range(NUM_REPLAYS)) / len(numbers)

    def _replay_seconds(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def host_seconds(self, run: Callable[[], object]) -> float:
        """On the host alone: what it launches is waited for between runs."""
        times = []
        for _ in range(NUM_HOST_RUNS):
            times.append(_host_seconds(run))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        return median(times)

    def ceilings(self) -> Ceilings:
        size, width = (1 << 16, 64) if self.is_tiny else (1 << 31, 8192)
        source = [torch.zeros(size // 4, device=self.device) for _ in range(2)]
        read = self.seconds(lambda number: source[number % 2].sum())
        left, right = self.random(width, width), self.random(width, width)
        product = self.seconds(lambda number: left @ right)
        return Ceilings(size / read, 2 * width**3 / product)


def _host_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def layout_of(case: Case, device: torch.device) -> tuple[StepLayout, int]:
    """With blocks in random order, and their number."""
    contexts = [*case.decodes, *(start + length for start, length in case.chunks)]
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    for row, blocks in enumerate(torch.split_with_sizes(order, counts)):
        tables[row, : len(blocks)] = blocks
    starts, lengths = [start for start, _ in case.chunks], [length for _, length in case.chunks]
    context_tensor = torch.tensor(contexts, dtype=torch.int32, device=device)
    return StepLayout(case.decodes, starts, lengths, tables.to(device), context_tensor, BLOCK_SIZE), len(order)


def attention_figures(bench: Bench, ceilings: Ceilings, backends: Sequence[str]) -> Iterator[Trial]:
    made = {name: cache(partial(backend_named, name, bench)) for name in backends}
    for case in TINY_CASES if bench.is_tiny else CASES:
        for name, backend in made.items():
            yield f"{case.name}, {name}", partial(_case_figure, bench, ceilings, name, backend, case)


def _case_figure(
    bench: Bench, ceilings: Ceilings, name: str, made: Callable[[], AttentionBackend], case: Case
) -> Figure:
    backend = made()
    config = bench.config
    layout, num_blocks = layout_of(case, bench.device)
    memories = bench.random(NUM_MEMORIES, num_blocks, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    queries = bench.random(layout.num_rows, config.num_heads, config.head_dim)
    token_bytes = 2 * config.num_kv_heads * config.head_dim * bench.dtype.itemsize
    num_scores = sum(length * start + length * (length + 1) // 2 for start, length in case.chunks)
    chunk_bytes = token_bytes * sum(start + length for start, length in case.chunks)
    ideal = ceilings.seconds(token_bytes * sum(case.decodes))
    ideal += ceilings.seconds(chunk_bytes, 4 * config.num_heads * config.head_dim * num_scores)
    plan = bench.host_seconds(partial(backend.plan, layout))

    def run(number: int) -> Tensor:
        return backend.run(number, queries, memories[number])

    return Figure(
        what=case.name,
        by=name,
        seconds=bench.seconds(run),
        ideal_seconds=ideal,
        plan_seconds=plan,
        launch_seconds=bench.host_seconds(partial(run, 0)),
    )


def tuning_figures(bench: Bench, ceilings: Ceilings) -> Iterator[Trial]:
    """A size that does not fit the GPU fails alone."""
    for case in (case for case in CASES if case.name in TUNED):
        for changes in TUNED[case.name]:
            sizes = " ".join(f"{name} {value}" for name, value in changes.items()) or "as it is"
            made = partial(_tuned, bench, case, changes)
            yield f"{case.name}, {sizes}", partial(_case_figure, bench, ceilings, sizes, made, case)


def _tuned(bench: Bench, case: Case, changes: Mapping[str, int]) -> AttentionBackend:
    backend: Any = backend_named("triton", bench)
    kernel = backend._decodes if case.decodes else backend
    kernel._sizes = kernel._sizes._replace(**changes)
    return cast(AttentionBackend, backend)


def backend_named(name: str, bench: Bench) -> AttentionBackend:
    """`deterministic` is the fastest that is."""
    if name == "deterministic":
        os.environ.pop(BACKEND_VARIABLE, None)
    else:
        os.environ[BACKEND_VARIABLE] = name
    return choose_attention(bench.config, bench.dtype, bench.device, name == "deterministic")


def operation_figures(bench: Bench, ceilings: Ceilings) -> Iterator[Trial]:
    operations = choose_operations(bench.device)
    for num_rows in (2,) if bench.is_tiny else OPERATION_ROWS:
        for what, (num_values, run) in operation_runs(bench, operations, num_rows).items():
            ideal = ceilings.seconds(num_values * num_rows * bench.dtype.itemsize)
            name = f"{what}, {num_rows:,} rows"
            yield name, partial(_figure, bench, name, "fused", run, ideal)


def _figure(bench: Bench, what: str, by: str, run: Callable[[int], object], ideal: float) -> Figure:
    return Figure(what=what, by=by, seconds=bench.seconds(run), ideal_seconds=ideal)


def operation_runs(
    bench: Bench, operations: Operations, num_rows: int
) -> dict[str, tuple[int, Callable[[int], Tensor]]]:
    """By name: the values of a row that are read or written, and the run."""
    config = bench.config
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    weight = bench.random(config.hidden_size)
    residuals = bench.random(NUM_MEMORIES, num_rows, config.hidden_size)
    updates = bench.random(NUM_MEMORIES, num_rows, config.hidden_size)
    packed = bench.random(NUM_MEMORIES, num_rows, width)
    gate_up = bench.random(NUM_MEMORIES, num_rows, 2 * config.intermediate_size)
    kv = bench.random(num_rows // BLOCK_SIZE + 1, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    slots = torch.arange(num_rows, dtype=torch.int32, device=bench.device)
    angles = torch.rand(num_rows, config.head_dim // 2, device=bench.device)
    rotation = angles.cos(), angles.sin()

    def rope(number: int) -> Tensor:
        return operations.rope_and_write_kv(packed[number], config.num_heads, kv, slots, rotation, None, 1e-5)

    return {
        "add_rms_norm": (
            4 * config.hidden_size,
            lambda number: operations.add_rms_norm(residuals[number], updates[number], weight, 1e-5),
        ),
        "rope_and_write_kv": (2 * width, rope),
        "silu_mul": (3 * config.intermediate_size, lambda number: operations.silu_mul(gate_up[number])),
    }


def linear_figures(bench: Bench, ceilings: Ceilings) -> Iterator[Trial]:
    """The deterministic product beside the library's."""
    config = bench.config
    linears: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"library": F.linear}
    if bench.device.type == "cuda":
        from evenflow.model.cuda import deterministic

        linears["deterministic"] = deterministic.linear
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = {
        "qkv": (width, config.hidden_size),
        "output": (config.hidden_size, config.num_heads * config.head_dim),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }
    for what, (outputs, inputs) in list(shapes.items())[: 1 if bench.is_tiny else None]:
        weights = bench.random(NUM_MEMORIES, outputs, inputs)
        for num_rows in (2,) if bench.is_tiny else LINEAR_ROWS:
            rows = bench.random(num_rows, inputs)
            num_bytes = (outputs * inputs + num_rows * (inputs + outputs)) * bench.dtype.itemsize
            ideal = ceilings.seconds(num_bytes, 2 * num_rows * inputs * outputs)
            for name, linear in linears.items():
                run = partial(_multiply, linear, rows, weights)
                yield (
                    f"{what}, {num_rows:,} rows, {name}",
                    partial(_figure, bench, f"{what}, {num_rows:,} rows", name, run, ideal),
                )


def _multiply(linear: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weights: Tensor, number: int) -> Tensor:
    return linear(rows, weights[number])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections",
        nargs="*",
        default=[],
        metavar="SECTION",
        help=f"of {', '.join(SECTIONS)} (all by default), {TUNING}",
    )
    parser.add_argument("--backends", help="of flashinfer, triton, deterministic; default: all three")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=None, help="begin nothing after this time")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - {*SECTIONS, TUNING}:
        parser.error(f"got {', '.join(sorted(unknown))} but expected sections of {', '.join((*SECTIONS, TUNING))}")
    if arguments.tiny and TUNING in arguments.sections:
        parser.error(f"{TUNING} needs a GPU")
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --tiny runs without one")
    bench = Bench(torch.device("cpu" if arguments.tiny else "cuda"), arguments.tiny)
    backends = (arguments.backends or ("reference" if arguments.tiny else "flashinfer,triton,deterministic")).split(",")
    stages = Stages(arguments.json, arguments.seconds)
    with torch.inference_mode():
        ceilings = bench.ceilings()
        print(
            f"read {ceilings.bytes_per_second / 1e12:.2f} TB/s, product {ceilings.flops_per_second / 1e12:.0f} TFLOP/s",
            flush=True,
        )
        stages.put("ceilings", asdict(ceilings))
        parts = {
            "attention": lambda: attention_figures(bench, ceilings, backends),
            "operations": lambda: operation_figures(bench, ceilings),
            "linears": lambda: linear_figures(bench, ceilings),
            TUNING: lambda: tuning_figures(bench, ceilings),
        }
        for section in arguments.sections or SECTIONS:
            with stages.stage(section):
                for name, trial in parts[section]():
                    with stages.stage(name):
                        stages.check_time()
                        figure = trial()
                        stages.add("figures", {**asdict(figure), "percent": figure.percent}, figure.line())
    sys.exit(stages.exit_status())


if __name__ == "__main__":
    main()
