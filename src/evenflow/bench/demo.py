"""The demo: what a latency target changes for small requests beside large ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evenflow.bench.comparison import resolved_for
from evenflow.bench.demo_run import DemoPrompt, DemoRun, DemoRunner, Size
from evenflow.bench.long_texts import GARDEN_DIARY, HARBOUR_LOG
from evenflow.core.policies import PolicySpec
from evenflow.counts import counted
from evenflow.engine.llm import LLM

FIXED_POLICY = PolicySpec.parse("fixed:512")  # a chunk size as people set it by hand
_ANSWER_TOKENS = 32
_LONG_ANSWER_TOKENS = 48  # enough for small answers to be decoded still when the last prompt arrives
_WARM_UP_TOKENS = 4
_MISSED_BY = 1.1  # times the target, as the benchmarks judge it
_TARGET_RUN_FACTOR = 1.5  # its time over that of the unchunked run: a guess


@dataclass(frozen=True, slots=True)
class DemoRuns:
    """The same requests without chunks, with a fixed chunk and under the engine's policy."""

    unchunked: DemoRun
    fixed: DemoRun | None  # None: not run
    chunked: DemoRun  # under the engine's policy

    @property
    def runs(self) -> list[DemoRun]:
        return [run for run in (self.unchunked, self.fixed, self.chunked) if run is not None]

    @property
    def same_text(self) -> bool:
        return len({tuple(answer.text for answer in run.answers) for run in self.runs}) == 1

    def gain(self) -> str:
        """What chunking changed for each kind of request, in one line."""
        after, before = self.chunked, self.unchunked
        first = _change(after.mean_ttft_s("small"), before.mean_ttft_s("small"))
        small = _change(after.mean_latency_s("small"), before.mean_latency_s("small"))
        large = _change(after.mean_latency_s("large"), before.mean_latency_s("large"))
        texts = "the answers are the same in all runs" if self.same_text else "some answers differ"
        return (
            f"With {after.policy} a small request's first token came after {first}, its last after {small}; a large "
            f"request took {large}; {texts}."
        )

    def verdict(self) -> str:
        """The longest pause without chunks and with them, and what that cost, in two lines."""
        before, after = self.unchunked, self.chunked
        more = after.total_s / before.total_s - 1
        target_s, missed = PolicySpec.parse(after.policy).target, ""
        if target_s is not None and after.longest_gap_s > _MISSED_BY * target_s:
            gaps, limit_s = after.timeline.gaps_s, _MISSED_BY * target_s
            num_late = counted(sum(gap > limit_s for gap in gaps), "gap")
            missed = (
                f" {num_late} of {len(gaps)} went over the target by more than {_MISSED_BY - 1:.0%}: steps took longer "
                "than predicted, as beside other programs."
            )
        return (
            f"Longest pause of a stream between two tokens: {before.longest_gap_s:.2f} s unchunked, "
            f"{after.longest_gap_s:.2f} s with {after.policy} ({_ratio(after.longest_gap_s, before.longest_gap_s)})."
            f"{missed}\n"
            f"What that cost: all {len(after.answers)} requests took {after.total_s:.1f} s instead of "
            f"{before.total_s:.1f} s ({abs(more):.0%} {'more' if more > 0 else 'less'})."
        )


def _change(after: float, before: float) -> str:
    return f"{after:.2f} s instead of {before:.2f} s ({_ratio(after, before)})"


def _ratio(after: float, before: float) -> str:
    if round(after, 2) == round(before, 2):
        return "the same"
    factor = f"{max(before, after) / min(before, after):.1f}"
    if factor == "1.0":
        return "about the same"
    return f"{factor} times {'shorter' if after < before else 'longer'}"


def simple_prompts(llm: LLM) -> list[DemoPrompt]:
    """Four prompts of mixed length."""
    paragraph = (
        "Tom has a red bicycle. Every morning he rides it to school with his sister Anna. In the afternoon they go "
        "to the library, where Anna reads books about dinosaurs. What color is Tom's bicycle?"
    )
    return [
        _prompt(llm, "question", "small", "What is the capital of France?"),
        _prompt(llm, "list", "small", "Name three primary colors."),
        _prompt(llm, "paragraph", "small", paragraph),
        _prompt(llm, "page", "large", GARDEN_DIARY.of_length(400, _token_counter(llm))),
    ]


def mixed_prompts(llm: LLM) -> list[DemoPrompt]:
    """A large prompt, three small ones behind it, and another large one that arrives while they are answered."""
    count_tokens = _token_counter(llm)
    return [
        _prompt(llm, "large_1", "large", HARBOUR_LOG.of_length(2000, count_tokens)),
        _prompt(llm, "small_1", "small", "Tell me a story about a fox.", _LONG_ANSWER_TOKENS),
        _prompt(llm, "small_2", "small", "How does rain form?", _LONG_ANSWER_TOKENS),
        _prompt(llm, "small_3", "small", "How do I bake bread at home?", _LONG_ANSWER_TOKENS),
        _prompt(llm, "large_2", "large", GARDEN_DIARY.of_length(1500, count_tokens)),
    ]


def _token_counter(llm: LLM) -> Callable[[str], int]:
    return lambda text: len(llm.tokenizer.encode(text, add_special_tokens=False))


def _prompt(llm: LLM, name: str, size: Size, text: str, max_tokens: int = _ANSWER_TOKENS) -> DemoPrompt:
    if llm.tokenizer.has_chat_template:
        token_ids = llm.encode_chat([{"role": "user", "content": text}])
    else:
        token_ids = llm.tokenizer.encode(text)
    llm.engine.limits.check_length(len(token_ids), max_tokens)
    return DemoPrompt(name, size, token_ids, _token_counter(llm)(text), max_tokens)


def compare_policies(runner: DemoRunner, prompts: Sequence[DemoPrompt], end_by: float | None = None) -> DemoRuns:
    """Run the prompts unchunked, with a fixed chunk, and under the engine's policy.

    Unchunked, the last prompt arrives when every small answer has some tokens; in the other runs, after the same time.
    The run with a fixed chunk is left out if the engine's own policy has one, or if the runs would not end by the
    clock's `end_by`.
    """
    chosen = runner.engine.policy
    _warm_up(runner, prompts)
    unchunked = _run_policy(runner, prompts, PolicySpec.parse("unchunked"), None)
    arrival_s, left_s = unchunked.last_arrival_s, (1 + _TARGET_RUN_FACTOR) * unchunked.total_s
    fixed = None
    if chosen.name != FIXED_POLICY.name and (end_by is None or runner.engine.clock() + left_s <= end_by):
        fixed = _run_policy(runner, prompts, FIXED_POLICY, arrival_s)
    return DemoRuns(unchunked, fixed, _run_policy(runner, prompts, chosen, arrival_s))


def _warm_up(runner: DemoRunner, prompts: Sequence[DemoPrompt]) -> None:
    """The first steps of a process are slow: they must not count against a policy."""
    shortest = min(prompts, key=lambda prompt: len(prompt.token_ids))
    DemoRunner(runner.engine, runner.codec).run([replace(shortest, max_tokens=_WARM_UP_TOKENS)], "warm-up")


def _run_policy(
    runner: DemoRunner, prompts: Sequence[DemoPrompt], policy: PolicySpec, last_arrival_s: float | None
) -> DemoRun:
    engine = runner.engine
    engine.set_policy(resolved_for(engine, policy))
    return runner.run(prompts, str(policy), last_arrival_s)
