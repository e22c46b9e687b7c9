"""`LLM` with several callers at once, interrupted ones, and after its end: their own tokens, or one clear error."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from evenflow.core.plan import StepPlan
from evenflow.core.request import SamplingParams
from evenflow.engine import engine_thread
from evenflow.engine import llm as llm_module
from evenflow.engine.llm import LLM
from evenflow.engine.outputs import Delta
from evenflow.errors import EngineFailed, InvalidRequest
from evenflow.executors.fake import fake_continuation
from tests.engine.fakes import VOCAB, fake_llm

PROMPTS = [[number] * (3 + 20 * number) for number in range(6)]


def sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens)


def tokens_of(deltas: Iterator[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def assert_unharmed(llm: LLM) -> None:
    """It answers, and nothing of earlier requests is left in it."""
    [output] = llm.generate([7, 8], sampling(5))
    assert output.token_ids == fake_continuation([7, 8], 5, VOCAB)
    assert not llm.engine.has_work
    assert not llm._inboxes
    assert llm.engine.scheduler.pool.num_held == 0


# ---- several at once ----


@pytest.mark.parametrize("depth", [1, 2])
def test_streams_taken_in_turns_are_whole(depth: int) -> None:
    llm = fake_llm(depth=depth)
    streams = [llm.stream(prompt, sampling(9)) for prompt in PROMPTS]
    found: list[list[int]] = [[] for _ in streams]
    for deltas in itertools.zip_longest(*streams):
        for place, delta in enumerate(deltas):
            found[place] += delta.token_ids if delta is not None else ()
    assert found == [fake_continuation(prompt, 9, VOCAB) for prompt in PROMPTS]
    assert_unharmed(llm)


def test_a_call_inside_the_loop_of_a_stream_or_a_callback_gets_its_own_answer() -> None:
    llm = fake_llm()
    inner: list[list[int]] = []

    def ask(delta: Delta) -> None:
        inner.append(llm.generate([[9, 8]], sampling(4))[0].token_ids)

    outer = []
    for delta in llm.stream([5, 6], sampling(7)):
        outer += delta.token_ids
        ask(delta)
    assert outer == fake_continuation([5, 6], 7, VOCAB)
    [output] = llm.generate([1, 2], sampling(3), on_delta=ask)
    assert output.token_ids == fake_continuation([1, 2], 3, VOCAB)
    assert inner == [fake_continuation([9, 8], 4, VOCAB)] * 10
    assert_unharmed(llm)


def test_requests_that_were_added_and_calls_do_not_see_each_others_deltas() -> None:
    llm = fake_llm()
    llm.add(llm.prepare([5, 6], sampling(6), request_id="added"))
    assert tokens_of(llm.stream([9, 8], sampling(3))) == fake_continuation([9, 8], 3, VOCAB)
    deltas = llm.step()
    while llm.engine.has_work:
        deltas += llm.step()
    assert {delta.request_id for delta in deltas} == {"added"}
    assert tokens_of(iter(deltas)) == fake_continuation([5, 6], 6, VOCAB)
    assert_unharmed(llm)


@pytest.mark.parametrize("num_steps", [0, 3, 50])
def test_a_request_that_has_ended_may_run_again(num_steps: int) -> None:
    """As with AsyncLLM. Before, it went on behind the answer that it had."""
    llm = fake_llm()
    request = llm.prepare([5, 6], sampling(6))
    llm.add(request)
    for _ in range(num_steps):
        llm.step()
    llm.abort(request.id)
    llm.step()
    for _ in range(2):
        llm.add(request)
        with pytest.raises(InvalidRequest, match="same id"):
            llm.add(request)
        deltas = llm.step()
        while llm.engine.has_work:
            deltas += llm.step()
        assert tokens_of(iter(deltas)) == fake_continuation([5, 6], 6, VOCAB)
    assert_unharmed(llm)


def test_what_a_caller_changes_later_does_not_reach_the_engine() -> None:
    llm = fake_llm()
    prompt, biases, stops = [5, 6], {7: 1.0}, [3]
    params = SamplingParams(max_tokens=4, logit_bias=biases, stop_token_ids=stops)  # type: ignore[arg-type]
    request = llm.prepare(prompt, params)
    prompt.append(10**9)
    biases[10**9] = 1.0
    stops.append(10**9)
    assert request.tokens == [5, 6]
    assert (request.sampling.logit_bias, request.stop_token_ids) == ({7: 1.0}, {3})


def test_a_request_aborted_elsewhere_ends_for_the_caller_who_waits_for_it() -> None:
    llm = fake_llm()
    outputs = llm.generate(PROMPTS[:2], sampling(50), on_delta=lambda delta: llm.abort(delta.request_id) and None)
    assert [output.finish_reason for output in outputs] == ["abort", "abort"]
    assert_unharmed(llm)


def test_a_refused_request_does_not_end_the_one_whose_id_it_has() -> None:
    llm = fake_llm()
    llm.add(llm.prepare([5, 6], sampling(6), request_id="request-0"))
    with pytest.raises(InvalidRequest, match="'request-0'"):
        llm.generate([1, 2])
    deltas = llm.step()
    while llm.engine.has_work:
        deltas += llm.step()
    assert deltas[-1].finish_reason == "length"


def test_threads_share_the_engine() -> None:
    llm = fake_llm(num_blocks=40, max_num_seqs=3)

    def call(number: int) -> list[int]:
        prompt = PROMPTS[number % len(PROMPTS)] + [number]
        if number % 3 == 0:
            return tokens_of(llm.stream(prompt, sampling(8)))
        if number % 3 == 1:  # left early
            stream = llm.stream(prompt, sampling(300))
            return tokens_of(itertools.islice(stream, 4))
        return llm.generate([prompt], sampling(8))[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, range(60)))
    for number, tokens in enumerate(found):
        assert tokens == fake_continuation(PROMPTS[number % len(PROMPTS)] + [number], len(tokens), VOCAB)
        assert len(tokens) == (4 if number % 3 == 1 else 8)
    assert_unharmed(llm)


def test_threads_that_step_share_what_was_added() -> None:
    llm = fake_llm(num_blocks=2000, max_num_seqs=200)
    found: list[list[Delta]] = [[] for _ in range(8)]
    before = sys.getswitchinterval()

    def step(number: int) -> None:
        while llm.engine.has_work:
            found[number] += llm.step()

    sys.setswitchinterval(1e-6)
    try:
        for number in range(200):
            llm.add(llm.prepare([number] * 9, sampling(20), request_id=str(number)))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(step, range(8)))
    finally:
        sys.setswitchinterval(before)
    deltas = [delta for mine in found for delta in mine] + llm.step()
    assert sum(len(delta.token_ids) for delta in deltas) == 200 * 20
    assert sorted(int(delta.request_id) for delta in deltas if delta.finish_reason) == list(range(200))
    assert_unharmed(llm)


def test_a_stream_may_be_read_by_one_thread_after_another() -> None:
    llm = fake_llm()
    stream = llm.stream([5, 6], sampling(6))
    found = []
    for _ in range(6):
        with ThreadPoolExecutor(1) as pool:
            found += pool.submit(next, stream).result().token_ids
    assert found == fake_continuation([5, 6], 6, VOCAB)


def test_streams_that_nobody_reads_to_the_end_are_aborted() -> None:
    llm = fake_llm()
    for left in range(20):
        stream = llm.stream(PROMPTS[left % 6], sampling(300))
        next(stream)
        if left % 2:
            cycle: list[Any] = [stream]
            cycle.append(cycle)  # only the garbage collector finds it, on any thread
            del cycle
        del stream
    gc.collect()
    assert_unharmed(llm)


def test_random_callers_on_many_threads_get_their_own_tokens() -> None:
    llm = fake_llm(depth=2, num_blocks=60, max_num_seqs=4)

    def calls(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(12):
            prompts = [[source.randrange(VOCAB)] * source.randint(1, 60) for _ in range(source.randint(1, 3))]
            length = source.randint(1, 20)
            if source.random() < 0.5:
                outputs = llm.generate(prompts, sampling(length))
                assert [one.token_ids for one in outputs] == [fake_continuation(p, length, VOCAB) for p in prompts]
                continue
            streams = [llm.stream(prompt, sampling(length)) for prompt in prompts]
            for prompt, stream in zip(prompts, streams, strict=True):
                num_read = source.randint(1, length)
                found = tokens_of(itertools.islice(stream, num_read))
                assert found == fake_continuation(prompt, len(found), VOCAB)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(calls, range(6)))
    assert_unharmed(llm)


# ---- interrupts ----


def interrupted(run: Callable[[], object], at_line: int) -> bool:
    """Run this, and send the process an interrupt at a line of `LLM` that it executes; False: it has fewer lines."""
    files = [module.__file__ for module in (engine_thread, llm_module)]
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        if event == "line" and frame.f_code.co_filename in files:
            num_lines += 1
            if num_lines == at_line:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return num_lines >= at_line


@pytest.mark.parametrize("kind", ["generate", "stream", "step"])
def test_an_interrupt_at_any_line_of_a_call_harms_no_later_call(kind: str) -> None:
    llm = fake_llm(depth=2)

    def run() -> None:
        if kind == "generate":
            llm.generate([[5, 6], [7]], sampling(2))
        elif kind == "stream":
            list(llm.stream([5, 6], sampling(2)))
        else:
            llm.step()

    for line in itertools.count(1):
        if kind == "step":
            llm.add(llm.prepare([5, 6], sampling(3), request_id="added"))
        if not interrupted(run, line):
            break
        llm.abort("added")
        llm._added.clear()
        assert llm.generate([9], sampling(1))[0].token_ids == fake_continuation([9], 1, VOCAB)
    assert line > 10
    assert_unharmed(llm)


def test_an_interrupt_while_a_step_runs_ends_the_call_and_not_the_step() -> None:
    """As a notebook's: before, the engine had taken the step's plan, and could never plan another."""
    num_steps = itertools.count()

    def disturb(plan: StepPlan) -> None:
        if next(num_steps) % 7 == 3:
            signal.raise_signal(signal.SIGINT)

    llm = fake_llm(disturb=disturb)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    try:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, sampling(20))
            with pytest.raises(KeyboardInterrupt):
                list(llm.stream([5, 6], sampling(20)))
    finally:
        signal.signal(signal.SIGINT, before)
    llm.engine.executor._disturb = lambda plan: None  # type: ignore[attr-defined]
    assert_unharmed(llm)


def test_an_interrupt_at_any_line_of_closing_leaves_an_engine_that_can_be_closed() -> None:
    for line in itertools.count(1):
        llm = fake_llm()
        next(llm.stream([5, 6], sampling(50)))
        is_interrupted = interrupted(llm.close, line)
        llm.close()
        with pytest.raises(EngineFailed, match="was closed"):
            llm.generate([1])
        if not is_interrupted:
            break
    assert line > 5


def test_an_interrupt_takes_no_tokens_from_other_streams() -> None:
    llm = fake_llm()
    stream = llm.stream([5, 6], sampling(12))
    found = list(next(stream).token_ids)
    for line in range(1, 60, 7):
        interrupted(lambda: llm.generate(PROMPTS[:2], sampling(2)), line)
    assert found + tokens_of(stream) == fake_continuation([5, 6], 12, VOCAB)


# ---- forks and the end ----


def test_a_call_in_a_fork_of_the_process_is_one_clear_error() -> None:
    llm = fake_llm()
    assert_unharmed(llm)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own advice against forks beside threads
        child = os.fork()
    if child == 0:
        with llm:
            for call in (lambda: llm.generate([1]), lambda: list(llm.stream([1])), llm.step):
                try:
                    call()
                    sender.send("no error")
                except EngineFailed as error:
                    sender.send(str(error))
        sender.send("closed")
        os._exit(0)
    for _ in range(3):
        assert receiver.poll(20), "the call hangs"
        assert "spawn" in receiver.recv()
    assert receiver.poll(20), "closing it hangs"
    assert receiver.recv() == "closed"
    os.waitpid(child, 0)
    assert_unharmed(llm)


def test_after_its_end_every_call_says_so() -> None:
    llm = fake_llm()
    stream = llm.stream([5, 6], sampling(50))
    next(stream)
    llm.close()
    llm.close()
    for call in (lambda: next(stream), lambda: llm.generate([1]), llm.step, lambda: llm.abort("r")):
        with pytest.raises(EngineFailed, match="was closed"):
            call()


def test_a_model_that_is_dropped_is_freed_and_its_thread_ends() -> None:
    threads = set(threading.enumerate())
    llm = fake_llm()
    [thread] = set(threading.enumerate()) - threads
    assert_unharmed(llm)
    engine = weakref.ref(llm.engine.executor)
    del llm
    thread.join(20)
    assert not thread.is_alive()
    assert engine() is None


WITH_OPEN_REQUEST = {
    "LLM": "from tests.engine.fakes import fake_llm\nllm = fake_llm()\nnext(llm.stream([1, 2, 3]))\n",
    "AsyncLLM": (
        "import asyncio\nfrom tests.engine.fakes import fake_async_llm, fake_engine\n"
        "llm = fake_async_llm(fake_engine())\n"
        "async def begin() -> None:\n    await anext(llm.stream([1, 2, 3]))\nasyncio.run(begin())\n"
    ),
}


@pytest.mark.parametrize("begin", WITH_OPEN_REQUEST.values(), ids=WITH_OPEN_REQUEST)
def test_no_thread_of_an_open_one_outlives_the_exit(begin: str) -> None:
    # Functions registered at exit run in reverse order: this one comes last.
    code = "import atexit, threading\natexit.register(lambda: print([t.name for t in threading.enumerate()]))\n" + begin
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "evenflow-engine" not in finished.stdout, finished.stdout
