"""Facts in real logs of vLLM 0.32 on CPU and of evenflow, in older forms, and in SGLang's.

The logs named `reconstructed` were never written by a server: their lines follow the formats in the sources of the
versions that they name.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from evenflow.advisor.explanation import explain, memory_pressure
from evenflow.advisor.folk_rules import FOLK_RULES
from evenflow.advisor.server_logs import LogFacts, find_facts, read_facts

LOGS = Path(__file__).parent / "logs"
SERVERS = (
    "vllm-0.32-cpu-offline",
    "vllm-0.32-cpu-default",
    "vllm-0.32-cpu-budget-512",
    "vllm-0.10-cuda-tp4-reconstructed",
    "vllm-0.26-cuda-preempted-reconstructed",
    "sglang-0.5-cuda-reconstructed",
    "evenflow-target",
    "evenflow-fixed",
)


def facts_of(log: str) -> LogFacts:
    return read_facts(LOGS / f"{log}.log")


def named(log: str) -> dict[str, Any]:
    return {fact.name: fact.value for fact in explain(facts_of(log)).facts}


def advice(log: str) -> str:
    return "\n".join(statement.text for statement in explain(facts_of(log)).advice)


def meaning(log: str) -> str:
    return "\n".join(statement.text for statement in explain(facts_of(log)).meaning)


def rules(log: str) -> str:
    return "\n".join(rule.rule for rule in explain(facts_of(log)).rules)


def test_a_real_log_by_default() -> None:
    found = named("vllm-0.32-cpu-default")
    expected = {
        "version": "0.32.0",
        "model": "/models/SmolLM2-135M-Instruct",
        "device": "cpu",
        "max_model_len": 8192,
        "chunked_prefill": True,
        "chunk_budget": 2048,  # vLLM logs no line for it where it is 2,048
        "chunk_budget_is": "the default",
        "prefix_caching": True,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "kv_cache_tokens": 46592,
        "max_concurrency": 5.69,
        "highest_prompt_tokens_per_s": 216.1,
        "highest_generation_tokens_per_s": 35.0,
        "highest_running": 6,
        "highest_waiting": 0,
        "tokens_per_s_of_each_request": 34.2 / 6,
        "last_running": 0,
        "last_prefix_hit_rate": 0.478,
    }
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    assert found["highest_kv_cache_usage"] == pytest.approx(0.022)
    assert found["rank"] == {"rank": 0, "world_size": 1, "dp_rank": 0, "pp_rank": 0, "tp_rank": 0}


def test_a_real_log_with_settings_of_its_own() -> None:
    found = named("vllm-0.32-cpu-budget-512")
    assert (found["chunk_budget"], found["chunk_budget_is"]) == (512, "asked for")
    assert found["long_prefill_token_threshold"] == 256
    assert found["prefix_caching"] is False
    assert (found["highest_running"], found["highest_waiting"]) == (3, 3)
    assert "last_prefix_hit_rate" not in found
    assert "--max-num-seqs 3 is the bottleneck" in advice("vllm-0.32-cpu-budget-512")
    assert "leave out --no-enable-prefix-caching" in advice("vllm-0.32-cpu-budget-512")
    assert "takes 16 steps" in meaning("vllm-0.32-cpu-budget-512")
    assert "at most 256 tokens of a step beside other requests" in meaning("vllm-0.32-cpu-budget-512")


@pytest.mark.parametrize(
    ("version", "num_steps", "when"),
    [("0.30.0", 32, "even if it is alone"), ("0.31.0", 16, "beside other"), ("0.1.dev9+g1", 16, "beside other")],
)
def test_a_cap_per_prompt_means_what_it_does_in_that_version(version: str, num_steps: int, when: str) -> None:
    log = (LOGS / "vllm-0.32-cpu-budget-512.log").read_text(encoding="utf-8").replace("0.32.0", version)
    found = " ".join(statement.text for statement in explain(find_facts(log.splitlines())).meaning)
    assert f"takes {num_steps} steps" in found
    assert f"at most 256 tokens of a step {when}" in found


def test_a_real_log_of_a_program_without_a_server() -> None:
    found = named("vllm-0.32-cpu-offline")
    assert (found["chunk_budget"], found["chunk_budget_is"]) == (4096, "the default")
    assert found["prefix_caching"] is False
    assert "takes 2 steps" in meaning("vllm-0.32-cpu-offline")


def test_a_real_log_of_a_start_that_was_refused() -> None:
    found = named("vllm-0.32-cpu-chunking-off")
    assert found["budget under the context"] == "512"
    assert found["chunking_asked_for"] is False
    assert "Prompts are prefilled whole" in meaning("vllm-0.32-cpu-chunking-off")
    assert "Leave chunked prefill on" in advice("vllm-0.32-cpu-chunking-off")


def test_a_real_log_of_a_flag_that_is_gone() -> None:
    assert named("vllm-0.32-cpu-removed-flag") == {"unknown flags": "--max-num-partial-prefills"}
    assert "Leave out --max-num-partial-prefills" in advice("vllm-0.32-cpu-removed-flag")
    assert "--max-long-partial-prefills" in rules("vllm-0.32-cpu-removed-flag")


def test_a_real_log_of_evenflow_with_a_target() -> None:
    found = named("evenflow-target")
    assert found["latency_target"] == "400ms"
    assert found["highest_kv_cache_usage"] == pytest.approx(0.074)
    assert "within 400ms" in meaning("evenflow-target")
    assert "vLLM" not in advice("evenflow-target")


def test_a_real_log_of_evenflow_with_a_budget() -> None:
    found = named("evenflow-fixed")
    assert (found["chunk_budget"], found["chunk_budget_is"]) == (2048, "the default")
    assert "--tbt-target" in advice("evenflow-fixed")
    assert "LatencyTargetScheduler" not in advice("evenflow-fixed")


TARGET = "INFO 07:03:00 evenflow: Chunked prefill is enabled with tbt_target=120ms."
BUDGET = "INFO 07:04:36 evenflow: Chunked prefill is enabled with max_num_batched_tokens=1024."
UNCHUNKED = "Chunked prefill is disabled: a prompt is prefilled in one step of up to 4096 tokens."
NOW = "INFO 07:05:00 evenflow: The policy is now {}."
OF_HOST = "INFO 07:05:00 [steering.py:158] evenflow: {}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([TARGET, NOW.format("fixed:2048")], "A step holds at most 2,048 tokens (set while the server ran)"),
        ([TARGET, NOW.format("alternate:64")], "A step holds at most 64 tokens (set while the server ran)"),
        ([TARGET, NOW.format("unchunked")], "Prompts are prefilled whole"),
        ([TARGET, NOW.format("target:2.5ms")], "within 2.5ms."),
        ([TARGET, NOW.format("target:200ms,paced")], "within 200ms."),
        ([TARGET, NOW.format("fixed:2048"), NOW.format("target:50ms")], "within 50ms."),
        ([BUDGET, NOW.format("target:50ms"), NOW.format("adaptive")], "A step holds at most 1,024 tokens (the default"),
        ([BUDGET, NOW.format("target:50ms"), NOW.format("load")], "A step holds at most 1,024 tokens (the default"),
        ([UNCHUNKED, NOW.format("target:50ms")], "within 50ms."),
        ([UNCHUNKED, NOW.format("fixed:512")], "A step holds at most 512 tokens"),
        ([TARGET, BUDGET], "A step holds at most 1,024 tokens (the default"),  # another start
        ([TARGET, NOW.format("settled")], "within 120ms."),  # no policy
        ([OF_HOST.format("latency target 50 ms on vLLM 0.32.0"), OF_HOST.format("latency target 20 ms from now on")],
         "within 20 ms."),
        (["Chunked prefill is enabled with max_num_batched_tokens=8192.",
          OF_HOST.format("latency target 50 ms on vLLM 0.32.0"),
          NOW.format("none"), OF_HOST.format("no latency target from now on")],
         "A step holds at most 8,192 tokens (the default"),
    ],
)  # fmt: skip
def test_the_newest_policy_counts(lines: list[str], expected: str) -> None:
    [statement] = explain(find_facts(lines)).meaning
    assert expected in statement.text
    assert max(statement.line_numbers) <= len(lines)


def test_a_policy_set_later_is_the_newest_fact() -> None:
    facts = explain(find_facts([TARGET, NOW.format("fixed:2048")])).facts
    assert {fact.name: (fact.value, fact.line_number) for fact in facts} == {
        "written_by": ("evenflow", 1),
        "policy": ("fixed:2048", 2),
        "chunk_budget": (2048, 2),
        "chunk_budget_is": ("set while the server ran", 2),
    }


def test_the_form_of_0_10() -> None:
    log = "vllm-0.10-cuda-tp4-reconstructed"
    found = named(log)
    expected = {
        "version": "0.10.0",
        "max_model_len": 131072,
        "chunk_budget": 8192,
        "chunked_prefill": True,
        "tensor_parallel_size": 4,
        "attention_backend": "Flash Attention",
        "kv_cache_gib": 60.12,
        "kv_cache_tokens": 1967040,
        "highest_prompt_tokens_per_s": 78.5,
        "last_prefix_hit_rate": 0.721,
        "tokens_per_s_of_each_request": 41.3,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert sorted(facts_of(log).ranks) == [0, 1, 2, 3]
    assert "4 processes compute the model: tensor parallel 4, pipeline parallel 1, data parallel 1." in meaning(log)
    assert "72%" in rules(log)
    assert "1.6%" in rules(log)
    assert "data parallel" in rules(log)
    assert "switch prefix caching off" not in rules(log)


def test_the_form_of_0_26_under_pressure() -> None:
    log = "vllm-0.26-cuda-preempted-reconstructed"
    found = named(log)
    assert found["attention_backend"] == "FLASH_ATTN"
    assert found["async_scheduling"] == "enabled"
    assert found["preemptions_in_all"] == 9
    assert "data parallel 2" in meaning(log)
    assert "The KV cache is the bottleneck" in advice(log)
    assert memory_pressure(facts_of(log)) == "9 preemptions in the log"
    assert "under 30%" in rules(log)
    assert "under 20%" in rules(log)
    assert "1.6%" not in rules(log)


def test_sglangs_form() -> None:
    log = "sglang-0.5-cuda-reconstructed"
    found = named(log)
    expected = {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "chunk_budget": 8192,
        "mixed_chunks": False,
        "radix_cache_off": False,
        "kv_cache_tokens": 812345,
        "max_num_seqs": 4096,
        "max_model_len": 131072,
        "attention_backend": "fa3",
        "highest_running": 27,
        "last_waiting": 0,
        "highest_kv_cache_usage": 0.95,
        "last_prefix_hit_rate": 0.1208,
        "preemptions_in_all": 2,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "no stream gets a token until the prompt is done" in meaning(log)
    assert "--chunked-prefill-size" in advice(log)
    assert "--max-running-requests" in advice(log)
    assert "evenflow serve --engine sglang" in advice(log)
    assert not any(flag in advice(log) for flag in ("--max-num-seqs", "--gpu-memory-utilization", "--scheduler-cls"))
    assert not rules(log)


def test_two_lines_that_often_stand_alone() -> None:
    found = find_facts(
        [
            "INFO [parallel_state.py:1208] rank 0 in world size 4 is assigned as DP rank 0, PP rank 0, TP rank 0",
            "[loggers.py:127] Engine 000: Avg prompt throughput: 78.5 tokens/s, "
            "Avg generation throughput: 15.1 tokens/s, Running: 1 reqs, Waiting: 0 reqs, "
            "GPU KV cache usage: 1.6%, Prefix cache hit rate: 72.1%",
        ]
    )
    text = " ".join(statement.text for statement in explain(found).meaning)
    assert "4 processes" in text
    assert "tensor parallel unknown" in text
    assert "72.1%" in text


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("Using AttentionBackendEnum.FLASH_ATTN backend.", "attention_backend", "FLASH_ATTN"),
        ("Using Torch SDPA backend.", "attention_backend", "Torch SDPA"),
        ("Using FlashInfer backend on V1 engine.", "attention_backend", "FlashInfer"),
        ("Using TRITON_ATTN backend (selected via --attention-backend).", "attention_backend", "TRITON_ATTN"),
        ("Using custom scheduler class evenflow.vllm.LatencyTargetScheduler. This sch", "scheduler_class",
         "evenflow.vllm.LatencyTargetScheduler"),
        ("evenflow: latency target 50 ms on vLLM 0.32.0", "latency_target", "50 ms"),
        ("Chunked prefill is disabled: a prompt is prefilled in one step of up to 64 tokens.", "unchunked_budget", 64),
        ("\x1b[32mINFO\x1b[0m Using max model len \x1b[1m4096\x1b[0m", "max_model_len", 4096),
        ("vLLM API server version 0.10", "version", "0.10"),
    ],
)  # fmt: skip
def test_single_lines(line: str, name: str, value: Any) -> None:
    assert find_facts([line]).value(name) == value


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out of memory"),
        ("ValueError: No available memory for the cache blocks.", "no memory for the KV cache"),
        ("ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
         "needed", "context over the KV cache"),
        ("ValueError: max_num_batched_tokens (64) must be greater than or equal to max_num_seqs (256).",
         "budget under max_num_seqs"),
        ("long_prefill_token_threshold (9000) cannot be greater than the max_model_len (8192).",
         "threshold over the context"),
        ("NotImplementedError: Concurrent Partial Prefill is not supported.", "partial prefills"),
        ("Policy target:5ms cannot be kept: with the streams that decode now", "target too low"),
        ("evenflow: a target of 5 ms cannot be kept beside prefill", "target too low"),
        ("Policy target:5ms is infeasible: with the streams that decode now", "target too low"),
        ("evenflow: a target of 5 ms is infeasible beside prefill", "target too low"),
        ("Sequence group 7 is preempted by PreemptionMode.RECOMPUTE mode", "preemption"),
    ],
)  # fmt: skip
def test_every_problem_has_advice(line: str, name: str) -> None:
    found = find_facts(["nothing", line, line])
    assert [fact.line_number for fact in found.problems.values()] == [2]
    assert name in found.problems
    [statement] = [statement for statement in explain(found).advice if statement.line_numbers == (2,)]
    assert statement.text.endswith(".")


@pytest.mark.parametrize("log", SERVERS)
def test_every_statement_names_lines_that_are_there(log: str) -> None:
    lines = (LOGS / f"{log}.log").read_text(encoding="utf-8").splitlines()
    explanation = explain(facts_of(log))
    assert explanation.facts
    assert explanation.meaning
    for fact in explanation.facts:
        assert lines[fact.line_number - 1].startswith(fact.line.partition(" ... ")[0])
    for statement in (*explanation.meaning, *explanation.advice):
        assert statement.line_numbers
        assert max(statement.line_numbers) <= len(lines)


def test_every_rule_comes_up_somewhere() -> None:
    logs = [facts_of(log) for log in (*SERVERS, "vllm-0.32-cpu-removed-flag")]
    logs.append(find_facts(["torch.OutOfMemoryError: CUDA out of memory."]))
    logs.append(find_facts([
        "Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 52.0 tokens/s, Running: 1 reqs, "
        "Waiting: 0 reqs, GPU KV cache usage: 1.6%, Prefix cache hit rate: 0.0%"
    ]))  # fmt: skip
    assert [rule.rule for rule in FOLK_RULES if not any(rule.comes_up(log) for log in logs)] == []
    assert {rule.verdict for rule in FOLK_RULES} == {"wrong", "partly right", "depends"}


def test_no_rule_comes_up_without_occasion() -> None:
    assert explain(find_facts(["INFO Asynchronous scheduling is enabled."])).rules == []
    assert len(explain(LogFacts(), all_rules=True).rules) == len(FOLK_RULES)


@pytest.mark.parametrize(
    "text",
    [
        'model="default",',
        'model: "default",',
        "model: default",
        "| Faults | an executor that hangs or runs out of memory harms only its step |",
        "| 24,000 | 786 | out of memory (139 GiB) |",
        '"Memory ran out in a step" means that activations are large',
        "While a target is infeasible, steps may take longer",
        "If a target cannot be kept, the log says so.",
        "batch_generate(model, prompts, max_seq_len=600)",
        "LLM(model, enable_prefix_caching=True)",
        "A request is preempted by a more urgent one, beside concurrent partial prefills.",
        "The policy is now settled.",
    ],
)
def test_prose_and_programs_are_no_log(text: str) -> None:
    assert not find_facts([text])


@pytest.mark.parametrize(
    "line",
    [
        "CUDA error: out of memory",
        "RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB",
        "RuntimeError: MPS backend out of memory (MPS allocated: 9.0 GB)",
        "Triton Error [CUDA]: out of memory",
        "ncclUnhandledCudaError: Cuda failure 2 'out of memory'",
        "Decode out of memory. Try to lower your batch size.",
        "Memory ran out. From now on a step has at most 512 tokens, and the KV cache 90 blocks.",
    ],
)
def test_each_way_to_run_out_of_memory(line: str) -> None:
    assert "out of memory" in find_facts([line]).problems


def test_any_bytes_are_survived() -> None:
    junk = b"\x00\xff\xfe" * 1000 + b"\n" + bytes(range(256)) * 20 + b"\nINFO Using max model len 4096\r\n" + b"\x80"
    assert read_facts(io.BytesIO(junk)).value("max_model_len") == 4096
    assert not read_facts(io.BytesIO(b"\x00" * (3 << 20)))


def test_of_several_starts_the_last_counts() -> None:
    found = find_facts(["Using max model len 4096", "Using max model len 8192"])
    assert (found.value("max_model_len"), found.settings["max_model_len"].line_number) == (8192, 2)
    starts = ("vllm-0.32-cpu-budget-512", "vllm-0.32-cpu-default")
    both = "".join((LOGS / f"{log}.log").read_text(encoding="utf-8") for log in starts)
    explained = {fact.name: fact.value for fact in explain(find_facts(both.splitlines())).facts}
    assert (explained["chunk_budget"], explained["chunk_budget_is"]) == (2048, "the default")
    assert "long_prefill_token_threshold" not in explained


def test_memory_pressure_is_seen_three_ways() -> None:
    assert memory_pressure(facts_of("vllm-0.32-cpu-default")) is None
    assert memory_pressure(find_facts(["CUDA out of memory"])) == "out of memory in line 1 of the log"
    line = (
        "Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 9 reqs, "
        "Waiting: 0 reqs, KV cache usage: 95.0%"
    )
    assert memory_pressure(find_facts([line])) == "the KV cache was 95% full in line 1 of the log"
