"""What a server's log means and what to do about it, each sentence with the lines it is based on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from evenflow.advisor.folk_rules import FOLK_RULES, FolkRule
from evenflow.advisor.vllm_logs import BUDGET_SOURCES, Fact, LogFacts

_FULL = 0.9  # of the KV cache: the next long prompt must wait for another request to finish
_ROOMY = 0.5
_TARGET = "give --tbt-target instead for a bound in milliseconds"
_TARGET_IN_VLLM = (
    "for a bound in milliseconds there is evenflow's own scheduler for vLLM: evenflow serve --engine vllm "
    "--tbt-target 50ms, or --scheduler-cls evenflow.vllm.LatencyTargetScheduler"
)


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence, and the numbers of the lines it is based on."""

    text: str
    line_numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A log, explained."""

    facts: list[Fact]
    meaning: list[Statement]
    advice: list[Statement]
    rules: list[FolkRule]

    def as_json(self) -> dict[str, Any]:
        return {
            "facts": [asdict(fact) for fact in self.facts],
            "meaning": [asdict(statement) for statement in self.meaning],
            "advice": [asdict(statement) for statement in self.advice],
            "rules": [{"rule": rule.rule, "verdict": rule.verdict, "truth": rule.truth} for rule in self.rules],
        }


def explain(facts: LogFacts, *, all_rules: bool = False) -> Explanation:
    return Explanation(
        facts=list(_all_facts(facts)),
        meaning=[*_meaning_of_settings(facts), *_meaning_of_ranks(facts), *_meaning_of_load(facts)],
        advice=[*_advice_on_problems(facts), *_advice_on_settings(facts), *_advice_on_load(facts)],
        rules=[rule for rule in FOLK_RULES if all_rules or rule.comes_up(facts)],
    )


def memory_pressure(facts: LogFacts) -> str | None:
    """How the log shows that memory was short, or None if it does not."""
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
        requested = facts.settings.get("budget_asked_for")
        yield replace(requested or budget, name="chunk_budget_is", value="asked for" if requested else "the default")
    yield from (*facts.ranks.values(), *facts.problems.values())
    for figure, interval in facts.highest.items():
        yield interval.fact(f"highest_{figure}", getattr(interval, figure))
    busiest = facts.highest.get("running")
    if busiest is not None and busiest.running:
        yield busiest.fact("tokens_per_s_of_each_request", busiest.generation_tokens_per_s / busiest.running)
    if facts.last is None:
        return
    for figure in (*facts.highest, "prefix_hit_rate"):
        if (value := getattr(facts.last, figure)) is not None:
            yield facts.last.fact(f"last_{figure}", value)
    if facts.num_preemptions:
        yield facts.last.fact("preemptions_in_all", facts.num_preemptions)


def _lines(facts: LogFacts, *names: str) -> tuple[int, ...]:
    found = (facts.settings.get(name) or facts.problems.get(name) or facts.highest.get(name) for name in names)
    return tuple(dict.fromkeys(fact.line_number for fact in found if fact is not None))


def _meaning_of_settings(facts: LogFacts) -> Iterator[Statement]:
    tokens, context = facts.budget, facts.value("max_model_len")
    if (target := facts.value("latency_target")) is not None:
        text = f"Each step holds as much prefill as keeps every stream's next token within {target}."
        yield Statement(text, _lines(facts, "latency_target"))
    elif _is_unchunked(facts):
        text = "Prompts are prefilled whole: meanwhile no stream gets a token."
        yield Statement(text, _lines(facts, "chunked_prefill", "unchunked_budget", "chunking_asked_for"))
    elif tokens is not None:
        why = "as asked for" if "budget_asked_for" in facts.settings else "the default for this hardware and use"
        text = f"A step holds at most {tokens:,} tokens ({why}), decodes and chunks together."
        if context:
            text += f" A prompt of the whole context ({context:,} tokens) takes {-(-context // tokens)} of them."
        yield Statement(text, _lines(facts, *BUDGET_SOURCES, "max_model_len"))
    if (capacity := facts.value("kv_cache_tokens")) is not None:
        requests = f", {capacity / context:.1f} requests of the whole context" if context else ""
        yield Statement(f"The KV cache holds {capacity:,} tokens{requests}.", _lines(facts, "kv_cache_tokens"))


def _is_unchunked(facts: LogFacts) -> bool:
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
    busiest = facts.highest.get("running")
    if busiest is None:
        return
    if busiest.running:
        yield Statement(
            f"At its busiest {busiest.running} requests ran and {busiest.waiting} waited; together they got "
            f"{busiest.generation_tokens_per_s:,.1f} tokens per second, "
            f"{busiest.generation_tokens_per_s / busiest.running:,.1f} each.",
            (busiest.line_number,),
        )
    if (usage := facts.peak("kv_cache_usage")) is not None:
        yield Statement(f"At most {usage:.1%} of the KV cache was in use.", _lines(facts, "kv_cache_usage"))
    if facts.last is not None and facts.hit_rate is not None:
        yield Statement(f"{facts.hit_rate:.1%} of the prompt tokens looked up were cached.", (facts.last.line_number,))


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
    "partial prefills": "Leave --max-num-partial-prefills and --max-long-partial-prefills out: the V1 engine takes no "
    "value but 1, and 0.27 removed them.",
    "chunking off is not supported": "Leave --no-enable-chunked-prefill out: prompts that fit into the budget are not "
    "cut anyway.",
    "unknown flags": "Leave out {value}: this vLLM does not have it.",
    "target too low": "Raise the target to the lowest feasible one, which the line names, or serve fewer streams.",
    "preemption": "Requests lost their KV and were computed again: lower --max-num-seqs, or give the KV more room.",
}


def _advice_on_problems(facts: LogFacts) -> Iterator[Statement]:
    for name, fact in facts.problems.items():
        yield Statement(_ADVICE_ON_PROBLEMS[name].format(value=fact.value), (fact.line_number,))


def _advice_on_settings(facts: LogFacts) -> Iterator[Statement]:
    if facts.value("latency_target") is None and facts.budget is not None and facts.budget > 512:
        target = _TARGET if facts.value("written_by") == "evenflow" else _TARGET_IN_VLLM
        yield Statement(
            f"If streams stutter while long prompts arrive: they wait for steps of {facts.budget:,} tokens. A lower "
            "--max-num-batched-tokens (512, say) shortens the steps and lengthens the time to a long prompt's first "
            f"token; {target}.",
            _lines(facts, *BUDGET_SOURCES),
        )
    if facts.value("prefix_caching") is False:
        text = "Prefix caching is off: unless this is a benchmark, leave out --no-enable-prefix-caching."
        yield Statement(text, _lines(facts, "prefix_caching"))


def _advice_on_load(facts: LogFacts) -> Iterator[Statement]:
    waiting, usage = facts.peak("waiting"), facts.peak("kv_cache_usage") or 0.0
    if facts.num_preemptions or usage >= _FULL:
        yield Statement(
            "The KV cache is what limits: give it more room (--gpu-memory-utilization, a lower --max-model-len, "
            "--kv-cache-dtype fp8 if the GPU has it), lower --max-num-seqs so that fewer requests lose theirs, or "
            "add replicas.",
            _lines(facts, "kv_cache_usage"),
        )
    elif waiting and usage < _ROOMY:
        max_num_seqs = facts.value("max_num_seqs")
        is_reached = max_num_seqs == facts.peak("running")
        limit = f"--max-num-seqs {max_num_seqs}" if is_reached else "--max-num-seqs or a step's tokens"
        yield Statement(
            f"Requests waited while the KV cache had room: {limit} is what limits. Raising it serves more requests at "
            "once, each more slowly; another replica (--data-parallel-size) keeps their speed.",
            _lines(facts, "waiting"),
        )
