"""What a server's log means and what to do about it, each sentence with the lines it is based on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from evenflow.advisor.folk_rules import FOLK_RULES, FolkRule
from evenflow.advisor.server_logs import BUDGET_SOURCES, Fact, LogFacts
from evenflow.advisor.sglang_flags import in_sglangs_words
from evenflow.advisor.vllm_flags import NEWEST_VERSION, caps_lone_prompts
from evenflow.core.policies import WHOLE_PROMPTS
from evenflow.counts import counted
from evenflow.errors import InvalidInput

_FULL = 0.9  # of the KV cache: the next long prompt must wait for another request to finish
_ROOMY = 0.5
_TARGET = "To bound milliseconds, give --tbt-target."
_LIVE = "set while the server ran"


_WAYS_TO_TARGET = {  # what to use in an engine, and what else starts it
    "vllm": ("scheduler for vLLM", "--scheduler-cls evenflow.vllm.LatencyTargetScheduler"),
    "sglang": ("plug-in for SGLang", "EVENFLOW_TBT_TARGET=50ms where evenflow is installed beside SGLang"),
}


def how_to_target(engine: str, model: str = "MODEL") -> str:
    """How to get a latency target there, with a command to paste."""
    what, otherwise = _WAYS_TO_TARGET[engine]
    return (
        f"To bound milliseconds, use evenflow's {what}: evenflow serve --engine {engine} --model {shlex.quote(model)} "
        f"--tbt-target 50ms, or {otherwise}."
    )


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence, and the numbers of the lines it is based on."""

    text: str
    line_numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, and which way it moves settings: ("max_num_seqs", -1) lowers it."""

    statement: Statement
    moves: frozenset[tuple[str, int]] = frozenset()

    def contradicts(self, other: Advice) -> bool:
        return any((setting, -way) in other.moves for setting, way in self.moves)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A log, explained."""

    advice: list[Statement]
    meaning: list[Statement]
    facts: list[Fact]
    rules: list[FolkRule]

    def as_json(self) -> dict[str, Any]:
        rules = [{"rule": rule.rule, "verdict": rule.verdict, "truth": rule.truth} for rule in self.rules]
        return asdict(self) | {"rules": rules}


def explain(facts: LogFacts, *, all_rules: bool = False) -> Explanation:
    given = [*_advice_on_problems(facts), *_advice_on_settings(facts), *_advice_on_load(facts)]
    advice = [one.statement for one in _without_contradictions(given)]
    if facts.is_sglang:
        advice = [replace(statement, text=in_sglangs_words(statement.text)) for statement in advice]
    return Explanation(
        facts=list(_all_facts(facts)),
        meaning=[*_meaning_of_settings(facts), *_meaning_of_ranks(facts), *_meaning_of_load(facts)],
        advice=advice,
        # The rules are about vLLM.
        rules=[rule for rule in FOLK_RULES if all_rules or (not facts.is_sglang and rule.comes_up(facts))],
    )


def memory_pressure(facts: LogFacts) -> str | None:
    """The evidence in a log that memory was short, or None."""
    for fact in facts.problems.values():
        if "memory" in fact.name or fact.name == "preemption":
            return f"{fact.name} in line {fact.line_number} of the log"
    if facts.num_preemptions:
        return f"{facts.num_preemptions} preemptions in the log"
    usage = facts.peak("kv_cache_usage") or 0.0
    if usage >= _FULL:
        return f"the KV cache was {usage:.0%} full in line {facts.highest['kv_cache_usage'].line_number} of the log"
    return None


