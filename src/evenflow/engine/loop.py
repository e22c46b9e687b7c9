"""Steps one engine and takes commands between steps: the loop of `AsyncLLM`'s thread and of the server's process."""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Callable

from evenflow.engine.engine import Engine
from evenflow.engine.messages import (
    Abort,
    Add,
    Command,
    Event,
    Failed,
    Ready,
    Refused,
    SetPolicy,
    SetWeights,
    Stepped,
    Stop,
    StopAfter,
)
from evenflow.errors import EvenflowError

logger = logging.getLogger("evenflow")

Commands = queue.SimpleQueue[Command]

_MAX_COMMANDS_BETWEEN_STEPS = 64
# A GPU step releases Python's lock in hundreds of calls. By default a busy caller's thread holds it for 5 ms each time.
_SWITCH_SECONDS = 0.0002


def run_engine(build: Callable[[], Engine], commands: Commands, send: Callable[[Event], None]) -> None:
    """Build an engine and run it until it is stopped. If it fails, its last event has the error."""
    try:
        engine = build()
        sys.setswitchinterval(min(_SWITCH_SECONDS, sys.getswitchinterval()))
        try:
            _run(engine, commands, send)
        finally:
            engine.close()
    except EvenflowError as error:
        send(Failed(type(error).__name__, str(error)))
    except Exception as error:
        logger.exception("the engine stopped")
        send(Failed("EngineFailed", f"the engine stopped: {error!r}"))


def _run(engine: Engine, commands: Commands, send: Callable[[Event], None]) -> None:
    limits, config = engine.limits, engine.scheduler.config
    sizes = config.block_size, config.num_blocks, config.max_num_seqs
    send(Ready(limits.max_model_len, limits.vocab_size, *sizes, config.policy, config.classes))
    while _drain_commands(engine, commands, send):
        for request_id, error in engine.expire().items():
            send(Refused.because(request_id, error))
        report = engine.step()
        if report is not None and not report.is_empty:
            send(Stepped(report))


def _drain_commands(engine: Engine, commands: Commands, send: Callable[[Event], None]) -> bool:
    """Carry out pending commands; wait for one if the engine is idle. False: stop."""
    for _ in range(_MAX_COMMANDS_BETWEEN_STEPS):
        try:
            command = commands.get(block=not engine.has_work)
        except queue.Empty:
            return True
        match command:
            case Add(record):
                try:
                    engine.add(record.request())
                except EvenflowError as error:
                    send(Refused.because(record.id, error))
            case Abort(request_id):
                engine.abort(request_id)
            case StopAfter(request_id, num_tokens):
                engine.stop(request_id, num_tokens)
            case SetPolicy(policy):
                engine.set_policy(policy)
            case SetWeights(weights):
                engine.set_tenant_weights(weights)
            case Stop():
                return False
    return True
