"""How fast `evenflow simulate` is: steps a second on one core, and what an hour of a trace and a million requests take.

    python benchmarks/simulator_speed.py [--trace azure2023_conv.csv] [--requests 1000] [--million]

Device: vLLM on an H200. Each load is also planned step by step, which gives the same figures (a test compares them).
A million requests on 64 replicas are simulated one replica after the other; without --million, 4 of the 64.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

from evenflow.core.policies import PolicySpec
from evenflow.simulation.cluster import Cluster, Setup
from evenflow.simulation.fleet import simulate_fleet
from evenflow.simulation.load import Load, LoadSettings, Synthetic, read_load
from evenflow.simulation.observing import Observed
from evenflow.simulation.rules import other_rules
from evenflow.simulation.step_times import find_step_times

_DEVICE = "h200-llama-8b-vllm"
_NUM_BLOCKS = 44_000  # 700,000 tokens
_REPLICAS, _SAMPLE = 64, 4  # a sample has at least 4


def drawn(name: str, num_requests: int, rate: float, prompt: float, answer: float, spread: float = 0.8) -> Load:
    def lengths(rng: random.Random) -> tuple[int, int]:
        one, other = (max(1, round(median * math.exp(rng.gauss(0.0, spread)))) for median in (prompt, answer))
        return one, other

    return Synthetic(name=name, num_requests=num_requests, rate=rate, burstiness=1.0, lengths=lengths).draw(0)


def timed(run: Callable[[], Observed]) -> tuple[Observed, float]:
    began = time.process_time()
    found = run()
    return found, time.process_time() - began


def compare(load: Load, policy: str) -> None:
    """Both ways of simulating a load, in turn."""
    rates = []
    for is_fast in (True, False):
        cluster = Cluster(load, setup_of(policy), 0, fast_forward=is_fast)
        found, seconds = timed(cluster.run)
        rates.append(found.num_steps / seconds)
    print(
        f"{load.name}, {policy}: {found.num_steps:,} steps of {found.num_tokens / found.num_steps:.0f} tokens, "
        f"{found.num_steps / len(load.requests):.0f} a request; {rates[0]:,.0f} steps/s, "
        f"{rates[0] / rates[1]:.1f} times those planned one by one ({rates[1]:,.0f}/s)",
        flush=True,
    )


def setup_of(policy: str, num_replicas: int = 1) -> Setup:
    device = find_step_times(_DEVICE)
    assert device is not None
    return Setup(step_times=device, policy=PolicySpec.parse(policy), num_blocks=_NUM_BLOCKS, num_replicas=num_replicas)


def million(num_requests: int, sample: int | None) -> None:
    load = drawn("a million", num_requests, 5.5 * _REPLICAS, 1000, 130)
    found, seconds = timed(lambda: Observed.together(simulate_fleet(load, setup_of("vllm:8192", _REPLICAS), 0, sample)))
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{found.num_done:,} of {num_requests:,} requests on {found.num_replicas} of {_REPLICAS} replicas: "
        f"{seconds:.0f} s, {seconds / found.num_done * num_requests:.0f} s for all; {gib:.1f} GiB at most",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="an hour of Azure's conversation trace")
    parser.add_argument("--requests", type=int, default=600, help="of each compared load")
    parser.add_argument("--million", action="store_true", help="all 64 replicas")
    options = parser.parse_args()
    with other_rules():
        for policy in ("vllm:8192", "target:50ms"):
            compare(drawn("64 streams with long answers", options.requests // 6, 0.9, 300, 6000, 0.2), policy)
            compare(drawn("64 streams with ordinary answers", options.requests, 20.0, 600, 200), policy)
            if options.trace is not None:
                compare(read_load(options.trace, LoadSettings(limit=options.requests)), policy)
        if options.trace is not None:
            hour = read_load(options.trace, LoadSettings())
            found, seconds = timed(Cluster(hour, setup_of("vllm:8192"), 0).run)
            print(f"{found.seconds / 60:.0f} minutes of the trace: {found.num_steps:,} steps in {seconds:.1f} s")
        million(1_000_000, None if options.million else _SAMPLE)


if __name__ == "__main__":
    main()