def _all_facts(facts: LogFacts) -> Iterator[Fact]:
    yield from (fact for name, fact in facts.settings.items() if name not in BUDGET_SOURCES)
    if (budget := facts.budget_fact) is not None:
        yield replace(budget, name="chunk_budget")
        if not facts.is_sglang:
            requested = facts.settings.get("budget_asked_for")
            if _is_set_live(facts):
                yield replace(budget, name="chunk_budget_is", value=_LIVE)
            else:
                origin = "asked for" if requested else "the default"
                yield replace(requested or budget, name="chunk_budget_is", value=origin)
    yield from (*facts.ranks.values(), *facts.problems.values())
    for figure, line in facts.highest.items():
        yield replace(line, name=f"highest_{figure}", value=line.value[figure])
    if facts.peak("running") and (rate := facts.highest["running"].value.get("generation_tokens_per_s")) is not None:
        busiest = facts.highest["running"]
        yield replace(busiest, name="tokens_per_s_of_each_request", value=rate / busiest.value["running"])
    if facts.last is not None:
        for figure, value in facts.last.value.items():
            yield replace(facts.last, name=f"last_{figure}", value=value)
        if facts.num_preemptions:
            yield replace(facts.last, name="preemptions_in_all", value=facts.num_preemptions)


def _statement(facts: LogFacts, text: str, *names: str) -> Statement:
    """A statement based on the facts with these names."""
    found = (facts.settings.get(name) or facts.problems.get(name) or facts.highest.get(name) for name in names)
    return Statement(text, tuple(dict.fromkeys(fact.line_number for fact in found if fact is not None)))


