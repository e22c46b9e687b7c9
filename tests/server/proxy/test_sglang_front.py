"""SGLang behind evenflow's front: what differs from vLLM there. A small process stands in for SGLang."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from evenflow.cli.main import main
from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidInput, MissingDependency
from evenflow.hosts import launch
from evenflow.hosts.launch import RunFolder
from evenflow.sglang.launch import SGLANG, SglangLaunch
from tests.server.proxy.fronts import MODEL, figure, front, seen
from tests.server.serving import RunningServer


@pytest.fixture(scope="module")
def server(python: str) -> Iterator[RunningServer]:
    with front(python, ["--tensor-parallel-size", "2"], kind=SglangLaunch) as running:
        yield running


def test_sglang_is_started_with_the_plug_in_and_the_flags(server: RunningServer) -> None:
    found = seen(server)
    assert found["arguments"][:4] == ["-m", "sglang.launch_server", "--tensor-parallel-size", "2"]
    assert "--enable-metrics" in found["arguments"]
    assert "evenflow.sglang.plugin:load" in found["plugins"]


def test_sglang_is_told_before_its_first_request_not_to_collect_what_it_has_loaded(server: RunningServer) -> None:
    assert seen(server)["frozen_after"] == [0]


def test_requests_targets_and_figures_pass(server: RunningServer) -> None:
    answer = server.openai().completions.create(model=MODEL, prompt=[5, 6], max_tokens=3)
    assert answer.choices[0].text == "token 0 token 1 token 2 "
    assert httpx.put(server.url + "/v1/target", json={"tbt_target": "20ms"}).status_code == 200
    server.openai().completions.create(model=MODEL, prompt=[5], max_tokens=2)
    assert seen(server)["policy"] == "target:20ms"
    assert figure(server, "evenflow:up") == 1


@pytest.mark.slow
def test_a_killed_sglang_comes_back(server: RunningServer) -> None:
    os.kill(seen(server)["pid"], signal.SIGKILL)
    server.until(lambda: server.get("/health").status_code == 503)
    assert "SGLang" in server.get("/v1/models").json()["error"]["message"]
    server.until(lambda: server.get("/ready").status_code == 200)


def test_evenflows_options_become_sglangs_flags() -> None:
    settings = {"max_model_len": 9, "max_num_batched_tokens": 512, "enable_prefix_caching": False, "max_num_seqs": 4}
    flags = ["--context-length", "9", "--chunked-prefill-size", "512", "--disable-radix-cache"]
    assert SglangLaunch.flags_of(None, settings) == [*flags, "--max-running-requests", "4"]
    assert SglangLaunch.flags_of(None, {"enable_prefix_caching": True, "long_prefill_token_threshold": 0}) == []
    with pytest.raises(InvalidInput, match="Got --long-prefill-token-threshold but SGLang has no such setting"):
        SglangLaunch.flags_of(None, {"long_prefill_token_threshold": 128})


def test_sglangs_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "mine")
    policy = PolicySpec.parse("target:50ms")
    started = SglangLaunch(python="python", model=MODEL, policy=policy)
    environment = started.environment(RunFolder(tmp_path), policy)
    assert environment["SGLANG_PLUGINS"] == "mine,evenflow"
    assert environment["EVENFLOW_TBT_TARGET"] == "50ms"
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"


@pytest.mark.parametrize(
    ("policy", "settings", "flags"),
    [
        ("fixed:512", {}, ["--chunked-prefill-size", "512", "--enable-mixed-chunk"]),
        ("unchunked", {}, ["--chunked-prefill-size", "-1"]),
        (
            "unchunked",
            {"max_num_batched_tokens": 4096},
            ["--max-prefill-tokens", "4096", "--chunked-prefill-size", "-1"],
        ),
        ("target:50ms", {"max_num_batched_tokens": 4096}, ["--chunked-prefill-size", "4096"]),
        (None, {}, []),
        (
            None,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4},
            ["--tp-size", "2", "--pp-size", "3", "--dp-size", "4"],
        ),
    ],
)
def test_policies_and_parallel_sizes_become_sglangs_flags(
    policy: str | None, settings: dict[str, int], flags: list[str]
) -> None:
    assert SglangLaunch.flags_of(PolicySpec.parse(policy) if policy else None, settings) == flags


def test_without_a_target_the_plug_in_only_reports(tmp_path: Path) -> None:
    policy = PolicySpec.parse("fixed:512")
    started = SglangLaunch(python="python", model=MODEL, policy=policy)
    assert started.environment(RunFolder(tmp_path), policy)["EVENFLOW_TBT_TARGET"] == "none"
    assert started.summary == "fixed:512, no latency target"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--engine sglang needs --model"),
        (
            "--model m --policy load",
            "with --engine sglang but expected one of: unchunked, fixed:N, target:TIME",
        ),
        ("--model m --tbt-target 50ms --pipeline-parallel-size 2", "does not steer SGLang's pipeline stages"),
        (
            "--model m --tensor-parallel-size 2 -- --tp 2",
            "Got '--tp' after the -- but evenflow's own options",
        ),
        ("--model m --data-parallel-size 2 -- --dp-size 2", "set --dp-size: give it once"),
        ("--model m -- --chunked-prefill-size -1", "as --policy unchunked"),
        ("--model m -- --chunked-prefill-size=-1", "as --policy unchunked"),
        ("--model m --tbt-target 50ms -- --model-path x", "Got '--model-path' after the --"),
        ("--model m --tbt-target 50ms --sglang-python /no/such/python", "Got --sglang-python '/no/such/python' but"),
    ],
)
def test_wrong_options_are_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--engine", "sglang", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_several_names_are_refused() -> None:
    policy = PolicySpec.parse("target:50ms")
    with pytest.raises(InvalidInput, match="a, b but SGLang takes one name"):
        SglangLaunch(python="python", model=MODEL, policy=policy, model_names=("a", "b"))


def test_without_sglang_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SGLANG.python_variable, raising=False)
    monkeypatch.setattr(launch, "installed_version", lambda packages: None)
    with pytest.raises(MissingDependency, match="needs SGLang, which is not installed here"):
        SGLANG.find_python(None)
