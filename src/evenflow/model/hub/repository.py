"""Fetches a model from a model hub into Hugging Face's cache, with the checksum of every file checked.

Reads HF_ENDPOINT (a mirror), HF_TOKEN and HF_HUB_OFFLINE, as Hugging Face's own tools do.
"""

from __future__ import annotations

import json
import logging
import os
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx

from evenflow.errors import BrokenModel, EndpointFailed, EvenflowError, ModelNotFound, UnsupportedModel
from evenflow.model.config import SUPPORTED_FAMILIES, unsupported
from evenflow.model.formats.hf_config import supported_architecture
from evenflow.model.formats.hf_files import MAX_CONFIG_BYTES, parse_json
from evenflow.model.hub.download import Checksum, Downloader, Remote, Show, check_space, http_client, refusal
from evenflow.model.hub.huggingface_cache import MAIN, CachedRepository, HubName, huggingface_home, match_files
from evenflow.model.hub.progress_bar import progress_bar

logger = logging.getLogger("evenflow")

_DEFAULT_ENDPOINT = "https://huggingface.co"
_MAX_FILE_BYTES = 1 << 50
_FOLDER_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".safetensors")
_SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_FILE_PAGE = re.compile(r"/([^/]+/[^/]+)/(?:resolve|blob)/([^/]+)/(.+)")
_DIGEST = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # of SHA-1 or SHA-256: part of a path in the cache
_MODEL_PAGE = re.compile(r"/([^/]+/[^/]+)/?(?:tree/([^/]+)/?)?")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository, as the hub lists it."""

    name: str
    num_bytes: int
    checksum: Checksum


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "true", "yes")


def hub_token() -> str | None:
    """The user's token: $HF_TOKEN, or what `hf auth login` has stored."""
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    stored = os.environ.get("HF_TOKEN_PATH") or huggingface_home() / "token"
    try:
        with open(stored, encoding="utf-8") as file:
            return file.read().strip() or None
    except OSError:
        return None


def name_in_url(url: str) -> HubName | None:
    """The model that a page or file of the hub is about; None for an address elsewhere."""
    parts = urlsplit(url)
    if f"{parts.scheme}://{parts.netloc}" not in (endpoint(), _DEFAULT_ENDPOINT):
        return None
    if match := _FILE_PAGE.fullmatch(unquote(parts.path)):
        revision = None if match[2] == MAIN else match[2]
        return HubName(match[1], revision, match[3] if match[3].endswith(".gguf") else None)
    match = _MODEL_PAGE.fullmatch(unquote(parts.path))
    if match and not match[1].endswith((".gguf", ".safetensors")):
        return HubName(match[1], None if match[2] == MAIN else match[2])
    return None


def pull_from_hub(name: HubName, *, progress: bool) -> HubName:
    """Fetch a model unless it is cached; the name by which it is found, with its whole file name."""
    repository = CachedRepository(name.repository)
    if is_offline():
        if repository.find(name) is None:
            raise EndpointFailed(
                f"{name} is not in {repository.folder.parent}, and HF_HUB_OFFLINE forbids fetching it: unset it, or "
                "give a folder or file"
            )
        return name
    token = hub_token()
    with http_client({"Authorization": f"Bearer {token}"} if token else None) as http:
        downloader = Downloader(http, lambda response: _refusal(name, response))
        revision = quote(name.revision or MAIN, safe="")
        url = f"{endpoint()}/api/models/{name.repository}/revision/{revision}?blobs=true"
        commit, listed = _read_listing(url, downloader.get(url))
        chosen = choose_files(name, listed)
        _fetch(downloader, repository, commit, name.revision or MAIN, chosen, progress)
    file = chosen[0].name if chosen[0].name.endswith(".gguf") else None
    return HubName(name.repository, name.revision, file)


