"""Each policy of the table: how much prefill it lets in beside the decodes, and why."""

from __future__ import annotations

from evenflow.core.plan import ExecutorCaps, StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.policy import FLOOR_STEPS, FLOOR_TOKENS, Candidate, Policy, StepView
from evenflow.core.step_time import StepTimeModel
from tests.core.driving import Driver, layout


def view(
    num_decodes: int,
    *lengths: int,
    max_num_seqs: int = 5,
    threshold: int = 0,
    free: int = 10_000,
    turn: int | None = None,
) -> StepView:
    return StepView(
        now=0.0,
        num_in_flight=0,
        num_decodes=num_decodes,
        decode_context=100 * num_decodes,
        earliest_deadline=None,
        tightest_target=None,
        overhead=0.0,
        step_time=StepTimeModel(),
        max_num_seqs=max_num_seqs,
        candidates=[Candidate(f"c{index}", 0, length, length) for index, length in enumerate(lengths)],
        free_tokens=free,
        long_prefill_token_threshold=threshold,
        caps=ExecutorCaps(),
        turn=len(lengths) if turn is None else turn,
    )


def make_policy(text: str, budget: int) -> Policy:
    return PolicySpec.parse(text).bounded(budget).build()


def chunks(policy: str, step_view: StepView, budget: int = 2048) -> list[tuple[int, int, str]]:
    quotas = make_policy(policy, budget).plan(step_view)
    return [(quota.candidate, quota.tokens, str(quota.reason)) for quota in quotas.chunks]


def test_unchunked_takes_whole_prompts_and_always_one() -> None:
    assert chunks("unchunked", view(3, 500, 700, 900, 10)) == [(0, 500, "end_of_prompt"), (1, 700, "end_of_prompt")]
    assert chunks("unchunked", view(3, 2048)) == [(0, 2048, "end_of_prompt")]


def test_unchunked_prefills_in_one_step_beside_decodes() -> None:
    driver = Driver("unchunked")
    driver.add(10, max_tokens=4, name="chat")
    driver.step()
    long = driver.add(900, name="long")
    driver.run()
    assert layout(driver.plans[1]) == (["chat"], [("long", 0, 900)])
    assert driver.chunks(long) == [(0, 900)]


def test_alternate_runs_a_chunk_and_a_decode_step_in_turn() -> None:
    driver = Driver("alternate:32")
    driver.add(10, max_tokens=5, name="chat")
    driver.step()
    driver.add(80, max_tokens=2, name="long")
    driver.run()
    assert [layout(plan) for plan in driver.plans] == [
        ([], [("chat", 0, 10)]),
        (["chat"], []),
        ([], [("long", 0, 32)]),
        (["chat"], []),
        ([], [("long", 32, 32)]),
        (["chat"], []),
        ([], [("long", 64, 16)]),
        (["chat", "long"], []),
    ]
    assert driver.reasons(driver.requests["long"]) == ["chunk_size", "chunk_size", "end_of_prompt"]


def test_alternate_does_not_wait_where_nobody_decodes() -> None:
    driver = Driver("alternate:32")
    driver.add(80, max_tokens=1)
    driver.run()
    assert len(driver.plans) == 3


def test_fixed_gives_what_the_decodes_leave() -> None:
    assert chunks("fixed:64", view(10, 40, 100)) == [(0, 40, "end_of_prompt"), (1, 14, "budget")]


def test_decodes_run_even_beyond_the_budget_and_prefill_keeps_a_floor() -> None:
    policy = make_policy("fixed:8", 2048)
    crowded = view(8, 100)
    given = [policy.plan(crowded) for _ in range(2 * FLOOR_STEPS)]
    assert all(quotas.run_decodes for quotas in given)
    tokens = [sum(quota.tokens for quota in quotas.chunks) for quotas in given]
    assert tokens == ([0] * (FLOOR_STEPS - 1) + [min(FLOOR_TOKENS, 8)]) * 2
    assert str(given[FLOOR_STEPS - 1].chunks[0].reason) == "floor"


