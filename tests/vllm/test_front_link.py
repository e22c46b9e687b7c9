"""What the plug-in and evenflow's front say to each other, over vLLM's real scheduler in virtual time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.vllm.driving import Driver, make_request, make_scheduler

import msgspec  # isort: skip

from evenflow.vllm.messages import SteeredStep  # isort: skip
from evenflow.vllm.settings import SOCKET_VARIABLE, TARGET_FILE_VARIABLE  # isort: skip
from evenflow.vllm.target_file import TargetFile  # isort: skip


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "steps"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "steps"))
        listening.setblocking(False)
        yield listening


def read_steps(steps: socket.socket) -> Iterator[SteeredStep]:
    """All that was told and not read yet."""
    with suppress(BlockingIOError):
        while True:
            yield msgspec.msgpack.decode(steps.recv(1 << 20), type=SteeredStep)


@contextmanager
def driving() -> Iterator[Driver]:
    driver = Driver(make_scheduler())
    yield driver
    driver.scheduler.steering.close()


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
    TargetFile(path).write("target:20ms")
    at_20_ms = chunk_lengths()[1:]  # the tokens due next were promised before
    assert max(at_20_ms) < min(at_50_ms)


def test_steps_say_which_requests_came_and_went(steps: socket.socket) -> None:
    request = make_request(100, 3)
    with driving() as driver:
        driver.add(request)
        driver.run()
    first, *between, last = read_steps(steps)
    assert [(one.request_id, one.num_prompt_tokens, one.max_tokens) for one in first.arrived] == [
        (request.request_id, 100, 3)
    ]
    assert [(one.request_id, one.num_output_tokens) for one in last.left] == [(request.request_id, 3)]
    assert not any(step.arrived or step.left for step in between)


def test_a_slow_listener_hears_of_every_request(steps: socket.socket) -> None:
    requests = [make_request(20, 200) for _ in range(3)]
    told: list[SteeredStep] = []
    with driving() as driver:
        for request in requests:  # far more steps than the socket has room for
            driver.add(request)
            driver.run(num_steps=150)
        while driver.scheduler.requests:
            told += read_steps(steps)
            driver.step()
        told += read_steps(steps)
    assert len(told) < len(driver.ran)
    assert {one.request_id for step in told for one in step.arrived} == {request.request_id for request in requests}
    assert {one.request_id for step in told for one in step.left} == {request.request_id for request in requests}
