"""Agents' turns beside long prompts that are not cached, in virtual time on recorded steps of vLLM on an H200.

    python benchmarks/gpu/replay_agents.py --seeds 1 9

Sixteen agents, each with a cached conversation of 16,000 tokens that grows by 500 of prompt and 60 of answer a turn,
and four prompts of 50,000 tokens that nothing is cached of, one after the other: the load of `serve_loads.py agents`.
Turns that are sent while such a prompt waits for its first token count. `default` is vLLM's budget of 8,192 tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from statistics import quantiles

from outcomes import Stream
from random_loads import Client, Load, Turn
from replay_loads import add_recording_and_seeds, device, milliseconds
from virtual_run import host_run

NUM_AGENTS, PREFIX_TOKENS, TURN_TOKENS, ANSWER_TOKENS, THINK_S = 16, 16_000, 500, 60, 0.5
NUM_MISSES, MISS_TOKENS, FIRST_MISS_S, MISS_PAUSE_S = 4, 50_000, 2.0, 1.0
_SECONDS, _MOST_TURNS, _BLOCK_SIZE = 30.0, 60, 16


def agents_load(seed: int) -> Load:
    draw = random.Random(seed)
    turns = tuple(_turn(number) for number in range(_MOST_TURNS))
    agents = tuple(Client(draw.uniform(0.0, 1.0), turns, THINK_S, repeats=True) for _ in range(NUM_AGENTS))
    misses = Client(FIRST_MISS_S, (Turn(MISS_TOKENS, 1),) * NUM_MISSES, MISS_PAUSE_S)
    return Load(seed, _SECONDS, "steady", agents, (misses,))


def _turn(number: int) -> Turn:
    before = PREFIX_TOKENS + number * (TURN_TOKENS + ANSWER_TOKENS)
    return Turn(before + TURN_TOKENS, ANSWER_TOKENS, before // _BLOCK_SIZE * _BLOCK_SIZE)


def run(recording: str, seed: int, policy: str) -> tuple[list[float], list[float]]:
    machine = device(recording)
    machine.reseed(seed)
    replay = host_run(machine, agents_load(seed), policy)
    replay.run()
    return beside_misses(replay.streams)


def beside_misses(streams: Sequence[Stream]) -> tuple[list[float], list[float]]:
    """TTFT of turns that were sent while a miss waited for its first token, and of the misses."""
    waits = [(stream.due, stream.token_times[0]) for stream in streams if stream.is_long and stream.token_times]
    beside = [
        stream.token_times[0] - stream.due
        for stream in streams
        if stream.token_times and not stream.is_long and any(sent <= stream.due <= came for sent, came in waits)
    ]
    return beside, [came - sent for sent, came in waits]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recording_and_seeds(parser, 1, 9)
    parser.add_argument("--target", type=milliseconds, default=50.0, help="milliseconds")
    options = parser.parse_args()
    for seed in range(*options.seeds):
        p99 = {}
        for name, policy in (("default", "fixed:8192"), ("target", f"target:{options.target:g}ms")):
            turns, misses = run(options.recording, seed, policy)
            cuts = quantiles(turns, n=100, method="inclusive")
            p99[name] = cuts[98]
            print(
                f"{seed:4} {name:8} {len(turns):4} turns beside a miss: TTFT p50 {cuts[49]:.3f} p99 {cuts[98]:.3f} s, "
                f"misses' TTFT {min(misses):.2f} to {max(misses):.2f} s"
            )
        print(f"     p99 of turns {p99['default'] / p99['target']:.1f} times as fast")


if __name__ == "__main__":
    main()
