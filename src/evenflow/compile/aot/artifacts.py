"""Keeps compiled packages on disk, each beside a manifest that says what it is and how its bytes must hash.

What is stale, cut short or altered is told from what is whole. Must not know: models, torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


class DamagedArtifact(Exception):
    """What lies under a key is not what was put there; the message says how it differs."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A package, and what was noted when it was made."""

    package: Path
    notes: dict[str, Any]


class ArtifactStore:
    """A folder of packages by key. A reader sees a whole package or none: the manifest is written last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> Artifact | None:
        """The package under a key, checked, or None where there is none."""
        package, manifest = self._paths(key)
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
            digest, notes = content["sha256"], content["notes"]
            if (found := _sha256(package)) != digest:
                raise DamagedArtifact(f"{package.name} hashes to {found[:12]}, not to {str(digest)[:12]}")
        except (FileNotFoundError, NotADirectoryError) as error:
            if manifest.exists():
                raise DamagedArtifact(f"{package.name} is gone") from error
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedArtifact(f"{manifest.name} cannot be read: {error}") from error
        return Artifact(package, notes)

    def put(self, key: str, package: Path, notes: dict[str, Any]) -> Artifact:
        """Move a package in. OSError where the folder cannot be written; the package is then where it was."""
        target, manifest = self._paths(key)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # packages are code: nobody else puts them here
        scratch = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=self.folder))
        try:
            shutil.copyfile(package, scratch / target.name)
            content = {"sha256": _sha256(package), "notes": notes}
            (scratch / manifest.name).write_text(json.dumps(content), encoding="utf-8")
            manifest.unlink(missing_ok=True)
            os.replace(scratch / target.name, target)
            os.replace(scratch / manifest.name, manifest)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return Artifact(target, notes)

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.pt2", self.folder / f"{key}.json"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK_BYTES):
            digest.update(block)
    return digest.hexdigest()
