"""What the front and the engine process say to each other: commands, events, and how they lie on a socket.

A frame is its length in four bytes, then MessagePack. A step's tokens for all requests are one message, so that
hundreds of streams cost the engine no more messages than one. Must not know: HTTP, text, who reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from evenflow.core.plan import RowLogprobs
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.outputs import ChunkTaken
from evenflow.server.metrics.events import StepEvent

_LENGTH_BYTES = 4


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """A request that was checked, tokenised and hashed already."""

    id: str
    token_ids: list[int]
    sampling: SamplingParams
    seed: int
    stop_token_ids: list[int]
    max_known_tokens: int
    salt: bytes
    block_hashes: list[bytes]
    arrival_time: float  # of `time.perf_counter`, which all processes of a machine share

    @classmethod
    def of(cls, request: Request) -> Add:
        return cls(
            request.id,
            request.tokens,
            request.sampling,
            request.seed,
            sorted(request.stop_token_ids),
            request.max_known_tokens,
            request.salt,
            request.block_hashes,
            request.arrival_time,
        )

    def request(self) -> Request:
        return Request(
            self.id,
            self.token_ids,
            self.sampling,
            seed=self.seed,
            max_model_len=self.max_known_tokens,
            eos_token_ids=tuple(self.stop_token_ids),
            salt=self.salt,
            block_hashes=self.block_hashes,
            arrival_time=self.arrival_time,
        )


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    id: str


class StopAfter(msgspec.Struct, frozen=True, array_like=True, tag="stop_after"):
    """The front found a stop string: the request ended after so many tokens, whatever was sampled since."""

    id: str
    num_tokens: int


class SetTarget(msgspec.Struct, frozen=True, array_like=True, tag="set_target"):
    seconds: float
    paced: bool


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End the engine process, whatever is open."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine is built: what it runs, and within which bounds."""

    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    policy: str


class Started(NamedTuple):
    """What is known of a request with its first token."""

    num_cached_tokens: int
    chunks: list[ChunkTaken]
    prompt_logprobs: list[RowLogprobs] | None


class Ended(NamedTuple):
    reason: str
    error: str | None


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """One step: what each request got, as columns; what few requests have is keyed by their row in these."""

    event: StepEvent
    ids: list[str]
    tokens: list[tuple[int, ...]]
    started: dict[int, Started]
    ended: dict[int, Ended]
    logprobs: dict[int, tuple[RowLogprobs, ...]]  # of the row's tokens


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A request that the engine does not take."""

    id: str
    message: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine ends by an error, named as in `evenflow.errors`."""

    kind: str
    message: str


Command = Add | Abort | StopAfter | SetTarget | Stop
Event = Ready | StepDone | Refused | Failed

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def frame(message: msgspec.Struct) -> bytes:
    """The message as it goes over the socket."""
    buffer = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, buffer, _LENGTH_BYTES)
    buffer[:_LENGTH_BYTES] = (len(buffer) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big")
    return bytes(buffer)


def read_command(content: bytes) -> Command:
    return _command_decoder.decode(content)


def read_event(content: bytes) -> Event:
    return _event_decoder.decode(content)


class FrameReader:
    """Cuts what comes over a socket into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that these bytes complete."""
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
