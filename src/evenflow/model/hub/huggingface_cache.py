"""Models by their names on a model hub, and where Hugging Face's cache keeps them. Uses no network.

The layout is that of Hugging Face's own tools, so that transformers, vLLM and `hf` find what evenflow has fetched, and
evenflow what they have: blobs by checksum, snapshots by commit with links to blobs, refs from branches to commits.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_HUB_NAME = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w./-]*))?(?::(\w[\w ./+-]*))?")
_REPOSITORY_PREFIX = "models--"
MAIN = "main"


@dataclass(frozen=True, slots=True)
class HubName:
    """`ORG/NAME`, `ORG/NAME:FILE.gguf`, `ORG/NAME@REVISION` or `ORG/NAME@REVISION:FILE.gguf`."""

    repository: str
    revision: str | None = None
    file: str | None = None  # a GGUF file, or the part of its name that tells it from the others

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repository + revision + (f":{self.file}" if self.file else "")


def parse_hub_name(text: str) -> HubName | None:
    """None if no model on a hub can have this name."""
    match = _HUB_NAME.fullmatch(text)
    if match is None or ".." in re.split("[/:@]", text):
        return None
    return HubName(match[1], match[2], match[3])


def huggingface_home() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def hub_cache() -> Path:
    """Hugging Face's cache of models."""
    return Path(os.environ.get("HF_HUB_CACHE") or huggingface_home() / "hub").expanduser()


def match_files(wanted: str | None, names: Iterable[str]) -> list[str]:
    """The GGUF files that `FILE` in a name may mean: the one of that name, else those whose name contains it."""
    files = [name for name in names if name.endswith(".gguf")]
    return [wanted] if wanted in files else [name for name in files if (wanted or "").lower() in name.lower()]


class CachedRepository:
    """One repository's folder in the cache. It need not exist."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = hub_cache() / (_REPOSITORY_PREFIX + name.replace("/", "--"))

    @property
    def blobs(self) -> Path:
        return self.folder / "blobs"

    def find(self, name: HubName) -> tuple[HubName, Path] | None:
        """The folder or GGUF file that this name means, with its name in `models`; None if it is not here."""
        for snapshot in self._snapshots(name.revision):
            if name.file is None and _is_folder_model(snapshot):
                return HubName(self.name), snapshot
            if len(found := match_files(name.file, _gguf_files(snapshot))) == 1:
                return HubName(self.name, file=found[0]), snapshot / found[0]
        return None

    def models(self) -> Iterator[tuple[HubName, Path]]:
        """What of this repository is here, each model once."""
        seen = set()
        for snapshot in self._snapshots(None):
            folder = [HubName(self.name)] if _is_folder_model(snapshot) else []
            for name in (*folder, *(HubName(self.name, file=file) for file in _gguf_files(snapshot))):
                if name not in seen:
                    seen.add(name)
                    yield name, snapshot / (name.file or "")

    def link(self, commit: str, revision: str, blobs: dict[str, Path]) -> None:
        """Make a snapshot of these files by name, when all of them are whole, so that it is never half there."""
        snapshot = self.folder / "snapshots" / commit
        for name, blob in blobs.items():
            path = snapshot / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(os.path.relpath(blob, path.parent))
        if revision != commit:
            ref = self.folder / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)

    def remove(self, name: HubName) -> None:
        """Delete a model of `models()` from every snapshot, with the blobs that nothing else is a link to."""
        root = self.folder / "snapshots"
        files = [path for path in root.rglob("*") if path.is_symlink() or path.is_file()]
        removed = [path for path in files if _is_part(path, name)]
        blobs = {path.resolve() for path in removed}
        for path in removed:
            path.unlink()
        kept = [path for path in files if path not in removed]
        if not kept:
            shutil.rmtree(self.folder)
            return
        for blob in blobs - {path.resolve() for path in kept}:
            if blob.parent == self.blobs.resolve():
                blob.unlink()

    def _snapshots(self, revision: str | None) -> list[Path]:
        """The snapshots of a revision; without one, all, beginning with the main branch's and then the newest."""
        ref = self.folder / "refs" / (revision or MAIN)
        commit = ref.read_text().strip() if ref.is_file() else revision
        found = [path for path in (self.folder / "snapshots").glob("*") if path.is_dir()]
        if revision is not None:
            return [path for path in found if commit is not None and path.name.startswith(commit)]
        return sorted(found, key=lambda path: (path.name == commit, path.stat().st_mtime), reverse=True)


def cached_repositories() -> list[CachedRepository]:
    """Every model repository in the cache."""
    folders = sorted(hub_cache().glob(f"{_REPOSITORY_PREFIX}*"))
    names = [folder.name.removeprefix(_REPOSITORY_PREFIX).replace("--", "/", 1) for folder in folders]
    return [CachedRepository(name) for name in names]


def _is_part(path: Path, name: HubName) -> bool:
    """Whether a file in a snapshot belongs to the model of this name."""
    is_gguf = path.suffix == ".gguf"
    return is_gguf and path.as_posix().endswith(f"/{name.file}") if name.file else not is_gguf


def _is_folder_model(snapshot: Path) -> bool:
    """Whether the model is the folder. Repositories of GGUF files may have a config.json too."""
    has_weights = any(snapshot.glob("*.safetensors")) or not _gguf_files(snapshot)
    return has_weights and (snapshot / "config.json").is_file()


def _gguf_files(snapshot: Path) -> list[str]:
    return sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf") if path.is_file())
