"""Logs as documents show them: wrapped, in lists and tables, one figure per line."""

from __future__ import annotations

from typing import Any

import pytest

from evenflow.advisor.explanation import explain
from evenflow.advisor.server_logs import LogFacts, find_facts

FIGURES = {
    "prompt_tokens_per_s": 1234.5,
    "generation_tokens_per_s": 88.0,
    "running": 12,
    "waiting": 3,
    "kv_cache_usage": pytest.approx(0.016),
    "prefix_hit_rate": pytest.approx(0.721),
}
BLOCK = """\
Avg prompt throughput: 1234.5 tokens/s
Avg generation throughput: 88 tokens/s
Running: 12 reqs
Waiting: 3 reqs
GPU KV cache usage: 1.6%
Prefix cache hit rate: 72.1%
"""
ONE_LINE = ", ".join(BLOCK.splitlines())


def facts_of(text: str) -> LogFacts:
    return find_facts(text.splitlines())


def last(text: str) -> dict[str, Any]:
    found = facts_of(text).last
    assert found is not None
    return found.value


def each_line(form: str) -> str:
    return "\n".join(form.format(line) for line in BLOCK.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        BLOCK,
        each_line("INFO 08-14 09:14:11 [loggers.py:122] {}"),
        each_line("(APIServer pid=7) INFO 08-14 09:14:11 [loggers.py:122] Engine 000: {},"),
        each_line("2026-11-10 09:14:11 {}"),
        each_line("- {}"),
        each_line("* **{}**").replace(": ", ":** ").replace("**\n", "\n"),
        each_line("> {}"),
        each_line("    {},"),
        each_line("| {} |").replace(": ", " | "),
        each_line("{}").replace(": ", " = "),
        f"```text\nEngine 000:\n{BLOCK}```\n",
        BLOCK.replace("\n", "\n\n"),
        BLOCK.replace("Avg prompt", "Prompt").replace("Avg generation", "Generation").replace("1234.5", "1,234.5"),
        "INFO 08-14 09:14:11 Metrics of the last 10 s:\n" + each_line("\t{}"),
        "\n".join(reversed(BLOCK.splitlines())),
        ONE_LINE,
    ],
)
def test_one_figure_per_line(text: str) -> None:
    assert last(text) == FIGURES


@pytest.mark.parametrize("width", [*range(62, 100), 120, 160])
def test_a_message_wrapped_at_any_width(width: int) -> None:
    """As a terminal breaks it, inside words too, and as an editor does, at spaces."""
    message = f"INFO 08-14 09:14:11 [loggers.py:122] Engine 000: {ONE_LINE}"
    broken = "\n".join(message[start : start + width] for start in range(0, len(message), width))
    assert last(broken) == FIGURES
    lines = [""]
    for word in message.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("  ")
        lines[-1] += f"{word} "
    assert last("\n".join(lines)) == FIGURES


def test_a_block_is_explained_like_a_line() -> None:
    block, line = explain(facts_of(BLOCK)), explain(facts_of(ONE_LINE))
    assert [statement.text for statement in block.meaning] == [statement.text for statement in line.meaning]
    assert [statement.text for statement in block.advice] == [statement.text for statement in line.advice]
    assert block.rules == line.rules
    assert {fact.name: fact.value for fact in block.facts} == {fact.name: fact.value for fact in line.facts}
    assert {fact.line_number for fact in block.facts} == {1}
    assert {fact.line for fact in block.facts} == {" | ".join(BLOCK.splitlines())}


def test_several_blocks_are_several_moments() -> None:
    quiet = BLOCK.replace("Running: 12", "Running: 1").replace("88", "9")
    found = facts_of(f"At noon\n{BLOCK}In the evening\n{quiet}")
    assert (found.peak("running"), found.peak("generation_tokens_per_s")) == (12, 88)
    assert found.highest["running"].line_number == 2
    assert found.last is not None
    assert (found.last.value["running"], found.last.line_number) == (1, 9)


def test_figures_far_apart_are_not_one_moment() -> None:
    found = facts_of("Running: 12 reqs\n" + "nothing\n" * 20 + "Waiting: 3 reqs")
    assert found.last is not None
    assert found.last.value == {"waiting": 3}
    assert found.peak("running") == 12


