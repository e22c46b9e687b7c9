"""Every error evenflow raises on purpose, as one tree.

EvenflowError
├── InvalidInput (ValueError)      the caller can fix it: exit code 2 on the command line
│   ├── InvalidConfig              an engine setting, or two that do not go together
│   ├── InvalidRequest             one request; the engine goes on serving the others
│   └── ModelError                 a model that cannot be loaded
│       ├── ModelNotFound          no such folder or file
│       ├── UnsupportedModel       an architecture, tensor type or option evenflow does not run
│       └── BrokenModel            a truncated or inconsistent file
├── LateRequest                    refused: it is expected to miss its target or deadline
├── DeadlineExceeded               a request's deadline passed before its answer was complete
├── MissingDependency              an extra that is not installed: says which to install
├── OutOfMemory                    says which settings to lower
├── EngineFailed                   a step failed: exit code 1 on the command line
└── EndpointFailed                 a server that was asked does not answer as it should
"""

from evenflow.counts import counted

_MOST_CHARACTERS = 1000


def printable(text: str) -> str:
    """Text from a file that nobody vouches for, as part of a message: short, on one line, no control characters."""
    shown = text if len(text) <= _MOST_CHARACTERS else f"{text[:500]}...{text[-300:]}"
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in shown)


class EvenflowError(Exception):
    """Base of all errors raised by evenflow."""


class InvalidInput(EvenflowError, ValueError):
    """Something the caller gave is wrong; the message names the value and what is allowed."""


class InvalidConfig(InvalidInput):
    """A setting of the engine, or two settings that contradict each other."""


class InvalidRequest(InvalidInput):
    """A request that can never be served as asked."""


class LateRequest(EvenflowError, RuntimeError):
    """A request that is refused because its first token is expected after its target, or after its deadline.

    After `retry_after_s`, what is before it is done, or it is let through to see whether the estimate still holds.
    """

    def __init__(
        self, expected_s: float, target_s: float, is_deadline: bool = False, retry_after_s: float | None = None
    ) -> None:
        limit = "deadline" if is_deadline else "target"
        super().__init__(
            f"The first token is expected after {expected_s:.3g} s but the {limit} is {target_s:g} s: retry later, or "
            "shorten the prompt."
        )
        self.expected_s = expected_s
        self.target_s = target_s
        self.is_deadline = is_deadline
        self.retry_after_s = expected_s - target_s if retry_after_s is None else retry_after_s


class DeadlineExceeded(EvenflowError, TimeoutError):
    """A request that ended because its deadline passed before its answer was complete."""

    def __init__(self, deadline_s: float, num_tokens: int) -> None:
        reached = f"after {counted(num_tokens, 'token')} of the answer" if num_tokens else "before the first token"
        super().__init__(f"The request's deadline of {deadline_s:g} s passed {reached}.")
        self.deadline_s = deadline_s
        self.num_tokens = num_tokens


class ModelError(InvalidInput):
    """A model that cannot be loaded. The message may quote the model's files."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ModelNotFound(ModelError):
    """The model's folder or file does not exist."""


class UnsupportedModel(ModelError):
    """The model is whole, but evenflow's own engine does not run it."""


class BrokenModel(ModelError):
    """The model's files are truncated or contradict each other."""


class MissingDependency(EvenflowError, ImportError):
    """A part of evenflow whose extra is not installed."""


class OutOfMemory(EvenflowError, MemoryError):
    """Memory ran out; the message says which settings to lower."""


class EngineFailed(EvenflowError, RuntimeError):
    """A step failed in a way that no single request caused."""


class EndpointFailed(EvenflowError, RuntimeError):
    """A server that evenflow is the client of does not answer as it should."""
