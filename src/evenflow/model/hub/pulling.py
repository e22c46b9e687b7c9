"""Gets the model that `evenflow pull` names onto this machine: from a model hub, a URL, or a path."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urljoin, urlsplit

from evenflow.errors import EndpointFailed, InvalidInput, ModelError, ModelNotFound
from evenflow.host import cache_folder
from evenflow.model.formats.inspection import inspect_model
from evenflow.model.hub.cached_models import CachedModel, find_cached
from evenflow.model.hub.default_model import default_model_path
from evenflow.model.hub.download import Checksum, Downloader, Remote, http_client, locked
from evenflow.model.hub.huggingface_cache import parse_hub_name
from evenflow.model.hub.named_models import (
    GGUF,
    SAFETENSORS,
    models_folder,
    name_path,
    name_taken,
    named_models,
    new_path,
)
from evenflow.model.hub.progress_bar import progress_bar
from evenflow.model.hub.repository import name_in_url, pull_from_hub

_MAX_SMALL_BYTES = 256 << 20  # as when they are read
_REQUIRED_FILES = ("config.json", "tokenizer.json")
_OPTIONAL_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def pull(source: str, *, name: str | None = None, sha256: str | None = None, progress: bool) -> CachedModel:
    """Fetch, check and name a model. Its name is the one that `--model` takes."""
    try:
        pulled = _pull(source, name, sha256, progress)
    except OSError as error:
        raise EndpointFailed(
            f"{error.filename or cache_folder()} cannot be written ({error.strerror}); set EVENFLOW_CACHE and HF_HOME "
            "to folders that can be"
        ) from error
    if pulled == "default":
        return CachedModel(pulled, default_model_path(), "default")
    found = find_cached(pulled)
    assert found is not None, f"{pulled} was just pulled"
    return replace(found, name=pulled)  # with its revision


def _pull(source: str, name: str | None, sha256: str | None, progress: bool) -> str:
    """The name under which it is found."""
    is_url = source.startswith(("http://", "https://"))
    try:
        hub_name = name_in_url(source) if is_url else parse_hub_name(source)
    except ValueError as error:
        raise InvalidInput(f"Got {source!r} but it is not a URL: {error}.") from error
    if is_url and hub_name is None:
        return _pull_url(source, name, sha256, progress)
    if sha256 is not None:
        raise InvalidInput("Got --sha256 but only a URL outside the model hub takes one: the hub has checksums.")
    if source != "default" and not is_url and Path(source).expanduser().exists():
        return name_path(Path(source), name)
    if name is not None:
        raise InvalidInput(f"Got --name {name} but {source} has a name: only URLs, folders and files get another.")
    if source == "default":
        default_model_path(progress=progress)
        return source
    is_path = hub_name is not None and hub_name.file is None and source.endswith((GGUF, SAFETENSORS))
    if hub_name is None or is_path:
        raise ModelNotFound(f"no model at {source}: give a name on a model hub (ORG/NAME), a URL, a folder or a file")
    return str(pull_from_hub(hub_name, progress=progress))


def _pull_url(url: str, name: str | None, sha256: str | None, progress: bool) -> str:
    path = PurePosixPath(unquote(urlsplit(url).path))
    if path.suffix not in (GGUF, SAFETENSORS):
        raise InvalidInput(f"Got {url} but expected the address of a .gguf or .safetensors file.")
    if path.suffix == SAFETENSORS and path.name != "model.safetensors":
        raise InvalidInput(f"Got {url} but expected a whole model.safetensors: shards have no address in common.")
    is_file = path.suffix == GGUF
    name = (name or (path.stem if is_file else path.parent.name)).removesuffix(GGUF)
    target = new_path(name, GGUF if is_file else "")
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = models_folder() / f".{name}.lock"
    with locked(lock):  # another process may be fetching it
        source = models_folder() / ".sources" / name
        digest = hashlib.sha256(url.encode()).hexdigest()  # an address may hold a password
        if (taken := named_models().get(name)) is None:
            checksum = Checksum("sha256", sha256) if sha256 else None
            _fetch_url(Remote(url, checksum=checksum), path.name, target, progress)
            source.parent.mkdir(exist_ok=True)
            source.write_text(digest)
        elif not source.is_file() or source.read_text() != digest:
            raise name_taken(name, taken)
        lock.unlink()
    return name


def _fetch_url(weights: Remote, file_name: str, target: Path, progress: bool) -> None:
    scratch = target.with_name(f".{target.name}.incomplete")
    is_folder = file_name.endswith(SAFETENSORS)
    with http_client() as http, progress_bar(target.name, None, shown=progress) as show:
        downloader = Downloader(http)
        if is_folder:
            for name in _REQUIRED_FILES:
                downloader.fetch(_beside(weights.url, name), scratch / name)
            for name in _OPTIONAL_FILES:
                with suppress(ModelNotFound):
                    downloader.fetch(_beside(weights.url, name), scratch / name)
        fetched = downloader.fetch(weights, scratch / (file_name if is_folder else f"model{GGUF}"), show)
    _place(scratch if is_folder else fetched, target, scratch)


def _beside(url: str, name: str) -> Remote:
    return Remote(urljoin(url, name), max_bytes=_MAX_SMALL_BYTES)


def _place(fetched: Path, target: Path, scratch: Path) -> None:
    """Put what was fetched where it is found by its name, if it is a model."""
    try:
        inspect_model(fetched)
    except ModelError:
        shutil.rmtree(scratch)
        raise
    fetched.replace(target)
    shutil.rmtree(scratch, ignore_errors=True)
