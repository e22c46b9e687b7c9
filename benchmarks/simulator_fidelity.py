"""How near the simulator comes to recorded loads that nothing was fitted on: writes it into docs/simulate.md.

    python benchmarks/simulator_fidelity.py

Each recording is split by seed: fitted on half of its loads, then the other half is simulated from what its clients
were to send, with the token budgets that the engine had at each moment, and compared with what the engine did.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "gpu")]

from cpu_random_loads import FEWER_CHATS, FEWER_TOKENS
from make_step_times import FILES, step_times_of
from random_loads import load_from_json
from recorded_device import RECORDINGS
from step_recording import RecordedLoad, read_recording

from evenflow.core.plan import ChunkReason
from evenflow.core.policies import PolicySpec, forget_policy, register_policy
from evenflow.core.policy import Policy, PolicyKind, Quotas, StepView, share_out
from evenflow.simulation.cluster import Cluster, Setup
from evenflow.simulation.load import Load, LoadRequest
from evenflow.simulation.samples import Histogram, Interval, Samples, bin_of, intervals, percentile
from evenflow.simulation.step_times import StepTimes

_NUM_RUNS = 5
_NUM_BLOCKS = 100_000  # 1.6 million tokens: no load came near its memory's end
_PERCENTS = (50, 90, 99)
_NUM_MISSES = 5
_POLICY = "recorded-budgets"
PAGE = Path(__file__).parents[1] / "docs/simulate.md"
_BEGIN, _END = "<!-- fidelity: made by benchmarks/simulator_fidelity.py -->", "<!-- end of fidelity -->"


class RecordedBudgets(Policy):
    """The engine's own rule, with the budget that it had at each moment."""

    def __init__(self, times: Sequence[float], budgets: Sequence[int]) -> None:
        super().__init__(max(budgets))
        self._times, self._budgets = times, budgets

    def plan(self, view: StepView) -> Quotas:
        budget = self._budgets[max(0, bisect_right(self._times, view.now) - 1)]
        return Quotas(True, tuple(share_out(view, budget - view.num_decodes, ChunkReason.BUDGET)))


@contextmanager
def budgets_of(load: RecordedLoad) -> Iterator[PolicySpec]:
    """A policy with the budgets of this load, while the block runs."""
    began = _began_us(load)
    known = [step for step in load.steps if step.budget]
    times, budgets = [(step.schedule_us - began) / 1e6 for step in known], [step.budget for step in known]
    kind = register_policy(PolicyKind(name=_POLICY, examples={}, build=lambda spec: RecordedBudgets(times, budgets)))
    try:
        yield PolicySpec.parse(_POLICY)
    finally:
        forget_policy(kind)


def _began_us(load: RecordedLoad) -> float:
    """The start of the load. A CPU's times do not count from it: its first step is that of the first client."""
    if "reference_us" in load.header:
        return 0.0
    clients = (*load.header["load"]["chats"], *load.header["load"]["long_prompts"])
    return load.steps[0].schedule_us - 1e6 * min(float(client["start_s"]) for client in clients)


def requests_of(recorded: RecordedLoad) -> Load:
    """What the clients send: each of them is a session."""
    load = load_from_json(recorded.header["load"])
    if "reference_us" not in recorded.header:  # the CPU's: as drawn, and sent with fewer chats and tokens
        load = load.scaled(FEWER_CHATS, FEWER_TOKENS)
    found = list[LoadRequest]()
    for number, client in enumerate((*load.chats, *load.long_prompts)):
        # No turn is answered in less than a step of 2 ms for each token.
        needed = sum(0.002 * turn.output_tokens + client.pause_s for turn in client.turns)
        rounds = 1 + int(load.seconds / needed) if client.repeats else 1
        for turn, size in enumerate(client.turns * rounds):
            found.append(
                LoadRequest(
                    id=f"{number}.{turn}",
                    prompt=((2, size.prompt_tokens),),
                    num_output_tokens=size.output_tokens,
                    arrival_s=client.start_s if turn == 0 else None,
                    delay_s=client.pause_s,
                    session=f"{number}",
                )
            )
    found.sort(key=lambda one: -1.0 if one.arrival_s is None else one.arrival_s)
    return Load(f"seed {load.seed}", found, until=load.seconds)


