"""Records that hold many requests: other tools' results, and conversations of agents. Each becomes plain records.

vLLM        the file of `vllm bench serve --save-result --save-detailed`
guidellm    `benchmarks`, each with `requests.successful`
Weka        an agent's conversation as aiperf reads it: `requests` with `t`, `in`, `out` and `hash_ids`
evenflow    a line of `serve --request-log`: only those of requests that ended count
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from evenflow.workload.inputs import UnusableRecordError

Record = Mapping[str, Any]
_LOGGED_BEFORE_THE_END = ("opened", "accepted", "first_token", "retried", "lost", "closed")


def holds_requests(record: Any) -> bool:
    """Is this one object that holds requests, rather than one request?"""
    return isinstance(record, Mapping) and (_is_vllm(record) or _is_guidellm(record) or _is_weka(record))


def requests_in(record: Any) -> Iterable[Any]:
    """The requests in a record; itself if it is one."""
    if not isinstance(record, Mapping):
        return (record,)
    if _is_vllm(record):
        return _vllm(record)
    if _is_guidellm(record):
        return _guidellm(record)
    if _is_weka(record):
        return _weka(record)
    return () if record.get("event") in _LOGGED_BEFORE_THE_END else (record,)


def _is_vllm(record: Record) -> bool:
    return "request_throughput" in record and "total_input_tokens" in record


def _vllm(record: Record) -> Iterator[Record]:
    lengths, outputs = record.get("input_lens"), record.get("output_lens")
    if not isinstance(lengths, list) or not isinstance(outputs, list) or len(lengths) != len(outputs):
        raise UnusableRecordError("a result of vllm bench without lengths: run it with --save-detailed")
    starts = record.get("start_times")
    if not isinstance(starts, list) or len(starts) != len(lengths):
        starts = [None] * len(lengths)
    for prompt, output, start in zip(lengths, outputs, starts, strict=True):
        yield {"prompt_tokens": prompt, "output_tokens": output, "arrival_s": start}


def _is_guidellm(record: Record) -> bool:
    benchmarks = record.get("benchmarks")
    return isinstance(benchmarks, list) and all(isinstance(one, Mapping) and "requests" in one for one in benchmarks)


def _guidellm(record: Record) -> Iterator[Record]:
    """Of its last benchmark: a file may hold one after the other, at rising rates."""
    requests = record["benchmarks"][-1]["requests"] if record["benchmarks"] else {}
    found = requests.get("successful") if isinstance(requests, Mapping) else requests
    for one in found if isinstance(found, list) else []:
        if isinstance(one, Mapping):
            start = one.get("request_start_time", one.get("start_time"))
            yield {key: one.get(key) for key in ("prompt_tokens", "output_tokens")} | {"arrival_s": start}


def _is_weka(record: Record) -> bool:
    requests = record.get("requests")
    return isinstance(requests, list) and bool(requests) and all(isinstance(o, Mapping) and "t" in o for o in requests)


def _weka(record: Record) -> Iterator[Record]:
    """Each agent's requests are a session. A subagent starts at its own time, and its parent does not wait for it."""
    name = str(record.get("id", ""))
    scope = name if record.get("hash_id_scope") == "local" else ""
    block_tokens = record.get("block_size", 64)
    agents: list[tuple[str, float, Any]] = [(name, 0.0, record["requests"])]
    while agents:
        session, offset, requests = agents.pop(0)
        before: Record | None = None
        for one in requests if isinstance(requests, list) else []:
            if not isinstance(one, Mapping) or not isinstance(one.get("t"), int | float):
                continue
            if one.get("type") == "subagent":
                agents.append((f"{session}/{one.get('agent_id', len(agents))}", _base(one), one.get("requests")))
                continue
            blocks = one.get("hash_ids")
            yield {
                "input_length": one.get("in"),
                "output_length": one.get("out"),
                "timestamp": 1000 * (offset + one["t"]) if before is None else None,
                "delay": None if before is None else 1000 * _pause(before, one),
                "session_id": session,
                "hash_ids": [block_of(scope, block) for block in blocks] if isinstance(blocks, list) else [],
                "block_tokens": block_tokens,
            }
            before = one


def block_of(scope: str, block: Any) -> int:
    """An id for a block of one conversation, or of all without a scope."""
    if not scope and type(block) is int:
        return block
    return int.from_bytes(blake2b(f"{scope}:{block}".encode(), digest_size=7).digest())


def _base(agent: Record) -> float:
    """What to add to the times of a subagent's requests, which some files count from its start."""
    inner = agent.get("requests")
    records = [one for one in inner if isinstance(one, Mapping)] if isinstance(inner, list) else []
    times = [one["t"] for one in records if isinstance(one.get("t"), int | float)]
    return agent["t"] if times and min(times) < agent["t"] else 0.0


def _pause(before: Record, one: Record) -> float:
    """From an answer to the next request: as recorded, else the time between both less the answer's own."""
    think = one.get("think_time")
    if not isinstance(think, int | float):
        took = before.get("api_time")
        think = one["t"] - before["t"] - (took if isinstance(took, int | float) else 0.0)
    return max(0.0, think) if math.isfinite(think) else 0.0
