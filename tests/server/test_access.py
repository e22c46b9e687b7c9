"""Keys, origins, limits: who may ask for what."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from evenflow.core.service_classes import ServiceClass
from evenflow.errors import InvalidConfig
from evenflow.server.access import ApiKeys, Caller, check_own_target, read_key_file
from evenflow.server.errors import ApiError
from evenflow.server.gate import ServerLimits
from tests.server.serving import MODEL, RunningServer, scripted_server

OPEN = ("/health", "/ready", "/version")
CLOSED = ("/v1/models", "/v1/responses/resp_1", "/v1/target", "/metrics", "/live/feed", "/live/load")


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    settings = {"api_keys": ["first-key", "second"], "allowed_origins": ["https://example.org"]}
    with scripted_server(settings=settings) as running:
        yield running


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_only_what_watches_the_server_needs_no_key(locked: RunningServer) -> None:
    for path in OPEN:
        assert locked.get(path).status_code == 200
    for path in CLOSED:
        response = locked.get(path)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        assert locked.post(path, {"prompt": "a"}).status_code == 401
        assert locked.post(path, content=b"{").status_code == 401


def test_every_key_opens_and_no_other(locked: RunningServer) -> None:
    for key in ("first-key", "second"):
        assert locked.get("/v1/models", headers=with_key(key)).status_code == 200
    for key in ("third", "first", "second ey", "sécond"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert httpx.get(locked.url + "/v1/models", headers=headers, verify=False).status_code == 401  # type: ignore[arg-type]
    assert locked.get("/v1/models", headers={"Authorization": "Basic second"}).status_code == 401
    assert locked.openai(api_key="second").models.list().data[0].id == MODEL
    with pytest.raises(openai.AuthenticationError):
        locked.openai(api_key="third").completions.create(model=MODEL, prompt="a")


@pytest.mark.parametrize(
    "head",
    [
        "GET /v1/models HTTP/1.1\r\nHost: localhost/health?",
        "GET /v1/models HTTP/1.1\r\nHost: localhost/health#",
        "GET /v1/models HTTP/1.1\r\nHost: /health",
        "GET /v1/models?/health HTTP/1.1\r\nHost: localhost",
        "GET /health/../v1/models HTTP/1.1\r\nHost: localhost",
        "GET /health/%2e%2e/v1/models HTTP/1.1\r\nHost: localhost",
        "GET /health%2f..%2fv1/models HTTP/1.1\r\nHost: localhost",
        "GET /health;/../v1/models HTTP/1.1\r\nHost: localhost",
        "GET //v1/models HTTP/1.1\r\nHost: localhost",
        "GET /v1//models HTTP/1.1\r\nHost: localhost",
        "GET /V1/models HTTP/1.1\r\nHost: localhost",
        "GET /%76%31/models HTTP/1.1\r\nHost: localhost",
        "GET /v1/models/ HTTP/1.1\r\nHost: localhost",
        "GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost/health?",
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Original-URL: /health\r\nX-Rewrite-URL: /health",
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Prefix: /health",
        "OPTIONS /v1/models HTTP/1.1\r\nHost: localhost",
        "HEAD /v1/models HTTP/1.1\r\nHost: localhost",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost/health?\r\nContent-Length: 2\r\nX-Http-Method-Override: GET",
    ],
)
def test_no_spelling_of_a_path_gets_past_the_keys(locked: RunningServer, head: str) -> None:
    with socket.create_connection(("127.0.0.1", locked.port), timeout=30) as connection:
        connection.sendall(f"{head}\r\nConnection: close\r\n\r\n{{}}".encode())
        reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert int(reply.split()[1]) in (307, 400, 401, 404, 405), reply
    assert MODEL.encode() not in reply


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of equal length, all of them, wherever the right one is."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare_digest(one, other)

    compare_digest = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = ApiKeys(["first", "a-much-longer-second-key", "third"], ["admin"])
    for key in ("first", "third", "admin", "", "f", "firs", "x" * 100_000):
        compared.clear()
        with contextlib.suppress(ApiError):
            keys.check(f"Bearer {key}", "127.0.0.1")
        assert compared == [(32, 32)] * 4, key


@pytest.mark.slow
def test_one_keys_flood_leaves_others_their_cached_prefixes() -> None:
    """Made-up tenants do not help: a key has one share of the cache."""
    settings = {"api_keys": ["quiet", "flood"]}
    with scripted_server(settings=settings, num_blocks=64) as server:

        def cached(key: str, first: int, tenant: str = "") -> int:
            body = {"prompt": [first, *range(200, 295)], "max_tokens": 1, "tenant": tenant}
            usage = server.post("/v1/completions", body, headers=with_key(key)).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        cached("quiet", 3)
        for number in range(30):
            cached("flood", number, f"tenant-{number}")
        assert cached("quiet", 3) > 0


def test_keys_do_not_share_a_prefix_cache(locked: RunningServer) -> None:
    def cached(key: str) -> int:
        body = {"prompt": list(range(200, 300)), "max_tokens": 1}
        usage = locked.post("/v1/completions", body, headers=with_key(key)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("first-key"), cached("first-key"), cached("second"), cached("second")] == [0, 96, 0, 96]


def test_only_pages_of_allowed_origins_may_ask(locked: RunningServer) -> None:
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, is_allowed in (("https://example.org", True), ("https://example.com", False)):
        response = httpx.options(locked.url + "/v1/completions", headers={"Origin": origin, **asking})
        assert (response.headers.get("access-control-allow-origin") == origin) is is_allowed
    with scripted_server() as unlocked:
        response = unlocked.get("/v1/models", headers={"Origin": "https://example.org"})
        assert "access-control-allow-origin" not in response.headers


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n one \n\ntwo\n")
    assert read_key_file(path) == ["one", "two"]
    path.write_text("# none\n")
    with pytest.raises(InvalidConfig, match="holds no key"):
        read_key_file(path)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_key_file(tmp_path / "absent")
    with pytest.raises(InvalidConfig, match="empty API key"):
        ApiKeys([" "])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sk-a nam=acme", "nam=... behind it"),
        ("sk-a name=a b", "name=... behind it"),
        ("sk-a name=", "name=... behind it"),
        ("sk-a sk-b", "more text behind it"),
        ("sk-a # of acme", "more text behind it"),
    ],
)
def test_other_words_behind_a_key_are_refused_and_the_key_is_not_shown(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"good name=one\n\n{line}\n")
    with pytest.raises(InvalidConfig, match="In line 3") as refused:
        read_key_file(path)
    assert said in str(refused.value)
    assert "sk-" not in str(refused.value)
    with pytest.raises(InvalidConfig, match=said.replace("...", "[.]{3}")):
        ApiKeys([line])


def test_a_key_for_metrics_reads_all_figures_and_nothing_else() -> None:
    settings = {"api_keys": ["a", "b"], "metrics_api_keys": ["m name=prometheus"]}
    with scripted_server(settings=settings) as server:
        assert server.post("/v1/completions", {"prompt": "a", "tenant": "x"}, headers=with_key("a")).is_success
        assert 'tenant="x"' in server.get("/metrics", headers=with_key("m")).text
        for path in (*CLOSED, "/v1/requests/x/chunks"):
            answer = server.get(path, headers=with_key("m"))
            assert answer.status_code == (200 if path == "/metrics" else 403), path
        refused = server.post("/v1/completions", {"prompt": "a"}, headers=with_key("m"))
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "metrics_key"


def test_roles_of_keys_are_apart() -> None:
    with pytest.raises(InvalidConfig, match="alone"):
        ApiKeys([], [], ["m"])
    with pytest.raises(InvalidConfig, match="two roles"):
        ApiKeys(["a"], [], ["a"])
    with pytest.raises(InvalidConfig, match="named 'x'"):
        ApiKeys(["a name=x"], [], ["m name=x"])
    assert ApiKeys(["a"], [], ["m"]).check("Bearer a", "").is_admin  # the single key still is
    with pytest.raises(InvalidConfig, match="metrics-1"):
        ApiKeys(["a"], [], ["m"]).check_tenants(["metrics-1"])


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"max_body_size=8 .* 8KiB or 8MiB"):
        ServerLimits(max_body_size=8)
    for name in ("max_body_size", "max_n", "max_waiting", "max_prompt_tokens", "max_tenant_requests"):
        with pytest.raises(InvalidConfig, match=name):
            ServerLimits(**{name: -1})


def test_a_server_may_take_shorter_prompts_than_the_model() -> None:
    with scripted_server(settings={"limits": {"max_prompt_tokens": 10}}) as server:
        assert server.post("/v1/completions", {"prompt": [5] * 10, "max_tokens": 1}).status_code == 200
        refused = server.post("/v1/completions", {"prompt": [5] * 11, "max_tokens": 1})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_who_is_an_admin() -> None:
    def admins(keys: list[str], admin_keys: list[str]) -> list[str]:
        known = ApiKeys(keys, admin_keys)
        return [key for key in (*keys, *admin_keys) if known.check(f"Bearer {key}", "").is_admin]

    assert ApiKeys([]).check(None, "").is_admin
    assert admins(["only"], []) == ["only"]
    assert admins(["one", "two"], []) == []
    assert admins(["one"], ["boss"]) == ["boss"]
    assert admins([], ["boss", "other"]) == ["boss", "other"]
    with pytest.raises(InvalidConfig, match="one API key for two roles"):
        ApiKeys(["one"], [" one "])


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    settings = {"api_keys": ["first", "second"], "admin_api_keys": ["boss"]}
    with scripted_server(policy="target:50ms", settings=settings) as running:
        yield running


def test_only_an_admin_changes_the_target(shared: RunningServer) -> None:
    """Before, every key did."""
    body = {"tbt_target": "80ms"}
    refused = httpx.put(shared.url + "/v1/target", json=body, headers=with_key("first"), verify=False)
    assert refused.status_code == 403
    assert "--admin-api-key" in refused.json()["error"]["message"]
    assert shared.get("/v1/target", headers=with_key("first")).json()["tbt_target"] == 0.05
    assert (
        httpx.put(shared.url + "/v1/target", json=body, headers=with_key("boss"), verify=False).json()["tbt_target"]
        == 0.08
    )


def test_a_class_may_have_a_lower_target() -> None:
    caller, admin = Caller("k", "key-1", "", is_admin=False), Caller("k", "boss", "", is_admin=True)
    plain, quick = (ServiceClass(name="one", rank=0, share=1, tbt_target=target) for target in (None, 0.02))
    check_own_target(caller, 0.02, 0.05, quick, "tbt_target")
    check_own_target(caller, 0.001, None, plain, "tbt_target")  # there is no target: the engine says so
    check_own_target(admin, 0.001, 0.05, plain, "tbt_target")
    for of_class, asked in ((quick, 0.019), (plain, 0.02)):
        with pytest.raises(ApiError, match="or more"):
            check_own_target(caller, asked, 0.05, of_class, "tbt_target")


def test_a_key_sees_its_own_tenants_only(shared: RunningServer) -> None:
    """Before, every key saw all, and those of the same name were counted together."""
    for key, tenant in (("first", "docs"), ("second", "docs"), ("second", "secret project")):
        body = {"prompt": [5, 6], "max_tokens": 1, "tenant": tenant}
        assert shared.post("/v1/completions", body, headers=with_key(key)).status_code == 200

    def tenants(key: str) -> set[tuple[str, str]]:
        families = text_string_to_metric_families(shared.get("/metrics", headers=with_key(key)).text)
        samples = [one for family in families if family.name == "evenflow:tenant_requests" for one in family.samples]
        return {(one.labels["key"], one.labels["tenant"]) for one in samples}

    assert tenants("first") == {("key-1", "docs")}
    assert tenants("second") == {("key-2", "docs"), ("key-2", "secret project")}
    assert tenants("boss") == tenants("first") | tenants("second")
    assert "vllm:num_requests_running" in shared.get("/metrics", headers=with_key("first")).text


def test_only_an_admins_stream_has_a_target_below_the_servers(shared: RunningServer) -> None:
    """Before, one key's stream at 1 ms had the prompts of all others cut into chunks of a few tokens."""
    httpx.put(shared.url + "/v1/target", json={"tbt_target": "50ms"}, headers=with_key("boss"), verify=False)
    body = {"prompt": [5, 6], "max_tokens": 1, "tenant": "docs"}
    for key, target, status in (("first", 0.001, 403), ("first", "50ms", 200), ("first", 2, 200), ("boss", 0.001, 200)):
        answer = shared.post("/v1/completions", body | {"tbt_target": target}, headers=with_key(key))
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["param"] == "tbt_target"
            assert "may ask for 50ms or more" in answer.json()["error"]["message"]
