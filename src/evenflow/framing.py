"""Messages on a stream socket: a length in four bytes, then MessagePack."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

_LENGTH_BYTES = 4

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message for the socket."""
    buffer = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, buffer, _LENGTH_BYTES)
    buffer[:_LENGTH_BYTES] = (len(buffer) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big")
    return bytes(buffer)


class FrameReader:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Returns the messages completed by these bytes."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            end = body + int.from_bytes(self._buffer[start:body], "big")
            if end > len(self._buffer):
                break
            yield bytes(self._buffer[body:end])
            start = end
        del self._buffer[:start]
