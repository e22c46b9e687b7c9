"""Messages come out of the socket as they went in, however it cuts them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from evenflow.core.grammar import Grammar
from evenflow.core.logprobs import LogprobRows, RowLogprobs, TokenLogprob
from evenflow.core.policies import PolicySpec
from evenflow.core.report import Ended
from evenflow.core.request import Request, SamplingParams
from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.engine.messages import Abort, Add, Ready, Refused, SetPolicy, Stepped, read_command, read_event
from evenflow.errors import DeadlineExceeded, EvenflowError, InvalidRequest, LateRequest
from evenflow.framing import FrameReader, frame
from tests.server.stepping import SteppedEngine


def test_a_request_is_the_same_on_the_other_side() -> None:
    sampling = SamplingParams(
        max_tokens=7,
        stop=("a", "b"),
        stop_token_ids=(3,),
        logprobs=2,
        tbt_target=0.1,
        deadline=9.0,
        grammar=Grammar.regex("a+"),
    )
    for params in (sampling, SamplingParams(ignore_eos=True, stop_token_ids=(9,))):
        request = Request(
            "a", list(range(40)), params, seed=2**63 - 1, max_model_len=45, eos_token_ids=(1, 2), salt=b"x",
            block_hashes=[b"1" * 16, b"2" * 16], arrival_time=1.5, tenant="acme", service_class="batch",
        )  # fmt: skip
        content = frame(Add(request.record()))
        command = read_command(content[4:])
        assert isinstance(command, Add)
        assert command.request.request().record() == request.record() == command.request
        assert frame(Add.encoded(request)) == content


def test_an_engine_says_which_classes_it_has() -> None:
    classes = (replace(DEFAULT_CLASSES[0], ttft_target=0.5), DEFAULT_CLASSES[2])
    ready = Ready(100, 200, 16, 50, 8, PolicySpec("fixed", 64), classes)
    assert read_event(frame(ready)[4:]) == ready


def test_a_policy_is_the_same_on_the_other_side_with_what_a_later_change_needs() -> None:
    policy = PolicySpec.parse("load").bounded(512).with_target(0.05, is_paced=True)
    command = read_command(frame(SetPolicy(policy))[4:])
    assert isinstance(command, SetPolicy)
    assert str(command.policy) == "target:50ms,paced"
    assert command.policy == policy
    assert command.policy.with_target(None) == policy.with_target(None)


@pytest.mark.parametrize(
    "error", [InvalidRequest("no"), LateRequest(3.5, 2.0), LateRequest(3.5, 2.0, True, 20.0), DeadlineExceeded(2.0, 7)]
)
def test_a_refusal_is_the_same_error_on_the_other_side(error: EvenflowError) -> None:
    event = read_event(frame(Refused.because("a", error))[4:])
    assert isinstance(event, Refused)
    again = event.error()
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_step_is_the_same_on_the_other_side_in_any_pieces() -> None:
    engine = SteppedEngine()
    engine.add("a", 100)
    row = RowLogprobs(TokenLogprob(4, -0.25), (TokenLogprob(4, -0.25), TokenLogprob(5, -1.0)))
    report = engine.step()._replace(
        ids=["a", "b"],
        tokens=[(4,), ()],
        ended={1: Ended("error", "it broke")},
        logprobs={0: LogprobRows.of([row])},
        prompt_logprobs={0: LogprobRows.of([row, row])},
    )
    step = Stepped(report)
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
