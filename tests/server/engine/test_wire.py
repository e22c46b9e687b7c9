"""Messages come out of the socket as they went in, however it cuts them."""

from __future__ import annotations

import random

from evenflow.core.grammar import Grammar
from evenflow.core.plan import ChunkReason, RowLogprobs, TokenLogprob
from evenflow.core.record import request_record
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.outputs import ChunkTaken
from evenflow.server.engine.wire import (
    Abort,
    Add,
    Ended,
    FrameReader,
    Started,
    StepDone,
    frame,
    read_command,
    read_event,
)
from tests.server.stepping import ToldEngine


def test_a_request_is_the_same_on_the_other_side() -> None:
    sampling = SamplingParams(
        max_tokens=7, stop=("a", "b"), stop_token_ids=(3,), logprobs=2, tbt_target=0.1, grammar=Grammar.regex("a+")
    )
    for params in (sampling, SamplingParams(ignore_eos=True, stop_token_ids=(9,))):
        request = Request(
            "a", list(range(40)), params, seed=2**63 - 1, max_model_len=45, eos_token_ids=(1, 2), salt=b"x",
            block_hashes=[b"1" * 16, b"2" * 16], arrival_time=1.5,
        )  # fmt: skip
        command = read_command(frame(Add.of(request))[4:])
        assert isinstance(command, Add)
        assert request_record(command.request()) == request_record(request)


def test_a_step_is_the_same_on_the_other_side_in_any_pieces() -> None:
    engine = ToldEngine()
    engine.add("a", 100)
    row = RowLogprobs(TokenLogprob(4, -0.25), (TokenLogprob(4, -0.25), TokenLogprob(5, -1.0)))
    step = StepDone(
        engine.step(),
        ["a", "b"],
        [(4,), ()],
        {0: Started(16, [ChunkTaken(16, 64, ChunkReason.BUDGET)], [row])},
        {1: Ended("error", "it broke")},
        {0: (row,)},
    )
    content = frame(step) + frame(step)
    reader, source, found = FrameReader(), random.Random(1), []
    while content:
        cut = source.randint(1, 90)
        found += [read_event(message) for message in reader.feed(content[:cut])]
        content = content[cut:]
    assert found == [step, step]


def test_small_messages_arrive_together() -> None:
    reader = FrameReader()
    messages = list(reader.feed(b"".join(frame(Abort(str(number))) for number in range(5))))
    assert [read_command(message) for message in messages] == [Abort(str(number)) for number in range(5)]
