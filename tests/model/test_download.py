"""Files over real HTTP: whole and checked, or not there; resumed where they broke off."""

from __future__ import annotations

import gzip
import hashlib
import multiprocessing
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenflow.errors import EndpointFailed, ModelNotFound
from evenflow.model.hub import download
from evenflow.model.hub.download import Checksum, Downloader, Remote, http_client
from tests.model.hub_server import HubServer, hub_server

CONTENT = bytes(range(256)) * 4000
SHA256 = Checksum("sha256", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with hub_server() as hub:
        hub.files["/a.bin"] = CONTENT
        yield hub


def fetch(hub: HubServer, target: Path, checksum: Checksum | None = None, path: str = "/a.bin") -> list[int]:
    """The bytes that were there each time they were shown."""
    shown: list[int] = []
    with http_client() as http:
        downloader = Downloader(http, retry_wait_s=0.0)
        downloader.fetch(Remote(hub.address + path, None, checksum), target, lambda done, total: shown.append(done))
    return shown


def test_a_file_is_fetched_once(hub: HubServer, tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.bin"
    assert fetch(hub, target, SHA256)[-1] == len(CONTENT)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["a.bin"]
    fetch(hub, target, SHA256)
    assert hub.requests == [("/a.bin", None)]


@pytest.mark.parametrize("checksum", [SHA256, None])
def test_a_broken_connection_is_resumed(hub: HubServer, tmp_path: Path, checksum: Checksum | None) -> None:
    hub.break_after = [1000, 500]
    fetch(hub, tmp_path / "a.bin", checksum)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert hub.fetched("a.bin") == [None, "bytes=1000-", "bytes=1500-"]


@pytest.mark.parametrize("checksum", [SHA256, None])
def test_the_next_run_continues(hub: HubServer, tmp_path: Path, checksum: Checksum | None) -> None:
    hub.break_after = [1000, 0, 0, 0, 0]
    with pytest.raises(
        EndpointFailed, match=r"broke off 5 times in a row \(.*\); 1.0 kB are kept, and the same command"
    ):
        fetch(hub, tmp_path / "a.bin", checksum)
    assert not (tmp_path / "a.bin").exists()
    hub.requests.clear()
    assert fetch(hub, tmp_path / "a.bin", checksum)[0] == 1000
    assert hub.fetched("a.bin") == ["bytes=1000-"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_file_that_changed_in_between_is_fetched_anew(hub: HubServer, tmp_path: Path) -> None:
    hub.break_after = [1000, 0, 0, 0, 0]
    with pytest.raises(EndpointFailed):
        fetch(hub, tmp_path / "a.bin")
    hub.etag, hub.files["/a.bin"] = '"2"', CONTENT[::-1]
    fetch(hub, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT[::-1]


def test_a_server_without_ranges(hub: HubServer, tmp_path: Path) -> None:
    hub.has_ranges, hub.break_after = False, [1000]
    fetch(hub, tmp_path / "a.bin", SHA256)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_partial_file_that_is_too_long_is_dropped(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "a.bin.incomplete").write_bytes(CONTENT + b"more")
    fetch(hub, tmp_path / "a.bin", SHA256)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing_behind(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(EndpointFailed, match=rf"a.bin has sha256 {SHA256.digest}, expected 0000"):
        fetch(hub, tmp_path / "a.bin", Checksum("sha256", "0" * 64))
    assert list(tmp_path.iterdir()) == []


def test_a_busy_server_is_asked_again(hub: HubServer, tmp_path: Path) -> None:
    hub.busy = 4
    fetch(hub, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    hub.busy = 5
    with pytest.raises(EndpointFailed, match=r"5 times in a row \(it replied 503\)"):
        fetch(hub, tmp_path / "b.bin")


@pytest.mark.parametrize("says_length", [True, False])
@pytest.mark.parametrize("known", [{"num_bytes": 10}, {"max_bytes": 10}])
def test_no_more_is_written_than_is_expected(
    hub: HubServer, tmp_path: Path, known: dict[str, int], says_length: bool
) -> None:
    hub.says_length = says_length
    shown: list[int] = []
    with http_client() as http, pytest.raises(EndpointFailed, match=r"a.bin has more than 10 bytes"):
        Downloader(http).fetch(
            Remote(f"{hub.address}/a.bin", **known), tmp_path / "a.bin", lambda done, total: shown.append(done)
        )
    assert max(shown) == 11
    assert list(tmp_path.iterdir()) == []


def test_an_endless_file_ends_before_the_disk_is_full(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.says_length = False
    full = shutil.disk_usage(tmp_path)._replace(free=100_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(EndpointFailed, match=r"has 100.0 MB free: make room"):
        fetch(hub, tmp_path / "a.bin")


def test_packed_bytes_are_refused(hub: HubServer, tmp_path: Path) -> None:
    hub.files["/a.bin"], hub.headers = gzip.compress(b"0" * 10_000_000), {"Content-Encoding": "gzip"}
    with pytest.raises(EndpointFailed, match=r"a.bin sent 'gzip' data, but only plain bytes were asked for"):
        fetch(hub, tmp_path / "a.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_small_answer_has_a_bound(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_MAX_SMALL_BYTES", 1000)
    hub.files["/small"] = b"x" * 1000
    with http_client() as http:
        assert Downloader(http).get(f"{hub.address}/small") == b"x" * 1000
        with pytest.raises(EndpointFailed, match=r"a.bin replied with more than 1.0 kB"):
            Downloader(http).get(f"{hub.address}/a.bin")


PUBLIC = {"models.example": "93.184.216.34", "rebound.example": "::ffff:10.0.0.1", "other.example": "93.184.216.35"}


@pytest.fixture
def proxied(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The same server as a proxy before all hosts, of which some are public."""
    monkeypatch.setenv("HTTP_PROXY", hub.address)
    resolve = socket.getaddrinfo

    def resolved(host: str, *arguments: Any, **named: Any) -> Any:
        return resolve(PUBLIC.get(host, host), *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return hub


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1", "169.254.169.254", "10.1.2.3", "192.168.0.1", "localhost", "[::1]", "[fd00::1]", "rebound.example"],
)
def test_no_public_host_leads_into_a_private_network(proxied: HubServer, tmp_path: Path, target: str) -> None:
    proxied.redirects["/model.gguf"] = f"http://{target}/a.bin"
    public = HubServer("http://models.example")
    with pytest.raises(EndpointFailed, match=r"models.example redirects to .*, which is in a private network"):
        fetch(public, tmp_path / "a.bin", path="/model.gguf")
    assert [path for path, _ in proxied.requests] == ["/model.gguf"]
    with http_client() as http, pytest.raises(EndpointFailed, match="private network"):
        Downloader(http).get("http://models.example/model.gguf")


@pytest.mark.parametrize(
    ("start", "target"),
    [
        ("127.0.0.1", "localhost"),
        ("127.0.0.1", "models.example"),
        ("models.example", "other.example"),
        ("models.example", "unknown-here.invalid"),
    ],
)
def test_other_redirects_are_followed(proxied: HubServer, tmp_path: Path, start: str, target: str) -> None:
    """A mirror in a private network may lead to its storage."""
    proxied.redirects["/model.gguf"] = f"http://{target}/a.bin"
    fetch(HubServer(f"http://{start}"), tmp_path / "a.bin", path="/model.gguf")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert proxied.hosts == [start, target]


def test_redirects_have_an_end(hub: HubServer, tmp_path: Path) -> None:
    hub.redirects["/model.gguf"] = "/model.gguf"
    with pytest.raises(EndpointFailed, match=r"/model.gguf redirects more than 20 times"):
        fetch(hub, tmp_path / "a.bin", path="/model.gguf")


def test_what_is_not_there_is_asked_for_once(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"/none.bin replied 404 Not Found: check the address"):
        fetch(hub, tmp_path / "a.bin", path="/none.bin")
    assert len(hub.requests) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_does_not_end_a_broken_download(hub: HubServer, tmp_path: Path) -> None:
    hub.break_after = [1000, 0, 0, 0, 0]
    with pytest.raises(EndpointFailed):
        fetch(hub, tmp_path / "a.bin", SHA256)
    content = hub.files.pop("/a.bin")
    with pytest.raises(ModelNotFound):
        fetch(hub, tmp_path / "a.bin", SHA256)
    hub.files["/a.bin"] = content
    assert fetch(hub, tmp_path / "a.bin", SHA256)[0] == 1000


def test_no_connection_says_what_to_do(tmp_path: Path) -> None:
    with hub_server() as gone:
        pass
    with pytest.raises(EndpointFailed, match=r"cannot reach http://127.0.0.1:\d+/ \(.*refused.*HTTPS_PROXY.*pull PATH"):
        fetch(gone, tmp_path / "a.bin")


def test_a_proxy_is_taken_from_the_environment(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", hub.address)
    fetch(HubServer("http://models.invalid"), tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert hub.hosts == ["models.invalid"]


def test_a_full_disk_is_seen_before_the_download(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=60_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(EndpointFailed, match=r"needs 1.0 MB but .* has 60.0 MB free: make room"):
        fetch(hub, tmp_path / "a.bin")


def test_a_folder_that_cannot_be_written(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EndpointFailed, match=r"file/cache cannot be written: Not a directory"):
        fetch(hub, tmp_path / "file" / "cache" / "a.bin")


def test_two_processes_fetch_it_once(hub: HubServer, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fetch, args=(hub, tmp_path / "a.bin", SHA256)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(hub.requests) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_git_checksums() -> None:
    path = Path(__file__).parents[2] / "LICENSE"
    checksum = Checksum("git", "")
    assert checksum.digest_of(path) == hashlib.sha1(b"blob %d\0" % path.stat().st_size + path.read_bytes()).hexdigest()
