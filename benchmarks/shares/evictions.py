"""What counting costs buys when prefixes are evicted: the blocks of a trace through the pool, with costs and without.

Requests come one after the other; a prefix that was evicted is computed again, at the price of a roofline. Only traces
that name their blocks show anything (Mooncake's `hash_ids`):
    python benchmarks/shares/evictions.py TRACE.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from loads import trace
from virtual_engine import Device

from evenflow.core.blocks import BlockPool
from evenflow.core.plan import ExecutorCaps
from evenflow.core.prices import Prices
from evenflow.core.step_time import StepTimeModel
from evenflow.workload.inputs import TraceRequest

_BLOCK_SIZE = 512  # of the trace


def run(requests: Sequence[TraceRequest], num_blocks: int, device: Device, counts_costs: bool) -> tuple[float, float]:
    """The share of prompt blocks that were found, and the seconds that computing the others took."""
    pool, prices = BlockPool(num_blocks), Prices(StepTimeModel(device.costs), ExecutorCaps())
    found = looked_up = 0
    seconds = 0.0
    for request in requests:
        hashes = [block.to_bytes(8, "big") for block in request.block_ids or ()]
        if not 1 < len(hashes) <= num_blocks:
            continue
        cached = pool.find(hashes[:-1])  # one is always computed: it gives the logits
        pool.hold(cached)
        blocks = cached + pool.allocate(len(hashes) - len(cached))
        for block, block_hash in zip(blocks[len(cached) :], hashes[len(cached) :], strict=True):
            pool.publish(block, block_hash)
        length = len(hashes) * _BLOCK_SIZE
        start = len(cached) * _BLOCK_SIZE
        seconds += prices.prefill(start, length - start)
        cost = prices.prefill(0, length) / len(hashes) if counts_costs else 0.0
        pool.release(blocks, None, cost)
        found, looked_up = found + len(cached), looked_up + len(hashes)
    return found / looked_up, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--device", default="H200", help="whose roofline gives prices, with an 8B model")
    parser.add_argument("--tokens", type=int, nargs="*", default=[250_000, 500_000, 1_000_000, 2_000_000, 4_000_000])
    arguments = parser.parse_args()
    requests, device = trace(arguments.trace), Device(arguments.device)
    print(f"{len(requests)} requests\nKV cache, tokens   found: LRU, with costs   seconds: LRU, with costs")
    for tokens in arguments.tokens:
        (plain, plain_s), (priced, priced_s) = (
            run(requests, tokens // _BLOCK_SIZE, device, counts_costs) for counts_costs in (False, True)
        )
        change = f"({priced_s / plain_s - 1:+.1%})"
        print(f"{tokens:>16,}   {plain:9.1%} {priced:9.1%} {plain_s:17.1f} {priced_s:8.1f} {change}")


if __name__ == "__main__":
    main()