def test_a_prompt_gets_through_although_decodes_fill_the_budget() -> None:
    driver = Driver("fixed:2", num_blocks=4000)
    for _ in range(4):
        driver.add(2, max_tokens=900)
    late = driver.add(40, max_tokens=1)
    driver.run()
    assert late.num_output_tokens == 1
    assert sum(length for _, length in driver.chunks(late)) == 40


def test_load_follows_its_rule() -> None:
    assert chunks("load", view(1, 1000)) == [(0, 128, "chunk_size")]
    assert chunks("load", view(1, 3000)) == [(0, 256, "chunk_size")]
    assert chunks("load", view(5, 3000)) == [(0, 64, "chunk_size")]
    assert chunks("load", view(1, 30, 1000)) == [(0, 30, "end_of_prompt"), (1, 98, "chunk_size")]


def test_adaptive_doubles_when_steps_are_fast_and_halves_under_pressure() -> None:
    policy = make_policy("adaptive:100ms", 2048)
    shape = StepShape(128, 128, 128, 1, 0, 0, 1, 1)

    def size(num_decodes: int) -> int:
        return policy.plan(view(num_decodes, 4000)).chunks[0].tokens

    assert size(1) == 128
    policy.observe(shape, 0.03)
    assert size(1) == 256
    assert size(5) == 64
    for _ in range(20):
        policy.observe(shape, 0.3)
    assert size(1) == 128


def test_adaptive_learns_nothing_from_steps_without_prefill() -> None:
    policy = make_policy("adaptive", 2048)
    policy.observe(StepShape(5, 5, 0, 0, 5, 100, 1, 5), 0.001)
    assert policy.plan(view(1, 4000)).chunks[0].tokens == 128


def test_prompt_length_chooses_the_chunk_by_the_prompt() -> None:
    lengths = (1000, 5000, 20000)
    assert [chunks("prompt-length", view(0, length), 8192)[0][1] for length in lengths] == [512, 1024, 2048]
    assert chunks("prompt-length", view(0, 1000, 5000)) == [(0, 512, "chunk_size"), (1, 1024, "chunk_size")]


def test_every_policy_stays_within_the_budget_and_the_threshold() -> None:
    for policy in ("fixed:100", "load", "adaptive", "prompt-length"):
        quotas = make_policy(policy, 100).plan(view(20, 500, 500, threshold=48))
        assert sum(quota.tokens for quota in quotas.chunks) <= 80, policy
        assert all(quota.tokens <= 48 for quota in quotas.chunks), policy


# ---- tenants in turn ----


def test_what_ends_the_turn_of_a_tenant_is_not_delayed_by_prompts_of_others() -> None:
    """Others fill a quarter of such a step at most: it would not be efficient if it were shorter."""
    turn, end = "turn", "end_of_prompt"
    assert chunks("fixed:400", view(10, 200, 900, turn=1), 400) == [(0, 200, end)]
    assert chunks("fixed:400", view(10, 30, 900, turn=1), 400) == [(0, 30, end), (1, 60, turn)]
    assert chunks("fixed:400", view(10, 30, 40, 900, turn=2), 400) == [(0, 30, end), (1, 40, end), (2, 20, turn)]


def test_a_turn_that_does_not_end_in_this_step_takes_all_of_it() -> None:
    assert chunks("fixed:400", view(10, 500, 900, turn=1), 400) == [(0, 390, "budget")]
    alone = view(10, 200, 900)
    assert chunks("fixed:400", alone, 400) == [(0, 200, "end_of_prompt"), (1, 190, "budget")]
    capped = view(10, 200, 900, turn=1, threshold=100)
    assert chunks("fixed:400", capped, 400) == [(0, 100, "long_prefill"), (1, 100, "long_prefill")]


def test_a_stream_that_is_computed_again_is_no_first_token() -> None:
    again = Candidate("again", 0, 120, num_prompt_tokens=100)
    both = view(10, 900, turn=1)._replace(candidates=[again, Candidate("other", 0, 900, 900)])
    assert chunks("fixed:400", both, 400) == [(0, 120, "end_of_prompt"), (1, 270, "budget")]
