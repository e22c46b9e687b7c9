"""Messages between an engine and its clients, on a thread's queue or a socket: commands in, events out.

All tokens of a step are one message: hundreds of streams cost the engine no more messages than one.
"""

from __future__ import annotations

from typing import cast

import msgspec

from evenflow import errors
from evenflow.core.policies import PolicySpec
from evenflow.core.report import StepReport
from evenflow.core.request import Request, RequestRecord
from evenflow.core.service_classes import DEFAULT_CLASSES, Classes


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """A checked, tokenised and hashed request."""

    request: RequestRecord

    @classmethod
    def encoded(cls, request: Request) -> Add:
        """To be sent over a socket: for a long prompt, encoding takes milliseconds, which other streams would wait."""
        return cls(cast("RequestRecord", msgspec.Raw(msgspec.msgpack.encode(request.record()))))


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    id: str


class StopAfter(msgspec.Struct, frozen=True, array_like=True, tag="stop_after"):
    """The text met a stop string: the request ended after this many tokens; later samples do not count."""

    id: str
    num_tokens: int


class SetPolicy(msgspec.Struct, frozen=True, array_like=True, tag="set_policy"):
    policy: PolicySpec


class SetWeights(msgspec.Struct, frozen=True, array_like=True, tag="set_weights"):
    """Weights of tenants; those not listed have 1."""

    weights: dict[str, float]


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End the engine, including open requests."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine is built: its limits, its policy and its classes of service."""

    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    policy: PolicySpec
    classes: Classes = DEFAULT_CLASSES


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    report: StepReport


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A rejected request: invalid, too late under the current load, or expired."""

    id: str
    message: str
    late: tuple[float, float, bool, float] | None = None  # arguments of a LateRequest
    expired: tuple[float, int] | None = None  # arguments of a DeadlineExceeded

    @classmethod
    def because(cls, request_id: str, error: errors.EvenflowError) -> Refused:
        match error:
            case errors.LateRequest():
                late = error.expected_s, error.target_s, error.is_deadline, error.retry_after_s
                return cls(request_id, str(error), late=late)
            case errors.DeadlineExceeded():
                return cls(request_id, str(error), expired=(error.deadline_s, error.num_tokens))
        return cls(request_id, str(error))

    def error(self) -> errors.EvenflowError:
        if self.late is not None:
            return errors.LateRequest(*self.late)
        if self.expired is not None:
            return errors.DeadlineExceeded(*self.expired)
        return errors.InvalidRequest(self.message)


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine ended with this error, named as in `evenflow.errors`."""

    kind: str
    message: str

    def error(self) -> errors.EvenflowError:
        found: errors.EvenflowError = getattr(errors, self.kind, errors.EngineFailed)(self.message)
        return found


Command = Add | Abort | StopAfter | SetPolicy | SetWeights | Stop
Event = Ready | Stepped | Refused | Failed

read_command = msgspec.msgpack.Decoder(Command).decode
read_event = msgspec.msgpack.Decoder(Event).decode
