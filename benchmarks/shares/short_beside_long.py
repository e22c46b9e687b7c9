"""Short prompts that keep coming beside long ones, all of one tenant: how long each kind waits for its first token.

    python benchmarks/shares/short_beside_long.py --seeds 1 4

In virtual time on a GPU's roofline, as in `tenants`. What passes whom is decided by `core/deadlines.py`.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from statistics import fmean

from virtual_engine import Arrival, Setup, quantile, simulate

_SHORT_OUTPUT, _LONG_OUTPUT = 50, 20  # tokens
_FIRST_LONG_S = 2.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Short prompts at random, of sizes within half of this one; long prompts at almost even intervals."""

    shorts_per_s: float
    short_tokens: int
    long_tokens: int
    long_interval_s: float

    def draw(self, rng: random.Random, seconds: float) -> tuple[list[Arrival], list[Arrival]]:
        shorts, longs, at = list[Arrival](), list[Arrival](), rng.expovariate(self.shorts_per_s)
        while at < seconds:
            shorts.append(Arrival(at, int(self.short_tokens * rng.uniform(0.5, 1.5)), _SHORT_OUTPUT))
            at += rng.expovariate(self.shorts_per_s)
        at = _FIRST_LONG_S
        while at < seconds - self.long_interval_s:
            longs.append(Arrival(at, self.long_tokens, _LONG_OUTPUT))
            at += self.long_interval_s * rng.uniform(0.8, 1.2)
        return shorts, longs


MIXES = (Mix(8, 1_500, 50_000, 5), Mix(16, 560, 50_000, 5), Mix(4, 4_000, 50_000, 5), Mix(6, 2_000, 12_000, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 4), help="the first, and the one after the last")
    parser.add_argument("--seconds", type=float, default=40, help="of virtual time, each load")
    parser.add_argument("--policy", default="target:50ms")
    options = parser.parse_args()
    print("short/s tokens   long   short TTFT p50    p90    p99   mean   long TTFT p50    max (s)")
    for mix in MIXES:
        waits: dict[bool, list[float]] = {True: [], False: []}  # of long prompts, of short ones
        for seed in range(*options.seeds):
            shorts, longs = mix.draw(random.Random(seed), options.seconds)
            outcome = simulate(shorts + longs, Setup(rule="fcfs", policy=options.policy, seed=seed), options.seconds)
            for one in outcome.served:
                waits[one.arrival.num_prompt_tokens == mix.long_tokens].append(one.ttft(options.seconds))
        short = [*(quantile(waits[False], share) for share in (0.5, 0.9, 0.99)), fmean(waits[False])]
        long = [quantile(waits[True], 0.5), max(waits[True])]
        figures = "".join(f"{value:7.3f}" for value in short) + " " * 9 + "".join(f"{value:7.2f}" for value in long)
        print(f"{mix.shorts_per_s:7g} {mix.short_tokens:6d} {mix.long_tokens:6d}         {figures}", flush=True)


if __name__ == "__main__":
    main()
