"""Compiled packages on disk. A package's key covers everything it depends on, and a manifest holds its hash."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from evenflow.host import check_private, private_folder

_FORMAT = 2  # of packages, manifests, and the options that packages are made with
_SAMPLED_VALUES = 1024
_CPU_INFO = Path("/proc/cpuinfo")


class DamagedArtifact(Exception):
    """A package or manifest is not what was stored; the message says how it differs."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A package, and what was noted when it was made."""

    package: Path
    notes: dict[str, Any]


class ArtifactStore:
    """A folder of packages by key. The manifest is written last: a reader sees a whole package or none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> Artifact | None:
        """The package stored under a key, after checking its hash; None if there is none. OSError if other users may
        write to the folder."""
        package, manifest = self._paths(key)
        if self.folder.is_dir():
            check_private(self.folder)
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
            digest, notes = content["sha256"], content["notes"]
            if not isinstance(notes, dict):
                raise TypeError(f"its notes are a {type(notes).__name__}")
            if (found := _sha256(package)) != digest:
                raise DamagedArtifact(f"{package.name} hashes to {found[:12]}, not to {str(digest)[:12]}")
        except (FileNotFoundError, NotADirectoryError) as error:
            if manifest.exists():
                raise DamagedArtifact(f"{package.name} is gone") from error
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedArtifact(f"{manifest.name} cannot be read: {error}") from error
        return Artifact(package, notes)

    def put(self, key: str, package: Path, notes: dict[str, Any]) -> Artifact:
        """Copy a package in. OSError if the folder cannot be written."""
        target, manifest = self._paths(key)
        private_folder(self.folder)  # packages are code
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def artifact_key(module: Any, model_id: str, options: dict[str, Any]) -> str:
    """The model's name and a hash of its weights, configuration, versions, device and options."""
    facts = {
        "format": _FORMAT,
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "config": module.config.to_dict(),
        "attention": module.config._attn_implementation,
        "weights": _weights_fingerprint(module),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": _describe_device(next(module.parameters()).device),
        "options": options,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model_id)[:60].strip('.-') or 'model'}-{digest[:32]}"


def _weights_fingerprint(module: Any) -> str:
    """Hash of names, shapes, types and evenly spaced values of all weights.

    A sample will do, since a package runs with the weights in memory; hashing all of them takes seconds.
    """
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].cpu().contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _describe_device(device: torch.device) -> str:
    """What machine code is compiled for."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda {major}.{minor} {torch.version.cuda}"
    capability = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else ""
    return f"{device.type} {platform.machine()} {capability} {_cpu_features()} threads={torch.get_num_threads()}"


def _cpu_features() -> str:
    """All instruction sets: Inductor compiles for this very CPU, but torch names only the widest vectors."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", _CPU_INFO.read_text(), re.MULTILINE)
    except OSError:  # not Linux
        return ""
    return found[1] if found else ""
