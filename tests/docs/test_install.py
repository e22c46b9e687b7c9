"""What README says about installing holds by the project's own files."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement

from tests.docs.pages import ROOT


def test_wheels_of_torch_without_cuda_are_accepted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = Requirement((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[-1])
    [version] = [specifier.version for specifier in pinned.specifier]
    lines = [*project["optional-dependencies"]["engine"], *project["optional-dependencies"]["compile"]]
    allowed = [line for line in map(Requirement, lines) if line.name == "torch"]
    assert len(allowed) == 2
    assert all(requirement.specifier.contains(f"{version}+cpu") for requirement in [pinned, *allowed])
