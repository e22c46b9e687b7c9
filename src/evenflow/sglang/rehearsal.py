"""Runs steps of every kind through SGLang's own loop before the first request.

SGLang compiles several kernels when a step first needs them, such as the positions of decodes (by nvcc, in 5 s): all
streams would wait meanwhile. Which kernels those are depends on the model, the settings and SGLang's version; here
SGLang finds out by itself. Nothing remains of the requests: their tokens are not sent, and the prefix cache is emptied.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, cycle
from typing import Any

import torch
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_params import SamplingParams

from evenflow.sglang.steering import Decision, SglangSteering

logger = logging.getLogger("sglang.evenflow")

_SHORT, _LONG, _LAST = 20, 4608, 700  # tokens; attention divides a context as long as the second
_CHUNKS = (48, 400, 2500)  # within SGLang's captured graphs, and beyond
_OUTPUT = 24  # tokens of each stream, so that all chunks are beside some
_MOST_TURNS = 1000  # of SGLang's loop, in which some hundred steps take place
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
)


class _Rehearsal(SglangSteering):
    """Chunks of every size in turn, the same on every rank."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._chunks = cycle(_CHUNKS)
        self.num_steps = 0

    def _decide(self, running_batch: Any) -> Decision:
        if not self._has_prefill:
            return Decision()
        chunk = max(self._scheduler.page_size, min(next(self._chunks), self._scheduler.chunked_prefill_size))
        return Decision(budget=chunk + len(running_batch.reqs))

    def scheduled(self, batch: Any) -> None:
        super().scheduled(batch)
        self.num_steps += batch is not None


def rehearse(scheduler: Any) -> None:
    """Has SGLang serve a few requests of its own. It must be idle."""
    started, steering = time.perf_counter(), _Rehearsal(scheduler)
    before, scheduler.evenflow = scheduler.evenflow, steering
    try:
        numbers = count(1)
        for sampling in _SAMPLING:
            _serve(scheduler, _script(scheduler, (partial(_request, number, sampling) for number in numbers)))
    finally:
        scheduler.evenflow = before
        _empty(scheduler)
    seconds = time.perf_counter() - started
    logger.info("evenflow: %d steps before the first request, in %.1f s", steering.num_steps, seconds)


def _script(scheduler: Any, requests: Iterator[Callable[[int], Any]]) -> Iterator[list[Any]]:
    """What arrives at each turn: two streams, a long prompt beside them, and another beside the long context."""
    longest = max(1, min(scheduler.max_req_input_len - 1, scheduler.max_total_num_tokens // 2))
    yield [next(requests)(_SHORT)]
    yield [next(requests)(_SHORT + 1)]
    yield from ([] for _ in range(4))  # decodes alone
    yield [next(requests)(min(_LONG, longest))]
    yield []
    while scheduler.waiting_queue or scheduler.chunked_req is not None:
        yield []
    yield [next(requests)(min(_LAST, longest))]


def _request(number: int, sampling: dict[str, Any], num_tokens: int) -> Any:
    """As SGLang's tokenizer process sends it. None has a prefix of another."""
    params = SamplingParams(max_new_tokens=_OUTPUT, ignore_eos=True, **sampling)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=f"evenflow-{number}",
        input_text="",
        input_ids=array("q", [number, *(1 + position % 100 for position in range(1, num_tokens))]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


def _serve(scheduler: Any, script: Iterator[list[Any]]) -> None:
    """Run SGLang's loop until these requests have ended; what clients send meanwhile stays in the socket."""

    turns = iter(range(_MOST_TURNS))

    def receive(_: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if next(turns, None) is None:
            raise TimeoutError(f"the requests did not end within {_MOST_TURNS} turns of SGLang's loop")
        arrived = next(script, None)
        scheduler.gracefully_exit = arrived is None and scheduler.is_fully_idle()
        return arrived or []

    def send(_: Any, *args: Any, **kwargs: Any) -> None:
        return

    try:
        with (
            _replaced(type(scheduler.request_receiver), "recv_requests", receive),
            _replaced(type(scheduler.output_streamer), "stream_output", send),
        ):
            scheduler.run_event_loop()
    finally:
        scheduler.gracefully_exit = False


@contextmanager
def _replaced(kind: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """On the class: its instances may have no place for it."""
    own = vars(kind).get(name)
    setattr(kind, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(kind, name)
        else:
            setattr(kind, name, own)


def _empty(scheduler: Any) -> None:
    """As it was before the first request, even if a step failed."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    scheduler.waiting_queue, scheduler.chunked_req, scheduler.last_batch = [], None, None
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    if hasattr(scheduler, "result_queue"):
        scheduler.result_queue.clear()
    scheduler.flush_cache()
