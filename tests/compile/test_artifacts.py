"""Packages come back from disk unchanged, or are found to be damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from evenflow.compile.aot import artifacts
from evenflow.compile.aot.artifacts import ArtifactStore, DamagedArtifact, artifact_key
from tests.compile.architectures import small_model


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "kept")


def put(store: ArtifactStore, content: bytes = b"a package" * 1000) -> Path:
    package = store.folder.parent / "made.pt2"
    package.write_bytes(content)
    return store.put("key", package, {"figure": 1}).package


def test_a_package_comes_back(store: ArtifactStore) -> None:
    assert store.find("key") is None
    put(store)
    found = store.find("key")
    assert found is not None
    assert found.package.read_bytes() == b"a package" * 1000
    assert found.notes == {"figure": 1}
    assert sorted(path.name for path in store.folder.iterdir()) == ["key.json", "key.pt2"]


def test_the_newest_counts(store: ArtifactStore) -> None:
    put(store)
    put(store, b"another")
    found = store.find("key")
    assert found is not None
    assert found.package.read_bytes() == b"another"


def test_a_folder_that_others_may_write_to_is_refused(store: ArtifactStore) -> None:
    put(store)
    store.folder.chmod(0o777)
    with pytest.raises(PermissionError, match="all users may write to it"):
        store.find("key")
    with pytest.raises(PermissionError, match="all users may write to it"):
        put(store)


@pytest.mark.parametrize("harm", ["flip a bit", "cut short", "remove", "spoil the manifest", "empty manifest"])
def test_damage_is_seen(store: ArtifactStore, harm: str) -> None:
    package = put(store)
    manifest = package.with_suffix(".json")
    content = bytearray(package.read_bytes())
    if harm == "flip a bit":
        content[1234] ^= 1
        package.write_bytes(content)
    elif harm == "cut short":
        package.write_bytes(content[:-1])
    elif harm == "remove":
        package.unlink()
    else:
        manifest.write_text("{" if harm == "spoil the manifest" else json.dumps({}))
    with pytest.raises(DamagedArtifact):
        store.find("key")


def test_a_folder_that_cannot_be_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "in the way").write_text("")
    store = ArtifactStore(tmp_path / "in the way" / "kept")
    assert store.find("key") is None
    with pytest.raises(OSError, match="in the way"):
        put(ArtifactStore(tmp_path / "in the way"))


def test_the_key_changes_with_all_that_a_package_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    key = artifact_key(model, "a/model name", {})
    assert key.startswith("a-model-name-")
    assert key == artifact_key(model, "a/model name", {})
    others = {
        "options": artifact_key(model, "a/model name", {"max_autotune": True}),
        "attention": artifact_key(small_model("llama", "eager"), "a/model name", {}),
        "config": artifact_key(small_model("llama", rms_norm_eps=1e-3), "a/model name", {}),
        "class": artifact_key(small_model("qwen2"), "a/model name", {}),
    }
    with torch.no_grad():
        weight = model.lm_head.weight
        kept = weight[-1, -1].clone()
        weight.mul_(2)
        others["weights"] = artifact_key(model, "a/model name", {})
        weight.div_(2)
        assert torch.equal(weight[-1, -1], kept)
    for number, flags in enumerate(("flags\t\t: avx512f", "flags\t\t: avx512f amx_bf16", "Features\t: asimd")):
        cpu_info = tmp_path / f"cpuinfo {number}"
        cpu_info.write_text(f"processor\t: 0\n{flags}\n")
        monkeypatch.setattr(artifacts, "_CPU_INFO", cpu_info)
        others[flags] = artifact_key(model, "a/model name", {})
    monkeypatch.setattr(torch, "__version__", "2.99")
    others["torch"] = artifact_key(model, "a/model name", {})
    assert len({key, *others.values()}) == 1 + len(others)
