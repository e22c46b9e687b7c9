"""Replicas in groups that nothing connects, simulated one after the other: of many groups, a random sample.

Where the router does not look at the replicas, each is a group of its own, and the result is that of all together.
A router that does look gets a sample of groups, and chooses among fewer replicas than the real one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from evenflow.counts import counted
from evenflow.errors import InvalidInput
from evenflow.simulation.cluster import Cluster, Setup, cell_seconds
from evenflow.simulation.load import Load, LoadRequest
from evenflow.simulation.observing import Observed
from evenflow.simulation.routing import fixed_routes

_GROUP_SIZE = 8  # of replicas whose router looks at them
_LEAST_GROUPS = 4  # of a sample: from fewer, its error would not be known


def simulate_fleet(load: Load, setup: Setup, seed: int, sample: int | None = None) -> list[Observed]:
    """One run, by groups. With a sample, only of this many replicas."""
    cell_s = cell_seconds(load)
    found, known = [], None
    for first, count, share in _groups(load, setup, seed, sample):
        of_group = replace(setup, num_replicas=count)
        cluster = Cluster(share, of_group, seed, first_replica=first, cell_s=cell_s, known=known)
        known = cluster.known
        found.append(cluster.run())
    return found


def _groups(load: Load, setup: Setup, seed: int, sample: int | None) -> Iterator[tuple[int, int, Load]]:
    """The first replica of each group, their number, and their load."""
    total = setup.num_replicas
    routes, size = fixed_routes(setup.router, load.requests, total), 1
    if routes is None:
        if sample is None:
            yield 0, total, load
            return
        size = _GROUP_SIZE
        routes = _thinned(load.requests, total // size, seed)
    chosen: Sequence[int] = range(total // size)
    if sample is not None:
        least, most = _LEAST_GROUPS * size, len(chosen) * size
        if most < least:
            raise InvalidInput(f"Got a sample of {sample} but only {counted(total, 'replica')}: simulate them all.")
        if not least <= sample <= most:
            raise InvalidInput(
                f"Got a sample of {sample} replicas but expected {least} to {most} of {total} with the router "
                f"{setup.router}."
            )
        chosen = sorted(random.Random(f"sample {seed}").sample(chosen, sample // size))
    shares: dict[int, list[LoadRequest]] = {number: [] for number in chosen}
    for one, number in zip(load.requests, routes, strict=True):
        if number in shares:
            shares[number].append(one)
    for number, requests in shares.items():
        yield number * size, size, replace(load, requests=requests)


def _thinned(requests: Sequence[LoadRequest], num_groups: int, seed: int) -> list[int]:
    """A random group for each session, or request without one."""
    rng = random.Random(f"groups {seed}")
    of_session: dict[str, int] = {}
    return [
        of_session.setdefault(one.session, rng.randrange(num_groups)) if one.session else rng.randrange(num_groups)
        for one in requests
    ]
