"""What the front keeps apart in a host engine: ids, prefix caches and stored responses of keys, and methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from evenflow.sglang.launch import SglangLaunch
from tests.server.proxy.fronts import MODEL, figure, front, seen
from tests.server.serving import RunningServer

CLIENT = httpx.Client(timeout=30)
KEYS = {"api_keys": ["a", "b"], "admin_api_keys": ["root"]}
PROMPT = {"prompt": [1, 2, 3], "max_tokens": 2}


@pytest.fixture(scope="module", autouse=True)
def closed_client() -> Iterator[None]:
    yield
    CLIENT.close()


@pytest.fixture(scope="module")
def vllm(python: str) -> Iterator[RunningServer]:
    with front(python, **KEYS) as running:
        yield running


@pytest.fixture(scope="module")
def sglang(python: str) -> Iterator[RunningServer]:
    with front(python, kind=SglangLaunch, **KEYS, limits={"max_tenant_requests": 1}) as running:
        yield running


@pytest.fixture(scope="module")
def without_keys(python: str) -> Iterator[RunningServer]:
    with front(python, kind=SglangLaunch) as running:
        yield running


def ask(server: RunningServer, key: str, path: str, body: Any = None, method: str = "POST", **headers: str) -> Any:
    headers = {"authorization": f"Bearer {key}", **headers}
    return CLIENT.request(method, server.url + path, json=body, headers=headers)


def bodies(server: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(server, "root", "/seen").json()["bodies"]
    return found


def last_body(server: RunningServer, key: str, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    assert ask(server, key, path, {**PROMPT, **body}).status_code == 200
    return bodies(server)[-1]


def test_keys_have_salts_of_their_own(vllm: RunningServer, sglang: RunningServer) -> None:
    for server, names in ((vllm, ["cache_salt"]), (sglang, ["cache_salt", "extra_key"])):
        for name in names:
            salts = [
                last_body(server, key, body)[name]
                for key in ("a", "b", "root")
                for body in ({}, {name: "x"}, {name: "y"})
            ]
            assert len(set(salts)) == 9
            assert salts[1] == last_body(server, "a", {name: "x"})[name]
            copied = last_body(server, "b", {name: salts[0]})[name]
            assert copied not in salts


def test_every_prompt_of_a_batch_has_its_salt(sglang: RunningServer) -> None:
    batch = last_body(sglang, "a", {"extra_key": ["x", "y"]}, "/generate")["extra_key"]
    assert batch == [last_body(sglang, "a", {"extra_key": one}, "/generate")["extra_key"] for one in ("x", "y")]


def test_the_rest_of_a_body_is_as_it_came(vllm: RunningServer) -> None:
    raw = '{"prompt": [1], "huge": 123456789012345678901234567890, "max_tokens": 1, "f": 1e-7, "\\u00e9": "\\u00e8"}'
    headers = {"authorization": "Bearer a", "content-type": "application/json"}
    assert CLIENT.post(vllm.url + "/v1/completions", content=raw, headers=headers).status_code == 200
    body = bodies(vllm)[-1]
    assert (body["huge"], body["f"], body["é"]) == (123456789012345678901234567890, 1e-7, "è")


def test_a_salt_that_is_given_twice_is_none(vllm: RunningServer) -> None:
    raw = '{"prompt": [1], "max_tokens": 1, "cache_salt": "x", "cache_salt": "y"}'
    headers = {"authorization": "Bearer a", "content-type": "application/json"}
    assert CLIENT.post(vllm.url + "/v1/completions", content=raw, headers=headers).status_code == 200
    assert bodies(vllm)[-1]["cache_salt"] == last_body(vllm, "a", {"cache_salt": "y"})["cache_salt"]


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        ("[1]", "application/json", 400),
        ('{"prompt"', "application/json", 400),
        ('{"cache_salt": ' + "[" * 100_000, "application/json", 400),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "application/json", 400),
        ("{}", "text/plain", 415),
    ],
)
def test_bodies_that_cannot_be_kept_apart_are_refused(
    vllm: RunningServer, content: str, content_type: str, status: int
) -> None:
    headers = {"authorization": "Bearer a", "content-type": content_type}
    refused = CLIENT.post(vllm.url + "/v1/completions", content=content, headers=headers)
    assert refused.status_code == status
    assert refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["kv_transfer_params", "session_params", "bootstrap_host", "background"])
def test_fields_that_reach_beyond_a_request_are_for_admins(vllm: RunningServer, name: str) -> None:
    refused = ask(vllm, "a", "/v1/completions", {**PROMPT, name: {"x": 1}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, name)
    assert ask(vllm, "a", "/v1/completions", {**PROMPT, name: None}).status_code == 200
    assert ask(vllm, "root", "/v1/completions", {**PROMPT, name: {"x": 1}}).status_code == 200


def test_chunk_times_are_the_callers_whatever_ids_are_chosen(vllm: RunningServer) -> None:
    def chunks(key: str, response_id: str) -> int:
        status: int = ask(vllm, key, f"/v1/requests/{response_id}/chunks", method="GET").status_code
        return status

    by_body = ask(vllm, "a", "/v1/completions", {**PROMPT, "request_id": "mine"}).json()["id"]
    by_header = ask(vllm, "a", "/v1/completions", PROMPT, **{"x-request-id": "named"}).json()["id"]
    assert by_body.endswith("~mine")
    assert by_header.endswith("~named")
    for chosen in ("mine", "~key-1~mine", by_body):  # another key cannot claim it, nor keep it from its owner
        ask(vllm, "b", "/v1/completions", {**PROMPT, "request_id": chosen})
        ask(vllm, "b", "/v1/completions", PROMPT, **{"x-request-id": chosen})
    for response_id in (by_body, by_header):
        vllm.until(lambda response_id=response_id: chunks("a", response_id) == 200)  # type: ignore[misc]
        assert [chunks(key, response_id) for key in ("b", "root")] == [404, 200]


def test_an_id_that_is_no_plain_text_is_replaced(vllm: RunningServer) -> None:
    for chosen in ("a b", "x\ny", "é", "", 7, "x" * 200):
        ask(vllm, "a", "/v1/completions", {**PROMPT, "request_id": chosen})
        assert bodies(vllm)[-1]["request_id"].startswith("~key-1~")
        assert str(chosen) not in bodies(vllm)[-1]["request_id"] or chosen in ("", 7)


def test_nobody_hides_a_request_from_the_figures(vllm: RunningServer) -> None:
    def tokens() -> float:
        text = ask(vllm, "root", "/metrics", method="GET").text
        lines = [line for line in text.splitlines() if line.startswith("evenflow:tenant_prompt_tokens_total{")]
        return sum(float(line.split()[-1]) for line in lines if 'key="key-2"' in line)

    before = tokens()
    ask(vllm, "b", "/v1/completions", {**PROMPT, "request_id": "evenflow-warm-up-1"})
    vllm.until(lambda: tokens() == before + len(PROMPT["prompt"]))  # type: ignore[arg-type]


def test_stored_responses_are_their_keys(vllm: RunningServer) -> None:
    stored = ask(vllm, "a", "/v1/responses", {"input": "x"}).json()["id"]
    assert stored.startswith("resp_")
    path = f"/v1/responses/{stored}"
    for method, where in (("GET", path), ("DELETE", path), ("POST", path + "/cancel"), ("HEAD", path)):
        assert ask(vllm, "b", where, method=method).status_code == 404, method
    follow = {"input": "y", "previous_response_id": stored}
    assert ask(vllm, "b", "/v1/responses", follow).status_code == 404
    assert ask(vllm, "a", "/v1/responses", follow).json()["of"] == stored
    assert [ask(vllm, key, path, method="GET").json()["id"] for key in ("a", "root")] == [stored, stored]
    assert ask(vllm, "a", path, method="DELETE").status_code == 200
    encoded = path.replace("~", "%7E")
    assert ask(vllm, "b", encoded, method="GET").status_code in (403, 404)


def test_routes_and_methods_are_listed(vllm: RunningServer, sglang: RunningServer) -> None:
    for server in (vllm, sglang):
        for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            for path in ("/generate", "/v1/completions", "/release_memory_occupation", "/v1/models"):
                assert ask(server, "a", path, {}, method).status_code in (403, 405), (method, path)
        for path in ("/release_memory_occupation", "/server_info", "/v1/load_lora_adapter", "/api/chat"):
            for method in ("GET", "POST"):
                assert ask(server, "a", path, None, method).status_code == 403, path
        assert ask(server, "root", "/v1/completions", PROMPT, "OPTIONS").status_code == 405


def test_every_method_that_generates_counts(sglang: RunningServer) -> None:
    headers = {"authorization": "Bearer root"}
    stream = {**PROMPT, "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", sglang.url + "/v1/completions", json=stream, headers=headers, timeout=30) as first:
        lines = first.iter_lines()
        assert next(lines)
        for method in ("PUT", "POST"):
            assert ask(sglang, "root", "/generate", {"text": "x"}, method).status_code == 429
        assert next(lines) == ""


def test_a_web_page_cannot_cause_effects(without_keys: RunningServer) -> None:
    path = "/release_memory_occupation"
    for headers in ({}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "none"}):
        refused = without_keys.get(path, headers=headers)
        assert refused.status_code == 403, headers
    assert without_keys.get(path).json()["error"]["code"] == "effect_by_get"
    assert seen(without_keys)["effects"] == []
    assert without_keys.post(path).status_code == 200
    assert seen(without_keys)["effects"] == ["release"]
    assert without_keys.get("/v1/models").status_code == 200


def test_without_keys_bodies_and_ids_are_the_clients(without_keys: RunningServer) -> None:
    body = {**PROMPT, "rid": "~key-1~mine", "request_id": "mine", "session_params": {"id": 1}}
    assert without_keys.post("/v1/completions", body).status_code == 200
    assert seen(without_keys)["bodies"][-1] == body
    assert figure(without_keys, "evenflow:up") == 1
    assert 'key="key-1"' not in without_keys.get("/metrics").text


def test_openais_client_finds_its_own(vllm: RunningServer) -> None:
    client = vllm.openai(api_key="a")
    response: Any = client.post("/responses", body={"input": "x"}, cast_to=object)
    found: Any = client.get(f"/responses/{response['id']}", cast_to=object)
    assert found["id"] == response["id"]
    answer = client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=3)
    chunks: Any = client.get(f"/requests/{answer.id}/chunks", cast_to=object)
    assert len(chunks["requests"]) == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tbt_target": 300}, 'which is 300 seconds; write "300ms"'),
        ({"tbt_target": "soon"}, "expected a duration"),
        ({"ttft_target": -1}, "ttft_target=-1"),
        ({"service_class": "fast"}, "expected one of: interactive, standard, batch"),
        ({"tenant": 5}, "tenant=5"),
    ],
)
def test_settings_that_the_host_would_ignore_are_refused(
    vllm: RunningServer, without_keys: RunningServer, setting: dict[str, Any], message: str
) -> None:
    [name] = setting
    places = (
        (vllm, "vllm_xargs", {"vllm_xargs": setting}),
        (without_keys, "custom_params", {"custom_params": setting}),
        (without_keys, "sampling_params.custom_params", {"sampling_params": [{}, {"custom_params": setting}]}),
    )
    for server, path, body in places:
        num_before = len(bodies(server))
        refused = ask(server, "a", "/v1/completions", PROMPT | body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], message in error["message"]) == (400, f"{path}.{name}", True)
        assert len(bodies(server)) == num_before


def test_only_an_admins_stream_has_a_target_below_the_servers(vllm: RunningServer) -> None:
    for key, target, status in (("a", "20ms", 403), ("a", "50ms", 200), ("root", "20ms", 200)):
        answer = ask(vllm, key, "/v1/completions", {**PROMPT, "vllm_xargs": {"tbt_target": target}})
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["param"] == "vllm_xargs.tbt_target"


def test_settings_of_a_host_reach_it_as_they_came(vllm: RunningServer, without_keys: RunningServer) -> None:
    own = {"tbt_target": "50ms", "ttft_target": "20s", "service_class": "batch", "tenant": "acme", "other": [1]}
    assert last_body(vllm, "a", {"vllm_xargs": own})["vllm_xargs"] == own
    for body in ({"custom_params": own}, {"custom_params": None}, {"sampling_params": 5}, {"custom_params": [own, 5]}):
        assert last_body(without_keys, "a", body).items() >= body.items()
