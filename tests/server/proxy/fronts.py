"""evenflow's front over a stand-in for a host engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from evenflow.core.policies import PolicySpec
from evenflow.hosts.launch import HostLaunch
from evenflow.server.gate import ServerLimits
from evenflow.server.serving import Server, ServerSettings, bind, serve_host
from evenflow.vllm.launch import VllmLaunch
from tests.server.serving import RunningServer

MODEL = "a-model"


@contextmanager
def front(
    python: str,
    flags: list[str] | None = None,
    wait: bool = True,
    kind: type[HostLaunch] = VllmLaunch,
    warms_up: bool = False,
    policy: str | None = "target:50ms",
    **settings: Any,
) -> Iterator[RunningServer]:
    """The front over a stand-in, in a thread of this process until the context ends."""
    listener = bind("127.0.0.1", 0)
    found: list[Server] = []
    limits = ServerLimits(**settings.pop("limits", {}))
    chosen = ServerSettings(**{"model_names": (MODEL,), "drain_s": 0.0, "limits": limits, **settings})
    spec = None if policy is None else PolicySpec.parse(policy)
    obstacle = kind.find_obstacle(spec, {})
    started = kind(python=python, model=MODEL, policy=spec, why_no_target=obstacle, flags=flags or [], warm_up=warms_up)

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_host(chosen, listener, started, 8, found.append))

    thread = threading.Thread(target=run)
    thread.start()
    end = time.monotonic() + 20
    while not (found and found[0].started):
        assert time.monotonic() < end, "the front did not start"
        time.sleep(0.005)
    running = RunningServer(found[0], listener.getsockname()[1])
    try:
        if wait:
            running.until(lambda: running.get("/ready").status_code == 200)
        yield running
    finally:
        running.stop(thread, listener)


def seen(server: RunningServer, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = server.post("/seen", {}, **options).json()
    return found


def figure(server: RunningServer, name: str) -> float:
    families = text_string_to_metric_families(server.get("/metrics").text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