def choose_files(name: HubName, listed: Sequence[HubFile]) -> list[HubFile]:
    """The files to fetch: the folder of a safetensors model, configuration first, or one GGUF file."""
    by_name = {file.name: file for file in listed}
    if name.file is None and "config.json" in by_name and any(file.endswith(".safetensors") for file in by_name):
        chosen = [file for file in listed if "/" not in file.name and file.name.endswith(_FOLDER_SUFFIXES)]
        if any(file.name.startswith("model") and file.name.endswith(".safetensors") for file in chosen):
            # Mistral's repositories have the same weights a second time, in a layout of their own.
            chosen = [file for file in chosen if not file.name.startswith("consolidated")]
        return sorted(chosen, key=lambda file: (file.name != "config.json", file.num_bytes))
    ggufs, found = match_files(None, by_name), match_files(name.file, by_name)
    if len(found) == 1:
        if _SPLIT_FILE.search(found[0]):
            raise unsupported(f"{name}: {found[0]} is a part of a model, and a model split over several GGUF files")
        return [by_name[found[0]]]
    like = f" like {name.file!r}" if name.file else ""
    if ggufs:
        problem = "has several files" if found else "has no file"
        files = ", ".join(ggufs)
        raise ModelNotFound(f"{name.repository} {problem}{like}: give one, as {name.repository}:FILE; {files}")
    kinds = ", ".join(sorted({f".{file.rpartition('.')[2]}" for file in by_name if "." in file})) or "none"
    if name.file:
        raise ModelNotFound(f"{name.repository} has no GGUF file{like}, only {kinds}: give {name.repository} alone")
    raise UnsupportedModel(
        f"{name.repository} holds neither safetensors nor GGUF files, only {kinds}. "
        f"evenflow's own engine runs {SUPPORTED_FAMILIES} in these formats; vLLM may load others"
    )


def _fetch(
    downloader: Downloader,
    repository: CachedRepository,
    commit: str,
    revision: str,
    files: Sequence[HubFile],
    progress: bool,
) -> None:
    blobs = {file.name: repository.blobs / file.checksum.digest for file in files}
    missing = [file for file in files if not blobs[file.name].is_file()]
    check_space(repository.folder, sum(file.num_bytes for file in missing))
    total, done = sum(file.num_bytes for file in files), 0
    with progress_bar(repository.name, total, shown=progress) as show:
        for file in files:
            url = f"{endpoint()}/{repository.name}/resolve/{commit}/{quote(file.name)}"
            remote = Remote(url, file.num_bytes, file.checksum)
            downloader.fetch(remote, blobs[file.name], partial(_show_all, show, done, total))
            done += file.num_bytes
            if file.name == "config.json":
                _warn_if_unsupported(repository.name, blobs[file.name])
    repository.link(commit, revision, blobs)


def _show_all(show: Show, done: int, total: int, num_bytes: int, _: int | None) -> None:
    """The progress of all files, from that of one after `done` bytes of others."""
    show(done + num_bytes, total)


def _warn_if_unsupported(name: str, config: Path) -> None:
    """Before the weights are fetched. Not an error: vLLM may run what evenflow's own engine does not."""
    with config.open("rb") as file:
        text = file.read(MAX_CONFIG_BYTES)
    try:
        supported_architecture(parse_json("config.json", text))
    except (UnsupportedModel, BrokenModel) as error:
        logger.warning("%s: %s", name, error)


def _read_listing(url: str, listing: bytes) -> tuple[str, list[HubFile]]:
    """The commit, and its files."""
    try:
        content = json.loads(listing)
        return _digest(content["sha"]), [_read_file(entry) for entry in content["siblings"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EndpointFailed(f"{url} did not reply as a model hub does ({error!r}): check HF_ENDPOINT") from error


def _read_file(entry: dict[str, Any]) -> HubFile:
    lfs = entry.get("lfs")
    checksum = Checksum("sha256", _digest(lfs["sha256"])) if lfs else Checksum("git", _digest(entry["blobId"]))
    name, size = str(entry["rfilename"]), (lfs or entry)["size"]
    if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
        raise ValueError(f"the file name {reprlib.repr(name)}")
    if not isinstance(size, int) or not 0 <= size <= _MAX_FILE_BYTES:
        raise ValueError(f"the size {reprlib.repr(size)}")
    return HubFile(name, size, checksum)


def _digest(value: object) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"the checksum {reprlib.repr(value)}")
    return value


def _refusal(name: HubName, response: httpx.Response) -> EvenflowError:
    """What the hub's status means."""
    status, code = response.status_code, response.headers.get("X-Error-Code", "")
    page = f"{endpoint()}/{name.repository}"
    if status in (401, 403):
        what = "is gated: accept its terms at" if code == "GatedRepo" else "does not exist, or is private: see"
        key = "the token that is set has no access to it" if hub_token() else "then set HF_TOKEN to a token of yours"
        return ModelNotFound(f"{name.repository} {what} {page} ({status}); {key}")
    if status == 404:
        what = f"no revision {name.revision or MAIN!r}" if code == "RevisionNotFound" else "no such model"
        return ModelNotFound(f"{name}: {what} at {endpoint()} (404); check its name")
    return refusal(response)