def _meaning_of_settings(facts: LogFacts) -> Iterator[Statement]:
    tokens, context = facts.budget, facts.value("max_model_len")
    if (target := facts.value("latency_target")) is not None:
        seconds = str(target).removesuffix(",paced")
        text = f"Each step takes as much prefill as keeps every stream's next token within {seconds}."
        yield _statement(facts, text, "latency_target")
    elif _is_unchunked(facts):
        text = "Prompts are prefilled whole; no stream gets a token meanwhile."
        yield _statement(facts, text, "chunked_prefill", "unchunked_budget", "chunking_asked_for", "policy")
    elif tokens is not None and facts.value("mixed_chunks") is False:
        text = f"A step of prefill holds at most {tokens:,} tokens; no stream gets a token until the prompt is done."
        yield _statement(facts, text, *BUDGET_SOURCES, "mixed_chunks")
    elif tokens is not None:
        source = "as configured" if "budget_asked_for" in facts.settings else "the default for this hardware and use"
        source = _LIVE if _is_set_live(facts) else source
        source = "" if facts.is_sglang else f" ({source})"  # SGLang does not say
        text = f"A step holds at most {tokens:,} tokens{source}, decodes and chunks together."
        cap = facts.value("long_prefill_token_threshold") or 0
        caps_lone = cap > 0 and _caps_lone_prompts(facts)
        if context:
            num_steps = -(-context // (min(tokens, cap) if caps_lone else tokens))
            text += f" Alone, a prompt of the whole context ({context:,} tokens) takes {counted(num_steps, 'step')}."
        yield _statement(facts, text, *BUDGET_SOURCES, "max_model_len")
        if cap:
            when = "even if it is alone" if caps_lone else "beside other requests; alone, it gets the whole step"
            text = f"One prompt gets at most {cap:,} tokens of a step {when}."
            yield _statement(facts, text, "long_prefill_token_threshold", "version")
    if (capacity := facts.value("kv_cache_tokens")) is not None:
        requests = f", {capacity / context:.1f} requests of the whole context" if context else ""
        yield _statement(facts, f"The KV cache holds {capacity:,} tokens{requests}.", "kv_cache_tokens")


def _caps_lone_prompts(facts: LogFacts) -> bool:
    try:
        return caps_lone_prompts(facts.value("version") or NEWEST_VERSION)
    except InvalidInput:  # a development build
        return False


def _is_set_live(facts: LogFacts) -> bool:
    """Is the budget that of a policy set while the server ran?"""
    policy, budget = facts.settings.get("policy"), facts.budget_fact
    return policy is not None and budget is not None and policy.line_number == budget.line_number


def _is_unchunked(facts: LogFacts) -> bool:
    if facts.value("policy") == str(WHOLE_PROMPTS):
        return True
    if (is_chunked := facts.value("chunked_prefill")) is not None:
        return not is_chunked  # the outcome, whatever was asked for
    return "unchunked_budget" in facts.settings or facts.value("chunking_asked_for") is False


def _meaning_of_ranks(facts: LogFacts) -> Iterator[Statement]:
    if not facts.ranks:
        return
    ranks = [fact.value for fact in facts.ranks.values()]
    world_size = ranks[-1]["world_size"]
    parts = []
    for kind, rank_name in (("tensor", "tp_rank"), ("pipeline", "pp_rank"), ("data", "dp_rank")):
        # Often the log has only one rank's line, which does not show the number of ranks.
        seen = len({rank[rank_name] for rank in ranks}) if len(ranks) == world_size else None
        size = facts.value(f"{kind}_parallel_size") or seen
        parts.append(f"{kind} parallel {size or 'unknown'}")
    processes = "1 process computes" if world_size == 1 else f"{world_size} processes compute"
    lines = tuple(fact.line_number for fact in facts.ranks.values())
    yield Statement(f"{processes} the model: {', '.join(parts)}.", lines)


def _meaning_of_load(facts: LogFacts) -> Iterator[Statement]:
    if running := facts.peak("running"):
        busiest = facts.highest["running"].value
        waiting, rate = busiest.get("waiting"), busiest.get("generation_tokens_per_s")
        were_running = f"{counted(running, 'request')} {'was' if running == 1 else 'were'} running"
        text = f"At the peak, {were_running}" + ("" if waiting is None else f" and {waiting} waiting")
        if rate is not None:
            text += (
                f"; the server generated {rate:,.1f} tokens per second, {rate / running:,.1f} for each running request"
            )
        most_waiting, fastest = facts.peak("waiting") or 0, facts.peak("generation_tokens_per_s") or 0.0
        others = {"waiting": f"{most_waiting} waited"} if most_waiting > (waiting or 0) else {}
        if fastest > (rate or 0.0):
            others["generation_tokens_per_s"] = f"{fastest:,.1f} tokens per second were generated"
        text += f". At another time, up to {' and '.join(others.values())}" if others else ""
        yield _statement(facts, f"{text}.", "running", *others)
    if (usage := facts.peak("kv_cache_usage")) is not None:
        yield _statement(facts, f"KV cache usage peaked at {usage:.1%}.", "kv_cache_usage")
    if facts.last is not None and facts.hit_rate is not None:
        text = f"The prefix cache held {facts.hit_rate:.1%} of the prompt tokens looked up."
        yield Statement(text, (facts.last.line_number,))


_ADVICE_ON_PROBLEMS = {
    "out of memory": "Lower --gpu-memory-utilization if memory ran out while serving; else lower --max-model-len or "
    "--max-num-seqs, quantize, or spread the model (--tensor-parallel-size). A lower --max-num-batched-tokens frees "
    "only a step's activations.",
    "no memory for the KV cache": "The weights leave no room: raise --gpu-memory-utilization, quantize, or spread the "
    "model over more GPUs (--tensor-parallel-size).",
    "context over the KV cache": "Lower --max-model-len to what fits, or raise --gpu-memory-utilization; the message "
    "names the length that would fit.",
    "budget under the context": "Leave chunked prefill on: without it a prompt of the whole context must fit into one "
    "step. Else raise --max-num-batched-tokens to --max-model-len, or lower --max-model-len.",
    "budget under max_num_seqs": "Every running request needs a token of the step: lower --max-num-seqs to the budget, "
    "or raise --max-num-batched-tokens.",
    "threshold over the context": "Lower --long-prefill-token-threshold to at most --max-model-len; 0, the default, "
    "is no limit.",
    "partial prefills": "Leave --max-num-partial-prefills and --max-long-partial-prefills out: the V1 engine accepts "
    "only 1, and 0.27 removed them.",
    "chunking off is not supported": "Leave --no-enable-chunked-prefill out: prompts that fit into the budget are not "
    "cut anyway.",
    "unknown flags": "Leave out {value}: this vLLM does not have it.",
    "target too low": "Raise the target to the lowest feasible one, which the line names, or serve fewer streams.",
    "preemption": "Requests lost their KV cache and were recomputed: lower --max-num-seqs, or enlarge the KV cache.",
}


_LESS_KV, _MORE_KV = ("gpu_memory_utilization", -1), ("gpu_memory_utilization", 1)
_FEWER, _MORE = ("max_num_seqs", -1), ("max_num_seqs", 1)
_SMALLER_STEPS, _LARGER_STEPS = ("max_num_batched_tokens", -1), ("max_num_batched_tokens", 1)
_MOVES = {
    "out of memory": {_LESS_KV, _FEWER},
    "no memory for the KV cache": {_MORE_KV},
    "context over the KV cache": {_MORE_KV},
    "budget under the context": {_LARGER_STEPS},
    "budget under max_num_seqs": {_FEWER, _LARGER_STEPS},
    "target too low": {_FEWER},
    "preemption": {_FEWER},
}
_SHORT_OF_BOTH = (
    "Memory is short for steps and for the KV cache at once: lower --max-model-len or --max-num-seqs, quantize, or "
    "spread the model over more GPUs (--tensor-parallel-size)."
)


def _without_contradictions(given: list[Advice]) -> list[Advice]:
    """The same advice, the problems' first; without any that moves a setting the other way."""
    short = [one for one in given if {_LESS_KV, _MORE_KV} & one.moves]
    if any(one.contradicts(other) for one in short for other in short):
        lines = sorted({number for one in short for number in one.statement.line_numbers})
        both = Advice(Statement(_SHORT_OF_BOTH, tuple(lines)), frozenset({_FEWER}))
        given = [both, *(one for one in given if one not in short)]
    kept: list[Advice] = []
    for one in given:
        if not any(one.contradicts(earlier) for earlier in kept):
            kept.append(one)
    return kept


def _advice_on_problems(facts: LogFacts) -> Iterator[Advice]:
    for name, fact in facts.problems.items():
        text = _ADVICE_ON_PROBLEMS[name].format(value=fact.value)
        yield Advice(Statement(text, (fact.line_number,)), frozenset(_MOVES.get(name, ())))


def _advice_on_settings(facts: LogFacts) -> Iterator[Advice]:
    if facts.value("latency_target") is None and facts.budget is not None and facts.budget > 512:
        text = (
            f"If streams stutter while long prompts arrive, they are waiting for steps of {facts.budget:,} tokens. A "
            "lower --max-num-batched-tokens, such as 512, shortens the steps but delays a long prompt's first token. "
        )
        target = how_to_target("sglang" if facts.is_sglang else "vllm", str(facts.value("model") or "MODEL"))
        target = _TARGET if facts.value("written_by") == "evenflow" else target
        yield Advice(_statement(facts, text + target, *BUDGET_SOURCES), frozenset({_SMALLER_STEPS}))
    if facts.value("prefix_caching") is False or facts.value("radix_cache_off"):
        text = "Prefix caching is off: unless this is a benchmark, leave out --no-enable-prefix-caching."
        yield Advice(_statement(facts, text, "prefix_caching", "radix_cache_off"))


def _advice_on_load(facts: LogFacts) -> Iterator[Advice]:
    waiting, usage = facts.peak("waiting"), facts.peak("kv_cache_usage") or 0.0
    if facts.num_preemptions or usage >= _FULL:
        text = (
            "The KV cache is the bottleneck: enlarge it (--gpu-memory-utilization, a lower --max-model-len, or "
            "--kv-cache-dtype fp8 if the GPU supports it), lower --max-num-seqs to preempt fewer requests, or add "
            "replicas."
        )
        yield Advice(_statement(facts, text, "kv_cache_usage"), frozenset({_MORE_KV, _FEWER}))
    elif waiting and usage < _ROOMY:
        max_num_seqs = facts.value("max_num_seqs")
        is_reached = max_num_seqs == facts.peak("running")
        limit = f"--max-num-seqs {max_num_seqs}" if is_reached else "--max-num-seqs or a step's tokens"
        text = (
            f"Requests waited while the KV cache had room: {limit} is the bottleneck. Raising it serves more requests "
            "at once, each more slowly; another replica (--data-parallel-size) keeps their speed."
        )
        yield Advice(_statement(facts, text, "waiting"), frozenset({_MORE}))
