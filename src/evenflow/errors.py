"""Every error evenflow raises on purpose, as one tree.

EvenflowError
├── InvalidInput (ValueError)      the caller can fix it: exit code 2 on the command line
│   ├── InvalidConfig              an engine setting, or two that contradict each other
│   ├── InvalidRequest             one request; the engine continues to serve the others
│   └── ModelError                 a model that cannot be loaded
│       ├── ModelNotFound          no such folder or file
│       ├── UnsupportedModel       an architecture, tensor type or option evenflow does not run
│       └── BrokenModel            a truncated or inconsistent file
├── LateRequest                    refused: it is expected to miss its target or deadline
├── DeadlineExceeded               a request's deadline passed before its answer was complete
├── MissingDependency              an extra that is not installed; the message names it
├── OutOfMemory                    the message names the settings to lower
├── EngineFailed                   a step failed: exit code 1 on the command line
└── EndpointFailed                 another server answered incorrectly, or not at all
"""

from evenflow.counts import counted

_MAX_CHARACTERS = 1000


def printable(text: str) -> str:
    """Untrusted text for a message: short, on one line, without control characters."""
    shown = text if len(text) <= _MAX_CHARACTERS else f"{text[:500]}...{text[-300:]}"
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in shown)


class EvenflowError(Exception):
    """Base of all errors raised by evenflow."""


class InvalidInput(EvenflowError, ValueError):
    """A wrong input; the message names the value and the allowed ones."""


class InvalidConfig(InvalidInput):
    """A setting of the engine, or two settings that contradict each other."""


class InvalidRequest(InvalidInput):
    """A request that cannot be served."""


class LateRequest(EvenflowError, RuntimeError):
    """Refused: the first token is expected after the request's target, or after its deadline.

    After `retry_after_s`, earlier requests are done, or a retry is admitted to test the estimate.
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
    """The request's deadline passed before its answer was complete."""

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
    """The model is intact, but evenflow's own engine does not run it."""


class BrokenModel(ModelError):
    """The model's files are truncated or contradict each other."""


class MissingDependency(EvenflowError, ImportError):
    """A part of evenflow needs an extra that is not installed."""


class OutOfMemory(EvenflowError, MemoryError):
    """Memory ran out; the message names the settings to lower."""


class EngineFailed(EvenflowError, RuntimeError):
    """A step failed through no fault of a single request."""


class EndpointFailed(EvenflowError, RuntimeError):
    """A server answered evenflow, its client, incorrectly or not at all."""
