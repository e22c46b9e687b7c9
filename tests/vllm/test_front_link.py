"""What the plug-in and evenflow's front say to each other, over vLLM's real scheduler in virtual time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.driving import Driver, make_request, make_scheduler

import msgspec  # isort: skip

from evenflow.core.plan import ChunkReason  # isort: skip
from evenflow.core.policies import PolicySpec  # isort: skip
from evenflow.framing import FrameReader  # isort: skip
from evenflow.hosts import reporter  # isort: skip
from evenflow.hosts.messages import HostStep  # isort: skip
from evenflow.hosts.policy_file import PolicyFile  # isort: skip
from evenflow.hosts.settings import SOCKET_VARIABLE, TARGET_FILE_VARIABLE  # isort: skip


class Listener:
    """Whoever listens to one scheduler's steps, as slowly as the test likes."""

    def __init__(self, path: Path) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._connection: socket.socket | None = None
        self._frames = FrameReader()

    def close(self) -> None:
        self._server.close()
        if self._connection is not None:
            self._connection.close()

    def read(self) -> Iterator[HostStep]:
        """All that was told and not read yet."""
        if self._connection is None:
            self._connection, _ = self._server.accept()
            self._connection.setblocking(False)
        with suppress(BlockingIOError):
            while data := self._connection.recv(1 << 20):
                for content in self._frames.feed(data):
                    yield msgspec.msgpack.decode(content, type=HostStep)


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "steps"))
    with closing(Listener(tmp_path / "steps")) as listening:
        yield listening


@contextmanager
def driving(**settings: Any) -> Iterator[Driver]:
    driver = Driver(make_scheduler(**settings))
    yield driver
    driver.scheduler.steering.core.close()


def test_a_target_that_is_written_is_kept_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "target"
    monkeypatch.setenv(TARGET_FILE_VARIABLE, str(path))
    driver = Driver(make_scheduler())
    driver.add(*(make_request(64, 5000) for _ in range(32)), make_request(16_000, 1))
    driver.run(num_steps=150)

    def chunk_lengths() -> list[int]:
        driver.ran.clear()
        driver.add(make_request(32_000, 1))
        driver.run(num_steps=20)
        return [length for ran in driver.ran for length in ran.chunks.values()]

    at_50_ms = chunk_lengths()
    PolicyFile(path).write(PolicySpec.parse("target:20ms"))
    at_20_ms = chunk_lengths()[1:]  # the tokens due next were promised before
    assert max(at_20_ms) < min(at_50_ms)
    PolicyFile(path).write(None)
    assert max(chunk_lengths()) > 4 * max(at_50_ms)  # vLLM's own budget


def test_steps_say_which_requests_came_and_went(listener: Listener) -> None:
    request = make_request(100, 3)
    with driving() as driver:
        driver.add(request)
        driver.run()
    first, *between, last = listener.read()
    assert [(one.request_id, one.num_prompt_tokens, one.max_tokens) for one in first.arrived] == [
        (request.request_id, 100, 3)
    ]
    assert [(one.request_id, one.num_output_tokens) for one in last.left] == [(request.request_id, 3)]
    assert not any(step.arrived or step.left for step in between)


@pytest.mark.parametrize(
    ("settings", "policy", "chunks"),
    [
        (
            {"max_num_batched_tokens": 512},
            "fixed:512",
            [(512, ChunkReason.BUDGET), (512, ChunkReason.BUDGET), (176, ChunkReason.END_OF_PROMPT)],
        ),
        (
            {"max_num_batched_tokens": 65_536, "chunked": False},
            "unchunked",
            [(1200, ChunkReason.END_OF_PROMPT)],
        ),
    ],
)
def test_without_a_target_steps_are_vllms_own_and_reported(
    settings: dict[str, Any], policy: str, chunks: list[tuple[int, ChunkReason]], listener: Listener
) -> None:
    with driving(target="none", **settings) as driver:
        driver.add(make_request(1200, 2))
        driver.run()
    reports = [step.report for step in listener.read()]
    assert [(chunk.length, chunk.reason) for report in reports for chunk in report.chunks] == chunks
    assert {(report.policy, report.target_s) for report in reports} == {(policy, None)}


def test_without_a_target_the_order_is_vllms_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target orders by arrival time and length; vLLM by when it was handed the request."""
    monkeypatch.setenv(TARGET_FILE_VARIABLE, str(tmp_path / "target"))

    def served_first(driver: Driver) -> str:
        driver.ran.clear()
        late, early = (make_request(3000, 1, arrival=time.time() - ago) for ago in (1, 2))
        for request in (late, early):
            driver.scheduler.add_request(request)
        driver.run()
        return "late" if late.request_id in driver.ran[0].chunks else "early"

    with driving(target="none", max_num_batched_tokens=1024) as driver:
        assert served_first(driver) == "late"
        PolicyFile(tmp_path / "target").write(PolicySpec.parse("target:50ms"))
        driver.add(make_request(10, 1))
        driver.run()
        assert served_first(driver) == "early"


def steps_told_late(driver: Driver, listener: Listener) -> list[HostStep]:
    """The steps of three requests, told to one who begins to listen long after they began."""
    for _ in range(3):  # far more steps than the socket has room for
        driver.add(make_request(20, 800))
        driver.run(num_steps=600)
    told: list[HostStep] = []
    while driver.scheduler.requests:
        told += listener.read()
        driver.step()
    return told + list(listener.read())


def test_a_slow_listener_hears_of_every_step(listener: Listener) -> None:
    with driving() as driver:
        told = steps_told_late(driver, listener)
    assert [step.report.step_id for step in told] == list(range(1, len(driver.ran) + 1))


def test_one_too_slow_hears_of_every_request(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "_MAX_UNSENT_BYTES", 1000)
    with driving() as driver:
        told = steps_told_late(driver, listener)
    assert len(told) < len(driver.ran)
    assert len({one.request_id for step in told for one in step.arrived}) == 3
    assert len({one.request_id for step in told for one in step.left}) == 3


def test_a_listener_may_come_late_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "steps"))
    with driving() as driver:
        driver.add(make_request(20, 100))
        driver.run(num_steps=10)
        with closing(Listener(tmp_path / "steps")) as listener:
            driver.run(num_steps=10)
            assert len(list(listener.read())) == 10
        (tmp_path / "steps").unlink()
        driver.run(num_steps=10)
        with closing(Listener(tmp_path / "steps")) as listener:
            driver.run(num_steps=10)
            assert len(list(listener.read())) == 10
