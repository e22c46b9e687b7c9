"""vLLM behind evenflow's front: what passes through, what is evenflow's own, and what is left when vLLM dies.

A small process stands in for vLLM, whose start takes minutes; tests/vllm/test_serve.py runs the real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from evenflow.cli.main import main
from evenflow.core.policies import PolicySpec
from evenflow.errors import EngineFailed, InvalidInput, MissingDependency
from evenflow.hosts import launch
from evenflow.server.proxy import host_engine, warm_up
from evenflow.server.proxy.host_engine import log_loop_error, start_guard
from evenflow.server.serving import ServerSettings, bind, serve_host
from evenflow.vllm.graphs import advice_on_graphs, graph_flags, uncaptured_rows, uncaptured_steps
from evenflow.vllm.launch import VLLM, VllmLaunch, worker_flags
from tests.server import stand_in_vllm
from tests.server.proxy.fronts import MODEL, figure, front, seen
from tests.server.serving import RunningServer

STREAM = {"prompt": [1, 2, 3], "max_tokens": 2000, "stream": True}


@contextmanager
def open_stream(server: RunningServer) -> Iterator[Iterator[str]]:
    """A stream that has given its first event."""
    with httpx.stream("POST", server.url + "/v1/completions", json=STREAM, timeout=30, verify=False) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
        yield lines


@pytest.fixture(scope="module")
def server(python: str) -> Iterator[RunningServer]:
    with front(python, ["--tensor-parallel-size", "2"]) as running:
        yield running


def test_requests_pass_both_ways(server: RunningServer) -> None:
    answer = server.openai().completions.create(model=MODEL, prompt=[5, 6], max_tokens=3)
    assert answer.choices[0].text == "token 0 token 1 token 2 "
    assert server.get("/v1/models").json()["data"][0]["id"] == MODEL
    bad = server.post("/v1/completions", {})
    assert bad.status_code == 400
    assert bad.json()["error"]["message"] == "no prompt"
    assert server.post("/no/such/route").json() == {"detail": "Not Found"}
    headers = {"authorization": "Bearer secret", "x-api-key": "secret", "x-request-id": "mine"}
    arrived = seen(server, params={"a": "b c"}, headers=headers)
    assert arrived["query"] == "a=b+c"
    assert arrived["headers"]["x-request-id"] == "mine"
    assert not {"authorization", "x-api-key"} & arrived["headers"].keys()


def test_the_live_pages_load_fits_the_hosts_context(server: RunningServer) -> None:
    *_, prompts = server.get("/live/load").json()["sessions"]
    assert prompts["kind"] == "prompt"
    assert 100 < len(prompts["requests"][0]["content"]) / 4 < 4096 / 2


def test_vllm_is_started_with_the_plug_in_and_the_flags(server: RunningServer) -> None:
    arguments = seen(server)["arguments"]
    assert arguments[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--tensor-parallel-size", "2"]
    assert arguments[arguments.index("--scheduler-cls") + 1] == "evenflow.vllm.LatencyTargetScheduler"


def test_the_sockets_between_front_and_engine_are_private(server: RunningServer) -> None:
    lines = Path("/proc/net/unix").read_text().splitlines()
    folders = {Path(line.split()[-1]).parent for line in lines if re.search(r"/evenflow-\w+/(http|steps)$", line)}
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in folders if folder.exists()]
    assert modes
    assert set(modes) == {0o700}


def test_streams_pass_as_they_come(server: RunningServer) -> None:
    events = server.events("/v1/completions", {"prompt": [1], "max_tokens": 5})
    assert "".join(event["choices"][0]["text"] for event in events) == "token 0 token 1 token 2 token 3 token 4 "
    with open_stream(server) as lines:  # far from its end, and more comes
        assert next(lines).startswith("data: ")


def test_a_client_that_goes_away_ends_its_request_in_vllm(server: RunningServer) -> None:
    with open_stream(server):
        assert seen(server)["running"] == 1
    server.until(lambda: seen(server)["running"] == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json={**STREAM, "stream": False}, timeout=0.2, verify=False)
    server.until(lambda: seen(server)["running"] == 0)
    server.until(lambda: server.server.service.gate.num_inside == 0)


def test_data_that_arrive_as_a_client_goes_away_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log_loop_error)
        waiting = loop.create_future()
        waiting.cancel()
        loop.call_soon(waiting.set_result, None)  # as httpx's sockets do
        loop.call_soon(divmod, 1, 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    for make_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(run())
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2


def test_the_target_changes_while_it_runs(server: RunningServer) -> None:
    assert server.get("/v1/target").json()["tbt_target"] == 0.05
    changed = server.request("PUT", "/v1/target", {"tbt_target": "80ms", "paced": True})
    assert changed.json() == {"policy": "target:80ms,paced", "tbt_target": 0.08, "paced": True, "feasible_target": None}
    server.post("/v1/completions", {"prompt": [1], "max_tokens": 2})
    assert seen(server)["policy"] == "target:80ms,paced"
    server.until(lambda: figure(server, "evenflow:tbt_target_seconds") == 0.08)
    assert server.request("PUT", "/v1/target", {"tbt_target": 0}).status_code == 400
    server.request("PUT", "/v1/target", {"tbt_target": "50ms", "paced": False})


def test_metrics_are_vllms_and_evenflows(server: RunningServer) -> None:
    before = figure(server, "evenflow:chunk_tokens_count")
    server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 4})
    server.until(lambda: figure(server, "evenflow:chunk_tokens_count") == before + 1)
    text = server.get("/metrics").text
    assert text.startswith(stand_in_vllm.METRICS)
    assert figure(server, "evenflow:up") == 1
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))


def test_the_page_is_fed_by_vllms_steps(server: RunningServer) -> None:
    assert "<html" in server.get("/").text
    with open_stream(server), httpx.stream("GET", server.url + "/live/feed", timeout=30, verify=False) as response:
        columns: dict[str, Any] = {}
        figures: dict[str, Any] = {}
        lines = response.iter_lines()
        while not (columns.get("chunks") and any(columns["chunks"]) and figures.get("tbt", [None])[0]):
            line = next(lines)
            if line == "event: steps":
                columns = json.loads(next(lines).removeprefix("data: "))
            elif line == "event: figures":
                figures = json.loads(next(lines).removeprefix("data: "))
    request, start, length, reason, seconds = [chunk for chunks in columns["chunks"] for chunk in chunks][-1]
    assert request > 0
    assert (start, length, reason) == (0, 3, "end_of_prompt")
    assert seconds == pytest.approx(stand_in_vllm.TOKEN_S)
    assert figures["running"] == 1
    assert figures["up"] is True
    observer = server.server.service.client._observer  # type: ignore[attr-defined]
    server.until(lambda: not observer.requests)  # an abort is told with no further step


@pytest.mark.slow
def test_until_vllm_is_warm_it_is_healthy_but_not_ready(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_warm = threading.Event()

    async def until_warm(http: httpx.AsyncClient, name: str) -> None:
        assert (await http.get("/health")).is_success
        while not is_warm.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(host_engine, "warm_up", until_warm)
    with front(python, wait=False, warms_up=True) as server:
        server.until(lambda: server.get("/health").status_code == 200)
        for path in ("/ready", "/v1/models"):
            refused = server.get(path)
            assert (refused.status_code, refused.headers["retry-after"] != "") == (503, True)
            assert "vLLM is warming up" in refused.json()["error"]["message"]
        is_warm.set()
        server.until(lambda: server.get("/ready").status_code == 200)
        assert server.get("/v1/models").status_code == 200


def test_the_warm_up_is_not_observed(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "_STAGES", ((0, (20,)), (3, (20, 40))))
    with front(python, warms_up=True) as server:
        server.until(lambda: seen(server)["running"] == 0)
        assert seen(server)["num_requests"] == 1 + 1 + 3 + 2
        assert figure(server, "evenflow:chunk_tokens_count") == 0
        assert figure(server, "evenflow:step_seconds_count") == 0
        late = {"prompt": [1, 2, 3], "max_tokens": 2, "request_id": warm_up.REQUEST_ID}
        server.post("/v1/completions", late)
        server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 4})
        server.until(lambda: figure(server, "evenflow:step_seconds_count") == 4)
        assert figure(server, "evenflow:chunk_tokens_count") == 1
        observer = server.server.service.client._observer  # type: ignore[attr-defined]
        assert not observer.requests


@pytest.mark.slow
def test_a_vllm_that_dies_of_the_warm_up_fails_to_start(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def kill(http: httpx.AsyncClient, name: str) -> None:
        os.kill((await http.post("/seen")).json()["pid"], signal.SIGKILL)

    monkeypatch.setattr(host_engine, "warm_up", kill)
    started = VllmLaunch(python=python, model=MODEL, policy=PolicySpec.parse("target:50ms"))
    with bind("127.0.0.1", 0) as listener, pytest.raises(EngineFailed, match="before it was ready"):
        asyncio.run(serve_host(ServerSettings(model_names=(MODEL,)), listener, started, 8))


@pytest.mark.slow
def test_limits_and_keys_are_evenflows(python: str) -> None:
    limits = {"max_body_size": 500, "max_waiting": 0, "max_tenant_requests": 1}
    with front(python, api_keys=["secret"], limits=limits) as server:
        for path in ("/v1/models", "/metrics", "/v1/target", "/live/feed"):
            assert server.get(path).status_code == 401
        for path in ("/health", "/ready", "/version", "/"):
            assert server.get(path).status_code == 200
        key = {"authorization": "Bearer secret"}
        assert server.get("/v1/models", headers=key).status_code == 200
        assert server.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200
        refused = server.post("/v1/messages", {})  # vLLM's route, but the refusal is evenflow's
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert server.post("/v1/completions", {"prompt": [1] * 500}, headers=key).status_code == 413
        with httpx.stream(
            "POST", server.url + "/v1/completions", json=STREAM, headers=key, timeout=30, verify=False
        ) as first:
            lines = first.iter_lines()
            assert next(lines)
            refused = server.post("/v1/completions", {"prompt": [1], "max_tokens": 1}, headers=key)
            assert next(lines) == ""
        assert refused.status_code == 429
        assert refused.headers["retry-after"]


@pytest.mark.slow
def test_when_vllm_is_killed_streams_end_with_an_error_and_it_comes_back(python: str) -> None:
    with front(python) as server:
        server.request("PUT", "/v1/target", {"tbt_target": "80ms"})
        pid = seen(server)["pid"]
        with open_stream(server) as lines:
            os.kill(pid, signal.SIGKILL)
            *_, error, done = lines
        assert "vLLM" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        server.until(lambda: server.get("/health").status_code == 503)
        refused = server.post("/v1/completions", {"prompt": [1]})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert "evenflow:up" in server.get("/metrics").text
        server.until(lambda: server.get("/ready").status_code == 200)
        after = seen(server)
        assert after["pid"] != pid
        assert after["policy"] == "target:80ms"
        assert figure(server, "evenflow:engine_restarts_total") == 1
        assert server.post("/v1/completions", {"prompt": [1], "max_tokens": 2}).status_code == 200


@pytest.mark.slow
def test_the_end_of_the_front_is_the_end_of_vllm(python: str) -> None:
    with front(python) as server:
        found = seen(server)
        folder = Path(found["arguments"][found["arguments"].index("--uds") + 1]).parent
        assert folder.is_dir()
        with open_stream(server) as lines:
            server.server.should_exit = True
            *_, error, done = lines
        assert "shutting down" in error
        assert done == "data: [DONE]"
    with pytest.raises(ProcessLookupError):
        os.killpg(found["pid"], 0)
    assert not folder.exists()


@pytest.mark.slow
def test_nothing_outlives_a_front_that_is_killed(python: str) -> None:
    command = [sys.executable, "-c", "from evenflow.cli.main import main; main()", "serve", "--engine", "vllm"]
    options = ["--model", MODEL, "--port", "0", "--tbt-target", "50ms", "--vllm-python", _with_version(python)]
    options.append("--no-warm-up")
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "Serving" in line)
        url = line.split(" at ")[1].split("/v1")[0]
        found = httpx.post(url + "/seen", verify=False).json()
        pid = found["pid"]
        assert "--compilation-config" in found["arguments"]  # more graphs
        process.kill()
    _wait_until_gone(pid)


@pytest.mark.parametrize("is_leader_alive", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_guard_ends_workers_that_do_not_go_by_themselves(is_leader_alive: bool) -> None:
    worker = "trap '' TERM; echo $$; while :; do sleep 0.05; done"
    leader = ["/bin/sh", "-c", '/bin/sh -c "$1" & wait', "leader", worker]
    with subprocess.Popen(leader, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        guard = start_guard(process.pid)
        if not is_leader_alive:
            process.kill()
            process.wait()
        guard.communicate()  # as if the front were gone
        _wait_until_gone(pid)


def _wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 20
    while _is_alive(pid):
        assert time.monotonic() < end, "vLLM is still there"
        time.sleep(0.02)


def _with_version(python: str) -> str:
    """The same, which also answers which vLLM it has."""
    path = Path(python).with_name("python-with-version")
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo 0.32.0 && exit\nexec {python} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_the_server_is_there_before_vllm_and_a_failed_start_ends_it(python: str, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 1\nexec {python} "$@"\n')
    slow.chmod(0o700)
    with front(str(slow), wait=False) as server:
        for path in ("/ready", "/health", "/v1/models"):
            assert server.get(path).status_code == 503
        assert server.get("/version").status_code == 200
        server.until(lambda: server.get("/ready").status_code == 200)
    listener = bind("127.0.0.1", 0)
    failing = VllmLaunch(python=python, model=MODEL, policy=PolicySpec.parse("target:50ms"), flags=["--fail"])
    with listener, pytest.raises(EngineFailed, match=r"before it was ready \(exit code 3\)"):
        asyncio.run(serve_host(ServerSettings(model_names=(MODEL,)), listener, failing, 8))


@pytest.mark.parametrize(
    "flags",
    [
        *(["--port", "9"], ["--served_model_name=x"], ["--api-ke", "x"], ["--scheduler-cls", "x"]),
        *(["--additional-config", '{"evenflow": {}}'], ["--additional_config.evenflow.tbt_target=9ms"]),
    ],
)
def test_flags_that_evenflow_sets_are_refused(flags: list[str]) -> None:
    with pytest.raises(InvalidInput, match="Got"):
        VllmLaunch.check_flags(flags)


def test_graphs_of_large_steps_are_captured() -> None:
    name, value = graph_flags(["--tensor-parallel-size", "2"])
    sizes = json.loads(value)["cudagraph_capture_sizes"]
    assert name == "--compilation-config"
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1], 512 in sizes) == (1, 2048, True)


@pytest.mark.parametrize(
    "flag",
    [
        *("--enforce-eager", "--compilation_config={}", "-cc.cudagraph_mode=NONE", "-O0"),
        "--max-cudagraph-capture-size=256",
    ],
)
def test_no_graphs_are_asked_beside_the_users_own(flag: str) -> None:
    assert graph_flags([flag]) == []


def test_products_of_steps_without_a_graph_are_run_before_the_first_request() -> None:
    rows = uncaptured_rows([1, 2, 512], budget=8192)
    assert (rows[0], rows[1], rows[-1]) == (520, 528, 4096)
    assert list(uncaptured_rows([], budget=24)) == [8, 16, 24]
    assert not uncaptured_rows([512], budget=512)


def test_triton_compiles_for_every_range_of_rows_and_both_kinds_of_numbers_before_the_first_request() -> None:
    steps = uncaptured_steps([1, 2, 512], budget=8192)
    tables = (512, 1024, 1536, 2048, 3072, 4096)  # vLLM's tables of kernels go by the nearest of these
    for is_divisible in (True, False):
        kind = [rows for rows in steps if (rows % 16 == 0) == is_divisible]
        assert {min(tables, key=lambda size, rows=rows: abs(size - rows)) for rows in kind} == set(tables)
    assert uncaptured_steps([], budget=100) == [79, 80, 99, 100]
    assert uncaptured_steps([512], budget=513) == [513]
    assert uncaptured_steps([512], budget=512) == []


def test_the_log_says_when_graphs_are_too_small_for_a_target() -> None:
    assert "more than 512 rows one by one" in str(advice_on_graphs([1, 512], budget=8192))
    assert advice_on_graphs([1, 512], budget=512) is None  # no step has more
    assert advice_on_graphs([1, 2048], budget=8192) is None
    assert advice_on_graphs([], budget=8192) is None  # eager by choice, or a CPU


def test_the_users_own_worker_is_kept() -> None:
    assert worker_flags(["--seed", "1"]) == ["--worker-cls", "evenflow.vllm.WarmWorker"]
    assert worker_flags(["--worker_cls=mine.Worker"]) == []


def test_other_flags_are_vllms_to_judge() -> None:
    VllmLaunch.check_flags(
        ["--tensor-parallel-size", "2", "--additional-config", '{"x": 1}', "--distributed-executor-backend=ray", "--"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--engine vllm needs --model"),
        (
            "--model m --policy load",
            "with --engine vllm but expected one of: unchunked, fixed:N, target:TIME",
        ),
        ("--model m --policy alternate:64", "Got policy='alternate:64' with --engine vllm"),
        ("--model m --policy adaptive", "Got policy='adaptive' with --engine vllm"),
        ("--model m --policy prompt-length", "Got policy='prompt-length' with --engine vllm"),
        ("--model m --policy fixed:64 --max-num-batched-tokens 32", "two different budgets"),
        ("--model m --policy unchunked --max-num-batched-tokens 32 --max-model-len 64", "must fit in one step"),
        ("--model m -- --no-enable-chunked-prefill", "as --policy unchunked"),
        ("--model m --tensor-parallel-size 0", "--tensor-parallel-size"),
        ("--model m --tensor-parallel-size 2 -- -tp 2", "Got '-tp' after the -- but evenflow's own options before it"),
        ("--model m --data-parallel-size 2 -- --data_parallel_size=2", "set --data-parallel-size: give it once"),
        ("--model m --policy fixed:64 -- --max-num-batched-tokens 32", "set --max-num-batched-tokens: give it once"),
        ("--model m --policy unchunked -- --enable-chunked-prefill", "set --no-enable-chunked-prefill: give it once"),
        ("--model m --tbt-target 50ms --weights int4", "Got --weights with --engine vllm"),
        ("--model m --tbt-target 50ms --max-n 3", "Got --max-n with --engine vllm"),
        ("--model m --tbt-target 50ms -- --port 1", "Got '--port' after the --"),
        ("--model m --tbt-target 50ms --vllm-python /no/such/python", "cannot be run"),
    ],
)
def test_wrong_options_are_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--engine", "vllm", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-- --tensor-parallel-size 2", "the engine is evenflow's own"),
        ("--no-warm-up", "the engine is evenflow's own"),
        ("--vllm-python /x", "Got --vllm-python, but the engine is evenflow's own: add --engine vllm."),
        ("--tensor-parallel-size 2", "Got --tensor-parallel-size 2 but evenflow's own engine runs on one device"),
        ("--pipeline-parallel-size 4", "Got --pipeline-parallel-size 4 but"),
        ("--tensor-parallel-size 1 --data-parallel-size 8", "Got --data-parallel-size 8 but"),
    ],
)
def test_vllms_options_are_refused_by_the_own_engine(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_without_vllm_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM.python_variable, raising=False)
    monkeypatch.setattr(launch, "installed_version", lambda packages: None)
    with pytest.raises(MissingDependency, match="make install-vllm"):
        VLLM.find_python(None)


def test_keys_have_roles_in_front_of_vllm_too(python: str) -> None:
    with front(python, api_keys=["a", "b"], admin_api_keys=["admin"]) as server:

        def status(method: str, path: str, key: str, body: object = None) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.request(
                method, server.url + path, json=body, headers=headers, timeout=30, verify=False
            ).status_code

        target = {"tbt_target": "80ms"}
        assert [status("PUT", "/v1/target", key, target) for key in ("a", "admin")] == [403, 200]
        assert [status("POST", "/seen", key) for key in ("a", "admin")] == [403, 200]
        for path in ("/v1/../seen", "//seen", "/v1/load_lora_adapter", "/%73een"):
            assert status("POST", path, "a", {}) in (403, 404)
        for stream in (False, True):
            body = {"prompt": [1] * 10, "max_tokens": 2, "stream": stream}
            headers = {"authorization": "Bearer a"}
            text = server.post("/v1/completions", body, headers=headers).text
            response_id = re.search('"id": ?"([^"]+)"', text)[1]  # type: ignore[index]
            path = f"/v1/requests/{response_id}/chunks"
            server.until(lambda path=path: status("GET", path, "admin") == 200)  # type: ignore[misc]
            assert [status("GET", path, key) for key in ("a", "b")] == [200, 404]