def measured_gaps(recorded: RecordedLoad) -> Histogram:
    """Between the tokens of every stream: streams decode in all steps."""
    found: Histogram = Counter()
    end = _began_us(recorded) + 1e6 * float(recorded.header["load"]["seconds"])
    for before, step in zip(recorded.steps, recorded.steps[1:], strict=False):
        if step.num_decodes and step.seen_us <= end:
            found[bin_of((step.seen_us - before.seen_us) / 1e6)] += step.num_decodes
    return found


@dataclass(frozen=True, slots=True)
class Compared:
    seed: int
    percent: int
    measured: float
    predicted: Interval

    @property
    def error(self) -> float:
        return (self.predicted.value or 0.0) / self.measured - 1

    @property
    def is_covered(self) -> bool:
        return (self.predicted.low or 0.0) <= self.measured <= (self.predicted.high or 0.0)


def compare(recorded: RecordedLoad, device: StepTimes) -> Iterator[Compared]:
    load = requests_of(recorded)
    with budgets_of(recorded) as policy:
        setup = Setup(step_times=device, policy=policy, num_blocks=_NUM_BLOCKS, enable_prefix_caching=False)
        runs: list[Samples] = [Cluster(load, setup, seed).run().gaps for seed in range(_NUM_RUNS)]
    figures = {str(percent): lambda gaps, percent=percent: percentile(gaps, percent) for percent in _PERCENTS}
    measured = measured_gaps(recorded)
    for name, predicted in intervals(runs, figures).items():
        if (real := percentile(measured, float(name))) is not None and predicted.value is not None:
            yield Compared(recorded.header["seed"], int(name), real, predicted)


def table(name: str, found: Sequence[Compared]) -> str:
    lines = [
        f"**{name}**, the worst misses:",
        "",
        "| load | gaps | measured | predicted, with 90% interval | error |",
        "|---|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda one: -abs(one.error))[:_NUM_MISSES]:
        value, low, high = (1000 * (v or 0.0) for v in (one.predicted.value, one.predicted.low, one.predicted.high))
        predicted = f"{value:.1f} ms ({low:.1f} to {high:.1f})"
        lines.append(
            f"| seed {one.seed} | p{one.percent} | {1000 * one.measured:.1f} ms | {predicted} | {one.error:+.0%} |"
        )
    lines += [
        "",
        "| gaps | loads | median error | 90% of errors within | within the 90% interval | its median width |",
        "|---|---|---|---|---|---|",
    ]
    for percent in _PERCENTS:
        of = [one for one in found if one.percent == percent]
        errors = sorted(abs(one.error) for one in of)
        covered = sum(one.is_covered for one in of)
        width = median(((one.predicted.high or 0) - (one.predicted.low or 0)) / one.measured for one in of)
        lines.append(
            f"| p{percent} | {len(of)} | {median(errors):.1%} | {errors[int(0.9 * len(errors))]:.1%} | "
            f"{covered} ({covered / len(of):.0%}) | {width:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=None, help="only this many of each half; then prints only")
    options = parser.parse_args()
    tables = []
    for name, (file, about) in FILES.items():
        recording = read_recording(RECORDINGS / f"{file}.jsonl.gz")
        usable = [load for load in recording.loads if not load.header["is_cold"]]
        device = step_times_of(recording, usable[::2], name, about)
        if not recording.header["capture_sizes"]:
            device = replace(device, caps=replace(device.caps, sheds_rows=False))
        others = usable[1::2][: options.loads]
        tables.append(table(name, [one for load in others for one in compare(load, device)]))
        print(tables[-1], end="\n\n", flush=True)
    if options.loads is None:
        before, rest = PAGE.read_text().split(_BEGIN)
        _, after = rest.split(_END)
        PAGE.write_text(before + _BEGIN + "\n" + "\n\n".join(tables) + "\n" + _END + after)


if __name__ == "__main__":
    main()
