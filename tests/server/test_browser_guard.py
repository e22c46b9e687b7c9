"""Pages of other sites and made-up names of this server: refused where no key protects it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server.serving import RunningServer, scripted_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture(scope="module")
def open_server() -> Iterator[RunningServer]:
    settings = {"allowed_hosts": ["Gpu.example.org"], "allowed_origins": ["https://chat.example.org"]}
    with scripted_server(settings=settings) as running:
        yield running


PATHS = ("/v1/models", "/health", "/metrics", "/", "/nothing")


def test_only_names_of_this_server_are_served(server: RunningServer) -> None:
    """Before, any Host was: a page whose name points here could read everything (DNS rebinding)."""
    port = server.port
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "a b",
        "[",
    ):
        for path in PATHS:
            response = server.get(path, headers={"Host": host})
            assert response.status_code == 403, (host, path)
            assert "--allow-host" in response.json()["error"]["message"]
    body = {"prompt": "a", "max_tokens": 1}
    assert server.post("/v1/completions", body, headers={"Host": "evil.example"}).status_code == 403
    for host in ("localhost", f"LOCALHOST:{port}", "a.localhost", "127.0.0.1", f"[::1]:{port}", "192.168.1.7:80"):
        assert server.get("/v1/models", headers={"Host": host}).status_code == 200, host


def test_only_its_own_pages_may_ask(server: RunningServer) -> None:
    for origin in ("https://evil.example", "null", f"http://localhost:{server.port + 1}", "http://127.0.0.1", "x"):
        response = server.get("/v1/models", headers={"Origin": origin})
        assert response.status_code == 403, origin
        assert "--allow-origin" in response.json()["error"]["message"]
    assert server.get("/v1/models", headers={"Origin": server.url}).status_code == 200


def test_images_of_other_pages_are_not_served(server: RunningServer) -> None:
    """They are fetched by GET and without an Origin; browsers say which site the page is of."""

    def status(**headers: str) -> int:
        return server.get(
            "/v1/models", headers={name.replace("_", "-"): value for name, value in headers.items()}
        ).status_code

    for site in ("cross-site", "same-site"):
        assert status(Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors", Sec_Fetch_Dest="image") == 403
        assert status(Sec_Fetch_Site=site) == 403
        assert status(Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="iframe") == 403
        assert status(Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document") == 200
    for site in ("same-origin", "none"):
        assert status(Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors") == 200


def test_names_and_pages_can_be_allowed(open_server: RunningServer) -> None:
    for host in ("gpu.example.org", "GPU.example.org.:8000"):
        assert open_server.get("/v1/models", headers={"Host": host}).status_code == 200
    headers = {"Host": "gpu.example.org", "Origin": "https://chat.example.org"}
    response = open_server.get("/v1/models", headers=headers)
    assert response.headers["access-control-allow-origin"] == "https://chat.example.org"
    assert open_server.get("/v1/models", headers={"Host": "other.example.org"}).status_code == 403


def test_a_key_protects_without_a_guard() -> None:
    with scripted_server(settings={"api_keys": ["a"]}) as locked:
        headers = {"Host": "any.example", "Origin": "https://other.example", "Authorization": "Bearer a"}
        assert locked.get("/v1/models", headers=headers).status_code == 200


def test_nothing_redirects_to_what_the_host_header_says(open_server: RunningServer) -> None:
    """Before, a path with a slash too many was answered with a redirect to there."""
    with scripted_server(settings={"api_keys": ["a"]}) as locked:
        for running in (open_server, locked):
            for path in ("/v1/models/", "/health/", "/v1/target/", "/metrics/", "//evil.example/"):
                headers = {"Authorization": "Bearer a"}
                response = httpx.get(running.url + path, headers=headers, follow_redirects=False, verify=False)
                assert not response.is_redirect, path
                assert "location" not in response.headers
