"""Classes of service against first come, first served and against vLLM's priority rule, in virtual time.

    python benchmarks/shares/classes.py --seeds 1 4
    python benchmarks/shares/classes.py --trace azure2023_conv.csv --trace mooncake_conversation_4000.jsonl

At overload: how many interactive requests a second meet their targets (goodput), and how many would without the other
classes. Then with interactive requests at half the load and batch work for the rest: tokens a second of all classes,
and device seconds of useful work, because tokens of long prompts cost more. Arrivals are drawn, or those of a trace
from a random place on, closer together; a seed draws the place and who is of which class.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loads import compress, drawn_sizes, poisson, trace, with_classes
from virtual_engine import RULES, Arrival, Device, Outcome, Setup, quantile, simulate

from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.workload.inputs import TraceRequest

MIN_GOODPUT_RATIO, MIN_THROUGHPUT_RATIO = 1.5, 0.95
OVERLOAD = 1.5
ODDS = {"interactive": 0.4, "standard": 0.3, "batch": 0.3}
CLASSES = tuple(ODDS)


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_s: float
    gap_s: float


def goodput(outcome: Outcome, name: str, targets: Targets, end: float) -> float:
    """Requests a second of a class that met both targets; one that was cut off while it did counts."""
    good = sum(
        one.ttft(end) <= targets.ttft_s and one.mean_gap() <= targets.gap_s
        for one in outcome.served
        if one.arrival.service_class == name
    )
    return good / end


def load_of(
    seed: int, requests: Sequence[TraceRequest] | None, load: float, seconds: float, odds: dict[str, float]
) -> list[Arrival]:
    """Requests that ask for `load` times what the device can do."""
    rng, device = random.Random(seed), Device()
    if requests is not None:
        arrivals = compress(requests, device, load, seconds, rng.randrange(len(requests) // 2))
        return with_classes(rng, arrivals, odds)
    sizes = drawn_sizes((100, rng.choice((4_000, 16_000, 64_000))), (16, rng.choice((128, 512, 1024))))
    probe = poisson(rng, sizes, 10_000, 200.0, "")
    work_per_token = sum(map(device.seconds_alone, probe)) / (10_000 * 200.0)
    return with_classes(rng, poisson(rng, sizes, load / work_per_token, seconds, ""), odds)


def overload_row(name: str, seed: int, outcomes: dict[str, Outcome], targets: Targets, end: float) -> list[float]:
    """Prints what each rule gives; returns goodputs of interactive requests, by rule."""
    found = [goodput(outcome, "interactive", targets, end) for outcome in outcomes.values()]
    parts = []
    for (rule, outcome), good in zip(outcomes.items(), found, strict=True):
        of_class = [[one for one in outcome.served if one.arrival.service_class == name] for name in CLASSES]
        waits = [quantile([one.ttft(end) for one in served], 0.99) for served in of_class]
        done = [sum(one.is_complete for one in served) for served in of_class]
        parts.append(
            f"{rule} {good:6.2f}/s, TTFT p99 {'/'.join(f'{wait:.1f}' for wait in waits)} s, "
            f"done {'/'.join(map(str, done))}"
        )
    print(f"{name:>12} {seed:4d}  " + "   ".join(parts), flush=True)
    return found


def half_load(seed: int, requests: Sequence[TraceRequest] | None, setup: Setup, seconds: float) -> list[Outcome]:
    """By shares and first come, first served: half the load is interactive, the rest more batch work than fits."""
    urgent = load_of(seed, requests, 0.5, seconds, {"interactive": 1.0})
    patient = load_of(seed + 1_000_000, requests, 1.0, seconds, {"batch": 1.0})
    load = urgent + [replace(one, at=one.at / 2) for one in patient]
    return [simulate(load, replace(setup, rule=rule), seconds) for rule in ("shares", "fcfs")]


Load = tuple[str, int, Sequence[TraceRequest] | None]  # the name of a trace, a seed, the trace; None: drawn


def show_overload(loads: Sequence[Load], factor: float, setup: Setup, targets: Targets, seconds: float) -> None:
    rules = (*RULES, "alone")
    ratios: dict[str, list[float]] = {rule: [] for rule in rules}  # of goodputs, by shares over each
    bounds = []
    print(f"Load {factor}, policy {setup.policy}; interactive / standard / batch")
    for name, seed, requests in loads:
        load = load_of(seed, requests, factor, seconds, ODDS)
        urgent = [one for one in load if one.service_class == "interactive"]
        outcomes = {rule: simulate(load, replace(setup, rule=rule, seed=seed), seconds) for rule in RULES}
        outcomes["alone"] = simulate(urgent, replace(setup, seed=seed), seconds)
        found = dict(zip(rules, overload_row(name, seed, outcomes, targets, seconds), strict=True))
        for rule in rules:
            ratios[rule].append(found["shares"] / max(found[rule], 1e-9))
        bounds.append(len(urgent) / seconds / max(found["priority"], 1e-9))
    for rule, goal in (
        ("fcfs", f"; goal {MIN_GOODPUT_RATIO}"),
        ("priority", f"; goal {MIN_GOODPUT_RATIO}"),
        ("alone", ""),
    ):
        print(f"interactive goodput over {rule}: best {max(ratios[rule]):.2f}, worst {min(ratios[rule]):.2f}{goal}")
    print(f"if all interactive requests met their targets, over priority: {min(bounds):.2f} to {max(bounds):.2f}")


def show_half_load(loads: Sequence[Load], setup: Setup, seconds: float) -> None:
    tokens, work = [], []
    for name, seed, requests in loads:
        shares, fcfs = half_load(seed, requests, replace(setup, seed=seed), seconds)
        tokens.append(shares.num_tokens / fcfs.num_tokens)
        work.append(shares.useful_s / fcfs.useful_s)
        print(
            f"{name:>12} {seed:4d}  interactive at half load: {shares.num_tokens / seconds:.0f} tokens/s, "
            f"fcfs {fcfs.num_tokens / seconds:.0f}; useful work {shares.useful_s / seconds:.3f}, "
            f"fcfs {fcfs.useful_s / seconds:.3f}",
            flush=True,
        )
    for what, kept in (("tokens", tokens), ("useful work", work)):
        best, mean, worst = max(kept), sum(kept) / len(kept), min(kept)
        print(f"{what} over fcfs: best {best:.3f}, mean {mean:.3f}, worst {worst:.3f}; goal {MIN_THROUGHPUT_RATIO}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 3), help="the first, and the one after the last")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="instead of drawn requests; repeatable")
    parser.add_argument("--seconds", type=float, default=40, help="of virtual time")
    parser.add_argument("--load", type=float, default=OVERLOAD, help="over what the device can do")
    parser.add_argument("--policy", default="fixed:1024")
    parser.add_argument("--num-blocks", type=int, default=50_000, help="KV blocks of 16 tokens")
    parser.add_argument("--ttft", type=float, default=2.0, help="target of interactive requests, seconds")
    parser.add_argument("--gap", type=float, default=0.05, help="target of their mean gap between tokens, seconds")
    parser.add_argument("--part", choices=("overload", "half"), help="only this one of the two")
    options = parser.parse_args()
    targets = Targets(options.ttft, options.gap)
    urgent, *others = DEFAULT_CLASSES
    classes = (replace(urgent, ttft_target=targets.ttft_s), *others)
    setup = Setup(policy=options.policy, num_blocks=options.num_blocks, classes=classes)
    traces: list[tuple[str, Sequence[TraceRequest] | None]] = [
        (path.name.split("_")[0] + " " + path.stem.split("_")[1][:4], trace(path)) for path in options.trace
    ]
    loads = [(name, seed, requests) for name, requests in traces or [("drawn", None)] for seed in range(*options.seeds)]
    if options.part != "half":
        show_overload(loads, options.load, setup, targets, options.seconds)
    if options.part != "overload":
        show_half_load(loads, setup, options.seconds)


if __name__ == "__main__":
    main()
