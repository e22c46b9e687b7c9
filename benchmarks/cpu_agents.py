"""Agents' turns beside cold prompts on evenflow's own engine, in virtual time on recorded steps of a CPU.

    python benchmarks/cpu_agents.py --seeds 1 4

Agents that each send a turn, read the answer, think, and send the next one, beside one cold prompt after the other, as
in `gpu/replay_agents.py`. What is cached of a turn costs nothing here: it is a prompt of its uncached tokens. On a CPU
a cold prompt takes up to a minute, so this shows what waits in the second half of it.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from random_loads import Client, Load, Turn
from recorded_engine import recorded_run
from replay_agents import beside_misses
from replay_loads import add_seeds, milliseconds, recording_names

from evenflow.core.policies import PolicySpec

_SECONDS, _MOST_TURNS, _NUM_MISSES, _FIRST_MISS_S, _MISS_PAUSE_S = 150.0, 80, 3, 2.0, 2.0


class Agents(NamedTuple):
    number: int
    turn_tokens: int  # uncached, on average
    answer_tokens: int
    think_s: float
    miss_tokens: int

    def load(self, seed: int) -> Load:
        draw = random.Random(seed)
        agents = tuple(
            Client(draw.uniform(0.0, 1.0), tuple(self._turns(draw)), self.think_s, repeats=True)
            for _ in range(self.number)
        )
        misses = Client(_FIRST_MISS_S, (Turn(self.miss_tokens, 1),) * _NUM_MISSES, _MISS_PAUSE_S)
        return Load(seed, _SECONDS, "steady", agents, (misses,))

    def _turns(self, draw: random.Random) -> list[Turn]:
        least, most = self.turn_tokens // 2, self.turn_tokens * 3 // 2
        return [Turn(draw.randint(least, most), self.answer_tokens) for _ in range(_MOST_TURNS)]


LOADS = (
    Agents(4, 90, 16, 4.0, 7_000),
    Agents(4, 300, 16, 4.0, 7_000),
    Agents(8, 90, 16, 2.0, 7_000),
    Agents(3, 90, 30, 1.0, 8_000),
    Agents(6, 500, 16, 4.0, 8_000),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_seeds(parser, 1, 4)
    parser.add_argument("--target", type=milliseconds, default=400.0, help="milliseconds")
    parser.add_argument("--recording", choices=recording_names(of_gpus=False), default="x86_smollm2")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # that a target cannot be kept, once for each load
    for agents in LOADS:
        print(
            f"{agents.number} agents, turns of {agents.turn_tokens} and {agents.answer_tokens} tokens after "
            f"{agents.think_s:g} s, misses of {agents.miss_tokens}"
        )
        for policy in ("fixed:2048", f"target:{options.target:g}ms"):
            turns, misses = list[float](), list[float]()
            for seed in range(*options.seeds):
                run = recorded_run(options.recording, agents.load(seed), PolicySpec.parse(policy))
                run.run()
                for found, new in zip((turns, misses), beside_misses(run.streams), strict=True):
                    found += new
            cuts = quantiles(turns, n=100, method="inclusive")
            print(
                f"  {policy:12} {len(turns):4} turns beside a miss: TTFT p50 {cuts[49]:.2f} p90 {cuts[89]:.2f} "
                f"p99 {cuts[98]:.2f} s, misses' TTFT {min(misses):.1f} to {max(misses):.1f} s"
            )


if __name__ == "__main__":
    main()
