"""The engine's events reach the front whole and in order, and the engine never waits for the front to read."""

from __future__ import annotations

import socket
import threading

import pytest

from evenflow.engine.messages import Refused, read_event
from evenflow.framing import FrameReader
from evenflow.server.engine.process import EventWriter

_NUM_EVENTS = 400
_TEXT = "x" * 10_000  # so that the socket has room for a few only


def _read_all(connection: socket.socket) -> list[str]:
    frames, found = FrameReader(), []
    while data := connection.recv(1 << 16):
        for content in frames.feed(data):
            event = read_event(content)
            assert isinstance(event, Refused)
            assert event.message == _TEXT
            found.append(event.id)
    return found


def test_a_slow_reader_gets_all_in_order_and_holds_nobody_up() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = EventWriter(theirs)
        for number in range(_NUM_EVENTS):
            writer.send(Refused(str(number), _TEXT))  # would never return if it waited: nobody reads yet
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.extend(_read_all(ours)))
        reader.start()
        for number in range(_NUM_EVENTS, 2 * _NUM_EVENTS):
            writer.send(Refused(str(number), _TEXT))
        writer.close()
        theirs.shutdown(socket.SHUT_WR)
        reader.join()
    assert found == [str(number) for number in range(2 * _NUM_EVENTS)]


def test_a_front_that_is_gone_is_no_error_and_holds_nobody_up() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        writer = EventWriter(theirs)
        for number in range(_NUM_EVENTS):
            writer.send(Refused(str(number), _TEXT))
        ours.close()
        with pytest.raises(OSError, match="Broken pipe"):
            theirs.send(b"x")
        writer.send(Refused("last", _TEXT))
        closing = threading.Thread(target=writer.close, daemon=True)
        closing.start()
        closing.join(timeout=30)
        assert not closing.is_alive()  # it gave up what nobody will read
