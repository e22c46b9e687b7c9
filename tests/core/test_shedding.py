"""Steps that shed rows: who pays for them, and what the step-time model learns."""

from __future__ import annotations

import pytest

from evenflow.core.plan import ExecutorCaps, Shed, StepPlan
from tests.core.driving import Driver

CAPS = ExecutorCaps(sheds_rows=True)


def keep_first_rows(plan: StepPlan, share: float) -> dict[int, Shed]:
    """Only this share of the prefill rows, but one of each chunk at least: the last chunks lose all others."""
    spare = int(share * sum(chunk.length for chunk in plan.chunks)) - len(plan.chunks)
    found = {}
    for number, chunk in enumerate(plan.chunks, len(plan.decodes)):
        kept = 1 + max(0, min(chunk.length - 1, spare))
        spare -= kept - 1
        if kept < chunk.length:
            found[number] = Shed(kept, (kept + chunk.length) // 2)
    return found


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3])
def test_a_tenant_pays_only_for_rows_that_were_computed(share: float) -> None:
    """The last chunk of a step, which loses its rows first, is mostly one of the long prompts of `long`."""
    driver = Driver(
        "target:300ms",
        caps=CAPS,
        cost=lambda shape: 0.01 + 0.0005 * shape.total_rows,
        shed=lambda plan: keep_first_rows(plan, share),
        num_blocks=20_000,
        max_num_seqs=64,
    )
    driver.add(20, max_tokens=100_000, tenant="stream")
    served = {"stream": 0, "long": 0, "short": 0}
    for _ in range(300):
        for tenant, length in (("long", 2000), ("short", 60)):
            unfinished = [one for one in driver.requests.values() if one.tenant == tenant and not one.is_finished]
            for _ in range(6 - len(unfinished)):
                driver.add(length, max_tokens=1, tenant=tenant)
        driver.step()
        for chunk in driver.outcomes[-1].computed.chunks:
            served[driver.requests[chunk.request_id].tenant] += chunk.length
    assert 0.85 < served["long"] / served["short"] < 1.2


def test_logits_are_only_of_rows_that_all_layers_computed() -> None:
    driver = Driver(
        "target:1000ms",
        caps=CAPS,
        cost=lambda shape: 0.001 * shape.total_rows,
        shed=lambda plan: keep_first_rows(plan, 0.2),
    )
    stream = driver.add(20, max_tokens=500)
    while not stream.num_output_tokens:
        driver.step()
    driver.add(400, prompt_logprobs=0)
    driver.step()
    outcome = driver.outcomes[-1]
    [chunk] = outcome.computed.chunks
    assert chunk.length < outcome.averaged.chunks[0].length < outcome.plan.chunks[0].length
    assert outcome.shape.prefill_rows == outcome.averaged.chunks[0].length
    assert outcome.shape.logit_rows == 1 + chunk.length
