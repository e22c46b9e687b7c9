"""Fair shares by tenant against first come, first served: in virtual time on a GPU's roofline, or on this machine.

    python benchmarks/shares/tenants.py --seeds 1 6
    python benchmarks/shares/tenants.py --engine cpu
    python benchmarks/shares/tenants.py --small azure2023_conv.csv --flood azure2023_code.csv --seconds 120 --no-backlog

A light tenant beside one that sends 100 times its tokens: its TTFT, over its TTFT alone on the same machine; and the
work that is done for both, over that of first come, first served. Then tenants with prompts of very different lengths,
who always have some waiting: Jain's index of the device time that they get for their weights (1: exactly their shares).
Lengths are drawn, or those of traces; a seed draws the load.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from cpu_engine import CpuEngine
from loads import Sizes, drawn_sizes, log_uniform, poisson, trace, traced_sizes
from virtual_engine import Arrival, Outcome, Setup, quantile, simulate

FLOOD_FACTOR = 100
MAX_TTFT_RATIO, MIN_JAIN = 1.5, 0.95
_CPU_STEP_S = 0.12
_WARM_UP_S = 5.0  # of the backlogged tenants, before their service counts
_DRAWN_SMALL = drawn_sizes((200, 8_000), (16, 256))
_DRAWN_FLOOD = drawn_sizes((1_000, 64_000), (16, 512))

Run = Callable[..., Outcome]  # `simulate`, or an engine that takes the same


@dataclass(frozen=True, slots=True)
class Flooded:
    """A light tenant's waits for first tokens: alone, beside a flood by shares, beside it first come, first served."""

    alone: list[float]
    shares: list[float]
    fcfs: list[float]
    work: float  # done by shares, over what first come, first served does

    def ratio(self, waits: list[float], share: float) -> float:
        return quantile(waits, share) / quantile(self.alone, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What an engine is given."""

    small: Sizes
    flood: Sizes
    tokens_per_s: float  # of the light tenant
    policy: str
    seeds: tuple[int, int]  # the first, and the one after the last
    longest: tuple[int, int] = (400, 60_000)  # prompts of a tenant that always has some waiting
    backlog_tokens_per_s: tuple[int, int] = (50_000, 200_000)  # of such a tenant: more than the machine can do
    outputs: tuple[int, ...] = (16, 64, 256)  # its longest output is one of these
    backlog_time: float = 1.0  # of the time that the others run


GPU = Scale(small=_DRAWN_SMALL, flood=_DRAWN_FLOOD, tokens_per_s=2_500, policy="target:25ms", seeds=(1, 4))


def cpu_scale(tokens_per_s: float) -> Scale:
    """For a machine that prefills this many tokens a second: prompts of several steps."""

    def sizes(low_s: float, high_s: float) -> Sizes:
        return drawn_sizes((round(low_s * tokens_per_s), round(high_s * tokens_per_s)), (4, 16))

    return Scale(
        small=sizes(0.4, 0.7),
        flood=sizes(0.7, 2.5),
        tokens_per_s=0.25 * tokens_per_s,
        policy=f"fixed:{max(16, round(_CPU_STEP_S * tokens_per_s))}",
        seeds=(1, 2),
        longest=(round(0.5 * tokens_per_s), round(2.5 * tokens_per_s)),
        backlog_tokens_per_s=(round(2 * tokens_per_s), round(4 * tokens_per_s)),
        outputs=(8, 16),
        backlog_time=0.5,
    )


def flooded(
    seed: int, small: Sizes, flood: Sizes, tokens_per_s: float, seconds: float, policy: str, run: Run = simulate
) -> Flooded:
    rng = random.Random(seed)
    light = poisson(rng, small, tokens_per_s, seconds, "small")
    heavy = poisson(rng, flood, FLOOD_FACTOR * tokens_per_s, seconds, "flood")

    def served(load: list[Arrival], rule: str) -> Outcome:
        return run(load, Setup(rule=rule, policy=policy, seed=seed), seconds)

    def waits(outcome: Outcome) -> list[float]:
        return [one.ttft(seconds) for one in outcome.served if one.arrival.tenant == "small"]

    alone, shares, fcfs = served(light, "shares"), served(light + heavy, "shares"), served(light + heavy, "fcfs")
    return Flooded(waits(alone), waits(shares), waits(fcfs), shares.useful_s / fcfs.useful_s)


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def backlogged(
    seed: int, seconds: float, policy: str, rule: str, run: Run = simulate, scale: Scale = GPU
) -> tuple[float, Outcome]:
    """Jain's index over tenants that always have prompts waiting, of lengths and weights that the seed draws."""
    rng = random.Random(seed)
    weights = {f"t{number}": rng.choice((1.0, 1.0, 2.0)) for number in range(rng.randint(3, 8))}
    load: list[Arrival] = []
    for tenant in weights:
        longest = log_uniform(rng, *scale.longest)
        sizes = drawn_sizes((max(100, longest // 4), longest), (8, rng.choice(scale.outputs)))
        load += poisson(rng, sizes, log_uniform(rng, *scale.backlog_tokens_per_s), seconds, tenant)
    setup = Setup(rule=rule, policy=policy, tenant_weights=weights, seed=seed)
    outcome = run(load, setup, seconds, keeps_work=True)
    served = dict.fromkeys(weights, 0.0)
    for at, tenant, work in outcome.work:
        if at > _WARM_UP_S:
            served[tenant] += work
    return jain([served[tenant] / weights[tenant] for tenant in weights]), outcome


def show_flooded(seeds: range, scale: Scale, seconds: float, run: Run) -> None:
    print(f"One tenant sends {FLOOD_FACTOR} times the tokens of the other, policy {scale.policy}")
    print(" seed   alone p50/p99      shares p50/p99 (over alone)      fcfs p50/p99 (over alone)   work")
    loads: list[Flooded] = []
    for seed in seeds:
        one = flooded(seed, scale.small, scale.flood, scale.tokens_per_s, seconds, scale.policy, run)
        parts = [
            f"{quantile(waits, 0.5):7.3f}/{quantile(waits, 0.99):.3f}"
            + (f" ({one.ratio(waits, 0.5):.2f}, {one.ratio(waits, 0.99):.2f})" if waits is not one.alone else "")
            for waits in (one.alone, one.shares, one.fcfs)
        ]
        loads.append(one)
        print(f"{seed:5d}  {'   '.join(parts)}   {one.work:.3f}   ({len(one.alone)} requests)", flush=True)
    ratios, work = [one.ratio(one.shares, 0.99) for one in loads], [one.work for one in loads]
    alone, shares = (
        list(chain.from_iterable(waits)) for waits in ((o.alone for o in loads), (o.shares for o in loads))
    )
    together = quantile(shares, 0.99) / quantile(alone, 0.99)
    print(
        f"p99 over alone: best {min(ratios):.2f}, worst {max(ratios):.2f}, "
        f"of all {len(alone)} requests {together:.2f}; goal {MAX_TTFT_RATIO}"
    )
    print(f"work over fcfs: best {max(work):.3f}, worst {min(work):.3f}")


def show_backlogged(seeds: range, scale: Scale, seconds: float, run: Run) -> None:
    print("\nTenants who always have prompts waiting: Jain's index of device time for their weights")
    found = []
    for seed in seeds:
        fair, first_come = (backlogged(seed, seconds, scale.policy, rule, run, scale)[0] for rule in ("shares", "fcfs"))
        found.append(fair)
        print(f"{seed:5d}   shares {fair:.3f}   fcfs {first_come:.3f}", flush=True)
    print(f"shares: best {max(found):.3f}, worst {min(found):.3f}; goal {MIN_JAIN}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("virtual", "cpu"), default="virtual", help="cpu: the real one, here")
    parser.add_argument("--model", default="default", help="of the real engine")
    parser.add_argument("--weights", default="float32", help="of the real engine: float32 or int4")
    parser.add_argument("--seeds", type=int, nargs=2, help="the first, and the one after the last")
    parser.add_argument("--small", type=Path, help="a trace whose lengths the light tenant has")
    parser.add_argument("--flood", type=Path, help="a trace whose lengths the other has")
    parser.add_argument("--tokens-per-s", type=float, help="of the light tenant")
    parser.add_argument("--seconds", type=float, default=30, help="of each run; of virtual time unless --engine cpu")
    parser.add_argument("--policy", help="target:25ms; with --engine cpu, fixed:N for steps of 120 ms")
    parser.add_argument("--no-backlog", action="store_true", help="only the light tenant beside the other")
    options = parser.parse_args()
    run, scale = simulate, GPU
    if options.engine == "cpu":
        run = CpuEngine(options.model, options.weights)
        speed = run.prefill_tokens_per_s(_CPU_STEP_S)
        print(f"This machine prefills {speed:.0f} tokens/s alone, in steps of {1000 * _CPU_STEP_S:.0f} ms")
        scale = cpu_scale(speed)
    given = {name: getattr(options, name) for name in ("tokens_per_s", "policy", "seeds")}
    given |= {name: traced_sizes(trace(path)) for name in ("small", "flood") if (path := getattr(options, name))}
    changes = {name: value for name, value in given.items() if value is not None}
    scale = replace(scale, **changes)
    show_flooded(range(*scale.seeds), scale, options.seconds, run)
    if not options.no_backlog:
        show_backlogged(range(*scale.seeds), scale, scale.backlog_time * options.seconds, run)


if __name__ == "__main__":
    main()
