"""Fair shares by tenant against first come, first served, in virtual time on a GPU's roofline.

    python benchmarks/shares/tenants.py --seeds 1 6
    python benchmarks/shares/tenants.py --small azure2023_conv.csv --flood azure2023_code.csv

A light tenant beside one that sends 100 times its tokens: its TTFT, over its TTFT alone on the same machine. Then
tenants with prompts of very different lengths, who always have some waiting: Jain's index of the device time that they
get for their weights (1: exactly their shares). Lengths are drawn, or those of traces; a seed draws the load.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from loads import Sizes, drawn_sizes, log_uniform, poisson, trace, traced_sizes
from virtual_engine import Arrival, Outcome, Setup, quantile, simulate

FLOOD_FACTOR = 100
MAX_TTFT_RATIO, MIN_JAIN = 1.5, 0.95
_WARM_UP_S = 5.0  # of the backlogged tenants, before their service counts
_DRAWN_SMALL = drawn_sizes((200, 8_000), (16, 256))
_DRAWN_FLOOD = drawn_sizes((1_000, 64_000), (16, 512))


@dataclass(frozen=True, slots=True)
class Flooded:
    """A light tenant's waits for first tokens: alone, beside a flood by shares, beside it first come, first served."""

    alone: list[float]
    shares: list[float]
    fcfs: list[float]

    def ratio(self, waits: list[float], share: float) -> float:
        return quantile(waits, share) / quantile(self.alone, share)


def flooded(seed: int, small: Sizes, flood: Sizes, tokens_per_s: float, seconds: float, policy: str) -> Flooded:
    rng = random.Random(seed)
    light = poisson(rng, small, tokens_per_s, seconds, "small")
    heavy = poisson(rng, flood, FLOOD_FACTOR * tokens_per_s, seconds, "flood")

    def waits(load: list[Arrival], rule: str) -> list[float]:
        outcome = simulate(load, Setup(rule=rule, policy=policy, seed=seed), seconds)
        return [one.ttft(seconds) for one in outcome.served if one.arrival.tenant == "small"]

    return Flooded(waits(light, "shares"), waits(light + heavy, "shares"), waits(light + heavy, "fcfs"))


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def backlogged(seed: int, seconds: float, policy: str, rule: str) -> tuple[float, Outcome]:
    """Jain's index over tenants that always have prompts waiting, of lengths and weights that the seed draws."""
    rng = random.Random(seed)
    weights = {f"t{number}": rng.choice((1.0, 1.0, 2.0)) for number in range(rng.randint(3, 8))}
    load: list[Arrival] = []
    for tenant in weights:
        longest = log_uniform(rng, 400, 60_000)
        sizes = drawn_sizes((max(100, longest // 4), longest), (8, rng.choice((16, 64, 256))))
        load += poisson(rng, sizes, log_uniform(rng, 50_000, 200_000), seconds, tenant)  # more than the machine can do
    setup = Setup(rule=rule, policy=policy, tenant_weights=weights, seed=seed)
    outcome = simulate(load, setup, seconds, keeps_work=True)
    served = dict.fromkeys(weights, 0.0)
    for at, tenant, work in outcome.work:
        if at > _WARM_UP_S:
            served[tenant] += work
    return jain([served[tenant] / weights[tenant] for tenant in weights]), outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 4), help="the first, and the one after the last")
    parser.add_argument("--small", type=Path, help="a trace whose lengths the light tenant has")
    parser.add_argument("--flood", type=Path, help="a trace whose lengths the other has")
    parser.add_argument("--tokens-per-s", type=float, default=2_500, help="of the light tenant")
    parser.add_argument("--seconds", type=float, default=30, help="of virtual time")
    parser.add_argument("--policy", default="target:25")
    options = parser.parse_args()
    small = traced_sizes(trace(options.small)) if options.small else _DRAWN_SMALL
    flood = traced_sizes(trace(options.flood)) if options.flood else _DRAWN_FLOOD
    print(f"One tenant sends {FLOOD_FACTOR} times the tokens of the other, policy {options.policy}")
    print(" seed   alone p50/p99      shares p50/p99 (over alone)      fcfs p50/p99 (over alone)   seconds")
    ratios: list[float] = []
    for seed in range(*options.seeds):
        one = flooded(seed, small, flood, options.tokens_per_s, options.seconds, options.policy)
        parts = [
            f"{quantile(waits, 0.5):7.3f}/{quantile(waits, 0.99):.3f}"
            + (f" ({one.ratio(waits, 0.5):.2f}, {one.ratio(waits, 0.99):.2f})" if waits is not one.alone else "")
            for waits in (one.alone, one.shares, one.fcfs)
        ]
        ratios.append(one.ratio(one.shares, 0.99))
        print(f"{seed:5d}  " + "   ".join(parts), flush=True)
    print(f"p99 over alone: best {min(ratios):.2f}, worst {max(ratios):.2f}; goal {MAX_TTFT_RATIO}")
    print("\nTenants who always have prompts waiting: Jain's index of device time for their weights")
    found = [
        tuple(backlogged(seed, options.seconds, options.policy, rule)[0] for rule in ("shares", "fcfs"))
        for seed in range(*options.seeds)
    ]
    for seed, (fair, first_come) in zip(range(*options.seeds), found, strict=True):
        print(f"{seed:5d}   shares {fair:.3f}   fcfs {first_come:.3f}")
    print(f"shares: best {max(found)[0]:.3f}, worst {min(found)[0]:.3f}; goal {MIN_JAIN}")


if __name__ == "__main__":
    main()
