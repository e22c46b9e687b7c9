"""evenflow's own engine on this machine, in real time: what each request of a load sees, as in `virtual_engine`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from statistics import median

from virtual_engine import Arrival, Outcome, Served, Setup, by_tenant

from evenflow import LLM, SamplingParams
from evenflow.core.report import StepReport
from evenflow.core.request import Request


class CpuEngine:
    """Serves loads with a model, loaded anew for each, so that no run finds the caches of another."""

    def __init__(self, model: str, weights: str) -> None:
        self._settings = {"model": model, "weights": weights, "max_num_seqs": 8, "enable_prefix_caching": False}

    def prefill_tokens_per_s(self, step_s: float) -> float:
        """In steps of this many seconds: shorter steps are slower, so their size is found in a few tries."""
        prompts = [random.Random(seed).choices(range(100, 10_000), k=512) for seed in range(3)]
        speed, num_tokens = 0.0, 256
        for _ in range(3):
            with LLM(**self._settings, policy=f"fixed:{num_tokens}") as llm:  # type: ignore[arg-type]
                outputs = [llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0))[0] for prompt in prompts]
            speed = median(output.prefill_tokens_per_s or 0.0 for output in outputs)
            num_tokens = max(16, round(step_s * speed))
        return speed

    def __call__(self, arrivals: Iterable[Arrival], setup: Setup, until: float, *, keeps_work: bool = False) -> Outcome:
        """Serve a load until this time."""
        if setup.rule == "priority":
            raise ValueError("Got the rule 'priority' but the real engine has only 'shares' and 'fcfs'.")
        settings = self._settings | {"policy": setup.policy, "classes": setup.classes}
        with LLM(**settings, tenant_weights=setup.tenant_weights) as llm:  # type: ignore[arg-type]
            coming = sorted(arrivals, key=lambda one: one.at)
            requests = [_request(llm, number, one, setup) for number, one in enumerate(coming)]
            return _serve(llm, coming, requests, until, keeps_work)


def _request(llm: LLM, number: int, arrival: Arrival, setup: Setup) -> Request:
    rng = random.Random(f"{setup.seed} {number}")
    is_shared = setup.rule == "shares"
    return llm.prepare(
        [rng.randrange(100, 10_000) for _ in range(arrival.num_prompt_tokens)],
        SamplingParams(max_tokens=arrival.num_output_tokens, temperature=0.0, ignore_eos=True),
        request_id=str(number),
        tenant=arrival.tenant if is_shared else "",
        service_class=arrival.service_class if is_shared else None,
    )


def _serve(llm: LLM, coming: list[Arrival], requests: list[Request], until: float, keeps_work: bool) -> Outcome:
    served = [Served(arrival) for arrival in coming]
    outcome = Outcome(served, until)
    start, next_arrival = time.perf_counter(), 0
    while (now := time.perf_counter() - start) < until:
        while next_arrival < len(coming) and coming[next_arrival].at <= now:
            requests[next_arrival].arrival_time = start + coming[next_arrival].at
            llm.engine.add(requests[next_arrival])
            next_arrival += 1
        report = llm.engine.step()
        if report is None:
            if next_arrival == len(coming):
                break
            time.sleep(max(0.0, min(until, coming[next_arrival].at) - now))
            continue
        outcome.num_steps += 1
        at = report.at - start
        if keeps_work:
            outcome.work += [(at, tenant, work) for tenant, work in by_tenant(_work(report, coming))]
        for request_id, tokens in zip(report.ids, report.tokens, strict=True):
            if tokens:
                served[int(request_id)].took(at)
    outcome.seconds = time.perf_counter() - start
    outcome.served = [one for one in served if one.arrival.at <= outcome.seconds]
    for request_id, request in llm.engine.scheduler.requests.items():
        served[int(request_id)].num_prefilled = request.num_committed
    outcome.count()
    return outcome


def _work(report: StepReport, coming: list[Arrival]) -> Iterator[tuple[str, float]]:
    """A step's seconds by tenant, by rows."""
    rows = [(request_id, 1) for request_id in report.decoded] + [(one.request_id, one.length) for one in report.chunks]
    of_row = report.seconds / max(1, sum(count for _, count in rows))
    return ((coming[int(request_id)].tenant, of_row * count) for request_id, count in rows)
