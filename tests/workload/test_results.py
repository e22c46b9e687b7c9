"""Files that hold many requests in one record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evenflow.workload.inputs import TraceRequest
from evenflow.workload.reading import ReadTally, read_inputs
from evenflow.workload.results import block_of


def requests_of(path: Path, content: Any) -> tuple[list[TraceRequest], ReadTally]:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    tally = ReadTally()
    found = list(read_inputs(path, None, tally))
    assert all(isinstance(one, TraceRequest) for one in found)
    return [one for one in found if isinstance(one, TraceRequest)], tally


def test_burstgpt(tmp_path: Path) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    )
    found, _ = requests_of(tmp_path / "burst.csv", text)
    assert found == [TraceRequest(472, 18, 5.0)]


def test_a_result_of_vllm_bench(tmp_path: Path) -> None:
    result = {"request_throughput": 1.0, "total_input_tokens": 30, "total_output_tokens": 7}
    detailed = result | {"input_lens": [10, 20], "output_lens": [3, 4], "start_times": [100.5, 101.0]}
    found, _ = requests_of(tmp_path / "detailed.json", detailed)
    assert found == [TraceRequest(10, 3, 100.5), TraceRequest(20, 4, 101.0)]
    found, _ = requests_of(tmp_path / "older.json", detailed | {"start_times": []})
    assert found == [TraceRequest(10, 3), TraceRequest(20, 4)]
    found, tally = requests_of(tmp_path / "plain.json", result)
    assert not found
    assert "--save-detailed" in next(iter(tally.unusable))


def test_a_result_of_guidellm_is_its_last_benchmark(tmp_path: Path) -> None:
    requests = [{"prompt_tokens": 10, "output_tokens": 3, "request_start_time": 7.5, "output": "x"}]
    slow = {"requests": {"successful": requests * 2, "errored": []}}
    fast = {"requests": {"successful": requests, "errored": [{"prompt_tokens": 1}]}}
    found, _ = requests_of(tmp_path / "guidellm.json", {"metadata": {}, "benchmarks": [slow, fast]})
    assert found == [TraceRequest(10, 3, 7.5)]


def test_an_agents_conversation(tmp_path: Path) -> None:
    agent = {"type": "subagent", "t": 20.0, "agent_id": "a1"}
    trace = {
        "id": "one",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [
            {"t": 3.0, "type": "n", "in": 100, "out": 5, "hash_ids": [1, 2], "api_time": 2.0},
            {"t": 10.0, "type": "s", "in": 150, "out": 6, "hash_ids": [1, 2, 3]},
            agent | {"requests": [{"t": 1.0, "type": "n", "in": 70, "out": 2, "hash_ids": [1, 9]}]},
            {"t": 30.0, "type": "n", "in": 200, "out": 7, "hash_ids": [], "think_time": 1.5},
        ],
    }
    found, _ = requests_of(tmp_path / "weka.json", trace)
    root: dict[str, Any] = {"session": "one", "block_tokens": 64}
    assert found == [
        TraceRequest(100, 5, 3.0, (block_of("one", 1), block_of("one", 2)), **root),
        TraceRequest(150, 6, None, (block_of("one", 1), block_of("one", 2), block_of("one", 3)), delay_s=5.0, **root),
        TraceRequest(200, 7, None, (), delay_s=1.5, **root),
        TraceRequest(70, 2, 21.0, (block_of("one", 1), block_of("one", 9)), session="one/a1", block_tokens=64),
    ]
    assert block_of("one", 1) != block_of("two", 1) != block_of("", 1) == 1
    absolute = trace | {"requests": [agent | {"requests": [{"t": 21.0, "in": 70, "out": 2, "hash_ids": []}]}]}
    found, _ = requests_of(tmp_path / "absolute.json", absolute)
    assert [one.arrival_s for one in found] == [21.0]


def test_a_request_log_counts_a_request_once(tmp_path: Path) -> None:
    about = {"id": "a", "time": "2026-11-01T10:00:00.250+00:00", "tenant": "t", "prompt_tokens": 9}
    lines = [
        {"event": "opened", "time": "2026-11-01T09:00:00.000+00:00"},
        {"event": "accepted", "max_tokens": 100} | about,
        {"event": "first_token", "id": "a", "ttft_s": 0.1},
        {"event": "ended", "output_tokens": 12, "service_class": "chat"} | about,
    ]
    found, tally = requests_of(tmp_path / "log.jsonl", "\n".join(map(json.dumps, lines)))
    [one] = found
    assert (one.num_prompt_tokens, one.num_output_tokens, one.tenant, one.service_class) == (9, 12, "t", "chat")
    assert one.arrival_s is not None
    assert not tally.unusable


def test_times_of_aiperfs_sessions_are_milliseconds(tmp_path: Path) -> None:
    lines = [
        {"session_id": "s", "timestamp": 1500, "input_length": 5, "output_length": 2},
        {"session_id": "s", "delay": 250, "input_length": 9, "output_length": 2},
    ]
    found, _ = requests_of(tmp_path / "trace.jsonl", "\n".join(map(json.dumps, lines)))
    assert found == [
        TraceRequest(5, 2, 1.5, session="s"),
        TraceRequest(9, 2, None, session="s", delay_s=0.25),
    ]
