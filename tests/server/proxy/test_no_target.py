"""A host engine without a target: a fixed budget, whole prompts, or its own settings. Its steps are observed only.

A small process stands in for vLLM; tests/vllm/test_serve_policies.py runs the real one.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenflow.cli.options import ModelOptions, SchedulingOptions
from evenflow.cli.serve import ServeOptions
from evenflow.cli.serve_host import make_launch
from tests.server.proxy.fronts import MODEL, figure, front, seen
from tests.server.serving import RunningServer


@pytest.fixture(scope="module")
def fixed(python: str) -> Iterator[RunningServer]:
    with front(python, ["--max-num-batched-tokens", "4"], policy="fixed:4") as running:
        yield running


def chunks_of(server: RunningServer, num_tokens: int) -> list[dict[str, Any]]:
    """The chunks of a new request's prompt, as a client of OpenAI's package asks for them."""
    client = server.openai()
    answer = client.completions.create(model=MODEL, prompt=[5] * num_tokens, max_tokens=2)
    found: Any = client.get(f"/requests/{answer.id}/chunks", cast_to=object)
    (request,) = found["requests"]
    assert (found["id"], found["object"]) == (answer.id, "request.chunks")
    assert request["prompt_tokens"] == num_tokens
    assert 0 <= request["queue_s"] < request["ttft_s"]
    chunks: list[dict[str, Any]] = request["chunks"]
    return chunks


def test_the_budget_holds_and_steps_are_observed(fixed: RunningServer) -> None:
    own = {"policy": "fixed:4", "tbt_target": None, "paced": False, "feasible_target": None}
    assert fixed.get("/v1/target").json() == own
    before = figure(fixed, "evenflow:chunk_tokens_count")
    chunks = chunks_of(fixed, 10)
    assert [(chunk["start"], chunk["length"], chunk["reason"]) for chunk in chunks] == [
        (0, 4, "budget"),
        (4, 4, "budget"),
        (8, 2, "end_of_prompt"),
    ]
    assert all(chunk["seconds"] > 0 for chunk in chunks)
    assert figure(fixed, "evenflow:chunk_tokens_count") == before + 3
    assert seen(fixed)["policy"] == "none"


def test_a_stream_has_its_chunks_while_it_runs(fixed: RunningServer) -> None:
    client = fixed.openai()
    with client.completions.create(model=MODEL, prompt=[5] * 6, max_tokens=2000, stream=True) as stream:
        first = next(iter(stream))
        found: Any = client.get(f"/requests/{first.id}/chunks", cast_to=object)
    assert [chunk["length"] for chunk in found["requests"][0]["chunks"]] == [4, 2]


def test_a_target_comes_and_goes_while_it_runs(fixed: RunningServer) -> None:
    def put(body: dict[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = fixed.request("PUT", "/v1/target", body).json()
        fixed.post("/v1/completions", {"prompt": [1], "max_tokens": 2})
        return changed

    assert put({"tbt_target": "80ms", "paced": True})["policy"] == "target:80ms,paced"
    assert seen(fixed)["policy"] == "target:80ms,paced"
    assert put({"tbt_target": None}) == {
        "policy": "fixed:4",
        "tbt_target": None,
        "paced": False,
        "feasible_target": None,
    }
    assert seen(fixed)["policy"] == "none"
    assert put({"tbt_target": "20ms"})["policy"] == "target:20ms,paced"  # as the one before
    os.kill(seen(fixed)["pid"], signal.SIGKILL)
    fixed.until(lambda: fixed.get("/health").status_code == 503)
    fixed.until(lambda: fixed.get("/ready").status_code == 200)
    assert seen(fixed)["policy"] == "target:20ms,paced"
    put({"tbt_target": None})


def test_whole_prompts_and_no_target(python: str) -> None:
    with front(python, ["--no-enable-chunked-prefill"], policy="unchunked") as server:
        assert [chunk["length"] for chunk in chunks_of(server, 3000)] == [3000]
        refused = server.request("PUT", "/v1/target", {"tbt_target": "50ms"})
        assert refused.status_code == 400
        message = "Got tbt_target=50ms but vLLM cannot keep a target: chunked prefill is off."
        assert refused.json()["error"]["message"] == message
        for body in (server.request("PUT", "/v1/target", {"tbt_target": None}), server.get("/v1/target")):
            assert body.json()["policy"] == "unchunked"


def test_the_hosts_own_settings(python: str) -> None:
    with front(python, policy=None) as server:
        assert server.get("/v1/target").json()["policy"] == "none"
        assert [chunk["length"] for chunk in chunks_of(server, 3000)] == [2048, 952]
        assert server.post("/requests/chunks").json() == {"detail": "Not Found"}  # vLLM's own answer
        missing = server.get("/v1/requests/cmpl-other/chunks")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


@pytest.fixture(scope="module")
def versioned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A "Python" that has a vLLM."""
    path = tmp_path_factory.mktemp("vllm") / "python"
    path.write_text("#!/bin/sh\necho 0.32.0\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("scheduling", "parallel", "flags", "summary"),
    [
        (
            {"policy": "fixed:512"},
            {},
            "--enable-chunked-prefill --max-num-batched-tokens 512",
            "fixed:512, no latency target",
        ),
        (
            {"max_num_batched_tokens": 512},
            {},
            "--max-num-batched-tokens 512 --enable-chunked-prefill",
            "fixed:512, no latency target",
        ),
        ({"policy": "unchunked"}, {}, "--no-enable-chunked-prefill", "unchunked, no latency target"),
        ({"enable_chunked_prefill": "false"}, {}, "--no-enable-chunked-prefill", "unchunked, no latency target"),
        ({}, {}, "", "its own settings, no latency target"),
        (
            {},
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4},
            "--tensor-parallel-size 2 --pipeline-parallel-size 3 --data-parallel-size 4",
            "its own settings, no latency target",
        ),
    ],
)
def test_options_become_vllms_flags(
    scheduling: dict[str, Any], parallel: dict[str, int], flags: str, summary: str, versioned: str, tmp_path: Path
) -> None:
    options = ServeOptions(engine="vllm", vllm_python=versioned, **parallel)
    launch = make_launch(options, ModelOptions(model="m"), SchedulingOptions(**scheduling), ["--seed", "1"])
    assert launch.flags == [*flags.split(), "--seed", "1"]
    assert launch.summary == summary


def test_only_a_target_asks_for_more_graphs(versioned: str) -> None:
    options, model = ServeOptions(engine="vllm", vllm_python=versioned), ModelOptions(model="m")
    with_target = make_launch(options, model, SchedulingOptions(tbt_target=0.05), [])
    assert with_target.flags[0] == "--compilation-config"
    assert with_target.summary == "target:50ms"