@pytest.mark.parametrize("missing", BLOCK.splitlines())
def test_a_block_may_lack_a_figure(missing: str) -> None:
    explanation = explain(facts_of(BLOCK.replace(f"{missing}\n", "")))
    assert len(explanation.facts) >= len(FIGURES)
    text = " ".join(statement.text for statement in explanation.meaning)
    assert ("12 requests were running" in text) == (not missing.startswith("Running"))
    assert ("3 waiting" in text) == (not missing.startswith(("Running", "Waiting")))


@pytest.mark.parametrize("figure", BLOCK.splitlines())
def test_a_figure_alone(figure: str) -> None:
    explanation = explain(facts_of(figure), all_rules=True)
    assert len(explanation.facts) >= 1


def test_an_external_cache_is_not_the_prefix_cache() -> None:
    assert "prefix_hit_rate" not in last("Running: 1 reqs\nExternal prefix cache hit rate: 9.0%")


CONFIG = """\
INFO 08-14 09:12:16 [core.py:71] Initializing a V1 LLM engine (v0.10.0) with config:
  model='meta-llama/Llama-3.1-8B-Instruct',
  max_seq_len=131072,
  tensor_parallel_size=4, pipeline_parallel_size=1,
  device_config=cuda,
  enable_prefix_caching=True, chunked_prefill_enabled=True
INFO 08-14 09:12:25 [parallel_state.py:1102] rank 1 in world size 4 is assigned as
  DP rank 0, PP rank 0, TP rank 1, EP rank 1
INFO 08-14 09:12:26 Chunked prefill is enabled with
  max_num_batched_tokens=8192.
"""


def check_config(found: LogFacts) -> None:
    expected = {
        "version": "0.10.0",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "max_model_len": 131072,
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 1,
        "device": "cuda",
        "prefix_caching": True,
        "chunked_prefill": True,
        "chunk_budget": 8192,
    }
    assert {name: found.value(name) for name in expected} == expected
    assert found.ranks[1].value == {"rank": 1, "world_size": 4, "dp_rank": 0, "pp_rank": 0, "tp_rank": 1}


def test_settings_under_their_message() -> None:
    found = facts_of(CONFIG)
    check_config(found)
    assert found.settings["tensor_parallel_size"].line_number == 4
    assert "with config: model=" in found.settings["tensor_parallel_size"].line
    check_config(facts_of("\n".join(f"> {line}" for line in CONFIG.splitlines())))


@pytest.mark.parametrize("width", [72, 80, 81, 97, 120])
def test_settings_wrapped_by_a_terminal(width: int) -> None:
    messages = CONFIG.replace("\n  ", " ").splitlines()
    check_config(find_facts(m[start : start + width] for m in messages for start in range(0, len(m), width)))


def test_ranks_wrapped_one_after_another() -> None:
    form = "rank {0} in world size 2 is assigned as\nDP rank 0, PP rank 0, TP rank {0}, EP rank {0}"
    assert sorted(facts_of("\n".join(map(form.format, range(2)))).ranks) == [0, 1]


def test_a_message_ends_with_a_blank_line_or_another_message() -> None:
    heading = "INFO 08-14 09:12:16 Initializing a V1 LLM engine (v0.10.0) with config:\n"
    assert facts_of(f"{heading}device_config=cuda").value("device") == "cuda"
    assert facts_of(f"{heading}\ndevice_config=cuda").value("device") is None
    assert facts_of(f"{heading}INFO 08-14 09:12:17 device_config=cuda").value("device") is None


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("max_num_batched_tokens=2048", "chunk_budget", 2048),
        ("- max_model_len: 32768", "max_model_len", 32768),
        ("  'enable_prefix_caching': False,", "prefix_caching", False),
        ("| tensor_parallel_size | 2 |", "tensor_parallel_size", 2),
        ("enable_chunked_prefill=True", "chunked_prefill", True),
        ("model = 'meta-llama/Llama-3.1-8B-Instruct'", "model", "meta-llama/Llama-3.1-8B-Instruct"),
        ("max_num_batched_tokens=None", "chunk_budget", None),
        ("raise max_num_batched_tokens=2048 if memory allows", "chunk_budget", None),
    ],
)
def test_a_setting_on_a_line_of_its_own(line: str, name: str, value: Any) -> None:
    assert facts_of(line).value(name) == value


def test_a_problem_after_figures_is_seen() -> None:
    found = facts_of(f"{ONE_LINE}\ntorch.OutOfMemoryError: CUDA out of memory.")
    assert found.problems["out of memory"].line_number == 2
    assert last(f"{ONE_LINE}\ntorch.OutOfMemoryError: CUDA out of memory.") == FIGURES
