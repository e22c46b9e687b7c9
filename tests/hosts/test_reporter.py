"""What a front hears of a host's steps when it reads too slowly."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from evenflow.framing import FrameReader
from evenflow.hosts import reporter
from evenflow.hosts.messages import HostStep
from evenflow.hosts.reporter import Reporter
from tests.server.test_bounds import a_report


def read_all(connection: socket.socket, frames: FrameReader) -> Iterator[HostStep]:
    connection.setblocking(False)
    try:
        while data := connection.recv(1 << 20):
            for content in frames.feed(data):
                yield msgspec.msgpack.decode(content, type=HostStep)
    except BlockingIOError:
        pass


def test_a_front_that_misses_steps_hears_of_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "_MAX_UNSENT_BYTES", 1000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as front:
        front.bind(str(tmp_path / "steps"))
        front.listen()
        host = Reporter(logging.getLogger("test"), str(tmp_path / "steps"))
        report = a_report()
        for number in range(5000):
            host.arrived(f"request-{number}", 0.0, 10, 1)
            host.left(f"request-{number}", 1)
            host.report(report)
        assert host._arrived  # the socket is full
        connection, _ = front.accept()
        frames = FrameReader()
        with connection:
            steps = list(read_all(connection, frames))
            host.report(report)  # sends what waited in memory
            host.report(report)
            steps += read_all(connection, frames)
        host.close()
    assert len(steps) < 5000
    heard = [request.request_id for step in steps for request in step.arrived]
    assert heard == [f"request-{number}" for number in range(5000)]
    assert heard == [request.request_id for step in steps for request in step.left]
