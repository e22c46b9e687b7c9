"""A policy of one's own: small chunks while many streams decode, large ones otherwise.

Run: python examples/own_policy.py

Once registered, it is chosen by its text like any other: LLM("default", policy="gentle:512"). To have it on the command
line too, keep the file in `evenflow/core` and add its kind to the list in `core/policies.py`.
"""

from __future__ import annotations

from evenflow.core.plan import ChunkReason, StepPlan
from evenflow.core.policies import PolicySpec, register_policy
from evenflow.core.policy import Argument, Policy, PolicyKind, Quotas, StepView, share_out
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.executors.fake import FakeExecutor


class Gentle(Policy):
    """All of the budget, or a quarter of it while more than two streams decode."""

    def plan(self, view: StepView) -> Quotas:
        tokens = self.max_step_tokens // (4 if view.num_decodes > 2 else 1)
        return Quotas(run_decodes=True, chunks=tuple(share_out(view, tokens, ChunkReason.BUDGET)))


GENTLE = register_policy(
    PolicyKind(
        name="gentle",
        argument=Argument.BUDGET,
        examples={"gentle:512": "small chunks while many streams decode"},
        build=lambda spec: Gentle(spec.budget),
    )
)


def main() -> None:
    executor = FakeExecutor()
    config = SchedulerConfig(num_blocks=1000, policy=PolicySpec.parse("gentle:512"))
    scheduler = Scheduler(config, executor.caps)
    for name, length, answer in (*((f"chat {n}", 20, 4 * n) for n in range(1, 5)), ("long", 3000, 1)):
        sampling = SamplingParams(max_tokens=answer)
        scheduler.add(Request(name, list(range(length)), sampling, seed=0, max_model_len=4096))
    while (plan := scheduler.schedule(executor.clock())) is not None:
        executor.submit(plan)
        scheduler.commit(executor.wait(), executor.clock())
        print(describe(plan))


def describe(plan: StepPlan) -> str:
    chunks = ", ".join(f"{chunk.length} of {chunk.request_id}" for chunk in plan.chunks)
    return f"step {plan.step_id}: {len(plan.decodes)} decodes; prefill: {chunks or 'none'}"


if __name__ == "__main__":
    main()
