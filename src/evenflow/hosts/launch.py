"""How to start a host engine's server steered by evenflow: its interpreter, command line and environment.

What differs between host engines is in a subclass of `HostLaunch`. Imports no host engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from evenflow.advisor.vllm_flags import installed_version
from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidInput, MissingDependency
from evenflow.hosts.policy_file import NO_TARGET
from evenflow.hosts.settings import SOCKET_VARIABLE, TARGET_FILE_VARIABLE, TARGET_VARIABLE
from evenflow.hosts.uses import Uses

_FIND_VERSION = """
import importlib.metadata, sys
for package in sys.argv[1:]:
    try:
        print(importlib.metadata.version(package) + "+cpu" * package.endswith("-cpu"))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""
_EVENFLOW_FOLDER = Path(__file__).parents[1]

EVENFLOW_OPTION = "it is an option of evenflow: give it before the --"


@dataclass(frozen=True, slots=True)
class HostPackage:
    """A host engine as a package, in this environment or in another interpreter's."""

    name: str  # as its users write it
    engine: str  # of --engine
    packages: tuple[str, ...]  # any of them provides it
    install: str  # how to get it
    tested_versions: tuple[str, ...]  # of the plug-in
    without_plugin: str  # how to do without it

    @property
    def python_option(self) -> str:
        return f"--{self.engine}-python"

    @property
    def python_variable(self) -> str:
        return f"EVENFLOW_{self.engine.upper()}_PYTHON"

    def version_in(self, python: str) -> str:
        """The version in an interpreter's environment."""
        command, got = [python, "-c", _FIND_VERSION, *self.packages], f"Got {self.python_option} {python!r}"
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise InvalidInput(f"{got} but it cannot be run: {error.strerror}.") from error
        if not done.stdout.strip():
            missing = f"there is no {self.name} in its environment: pip install {self.packages[0]}"
            raise InvalidInput(f"{got} but {missing}")
        return done.stdout.strip()

    def unsupported(self, missing: str) -> MissingDependency:
        """The refusal of an installed version that lacks what evenflow relies on: its interfaces are not stable."""
        return MissingDependency(
            f"{self.name} {installed_version(self.packages)} lacks what evenflow's plug-in relies on: {missing}. It is "
            f"tested on {', '.join(self.tested_versions)}: use one of these, or {self.without_plugin}."
        )

    def check_methods(self, uses: Uses, owner: object) -> None:
        """Refuse a version in which this class or module lacks a method, or one of a method's parameters."""
        self._refuse(uses.missing_methods(owner))

    def check_attributes(self, uses: Uses, holder: object) -> None:
        """Refuse a version in which this object lacks an attribute."""
        self._refuse(uses.missing_attributes(holder))

    def _refuse(self, missing: Iterable[str]) -> None:
        for name in missing:
            raise self.unsupported(name)

    def find_python(self, named: str | None) -> str:
        """The interpreter that has it: the one named, the environment variable's, or this one."""
        python = named or os.environ.get(self.python_variable)
        if python is not None:
            self.version_in(python)  # raises if it is not there
            return python
        if installed_version(self.packages) is not None:
            return sys.executable
        raise MissingDependency(
            f"--engine {self.engine} needs {self.name}, which is not installed here: {self.install}; if it is in "
            f"another environment, name its Python with {self.python_option} or ${self.python_variable}"
        )


class RunFolder:
    """The private folder that a host engine and evenflow's front share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.http_socket = path / "http"
        self.step_socket = path / "steps"
        self.policy_path = path / "target"
        self.packages = path / "packages"  # only this evenflow: on the host's path it hides none of its packages
        self.packages.mkdir()
        (self.packages / "evenflow").symlink_to(_EVENFLOW_FOLDER, target_is_directory=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLaunch(ABC):
    """One server of a host engine to start."""

    package: ClassVar[HostPackage]
    server_module: ClassVar[str]
    aliases: ClassVar[Mapping[str, str]]  # other spellings of the host's flags
    settle_path: ClassVar[str | None] = None  # a route to call once it has warmed up
    id_fields: ClassVar[Sequence[str]]  # of a request's body: by any of them a client names the request
    settings_paths: ClassVar[Sequence[Sequence[str]]]  # where a request's body has its own settings for evenflow
    salt_fields: ClassVar[Sequence[str]]  # requests that differ in any of them share no prefix cache

    python: str
    model: str
    policy: PolicySpec | None  # `target`, `fixed` or `unchunked`; None: the host's own settings
    why_no_target: str | None = None  # why it can keep none, however it is asked
    model_names: Sequence[str] = ()  # that requests use; by default the model's own name
    flags: Sequence[str] = ()  # for the host, unchanged
    warm_up: bool = True  # before it serves
    port: int | None = None  # of 127.0.0.1; None: it listens on the folder's socket

    @classmethod
    @abstractmethod
    def check_flags(cls, flags: Sequence[str]) -> None:
        """Refuse flags that evenflow sets itself; the host checks the others."""

    @classmethod
    def target_flags(cls, python: str, flags: Sequence[str]) -> list[str]:
        """Flags that evenflow adds to the user's to keep a target, for the host in this interpreter."""
        return []

    @classmethod
    @abstractmethod
    def flags_of(cls, policy: PolicySpec | None, settings: Mapping[str, Any]) -> list[str]:
        """The policy, and settings under evenflow's names, as the host's flags."""

    @classmethod
    def find_obstacle(cls, policy: PolicySpec | None, settings: Mapping[str, Any]) -> str | None:
        """Why no target can be kept under these settings."""
        return None if policy is None or policy.cuts_prompts else "chunked prefill is off"

    @property
    def summary(self) -> str:
        """What the host is started with, in a few words."""
        if self.policy is None:
            return "its own settings, no latency target"
        return str(self.policy) + ("" if self.policy.target else ", no latency target")

    def command(self, folder: RunFolder) -> list[str]:
        names = ["--served-model-name", *self.model_names] if self.model_names else []
        return [self.python, "-m", self.server_module, *self.flags, *self.own_flags(folder), *names]

    @abstractmethod
    def own_flags(self, folder: RunFolder) -> list[str]:
        """The model, the address, and what the plug-in needs."""

    @property
    def base_url(self) -> str:
        return f"http://{self.package.engine}" if self.port is None else f"http://127.0.0.1:{self.port}"

    def environment(self, folder: RunFolder, policy: PolicySpec | None) -> dict[str, str]:
        """The environment of the host's processes; `policy` is the one to start with."""
        has_target = policy is not None and policy.target is not None
        return os.environ | {
            TARGET_VARIABLE: str(policy).removeprefix("target:") if has_target else NO_TARGET,
            SOCKET_VARIABLE: str(folder.step_socket),
            TARGET_FILE_VARIABLE: str(folder.policy_path),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder.packages), os.environ.get("PYTHONPATH")))),
        }


def own_settings(policy: PolicySpec | None) -> dict[str, Any]:
    """The host settings that a policy without a target needs, under evenflow's names."""
    if policy is None or policy.target is not None:
        return {}
    if not policy.cuts_prompts:
        return {"enable_chunked_prefill": False}
    return {"enable_chunked_prefill": True, "max_num_batched_tokens": policy.budget}


def flag_name(flag: str) -> str:
    """The name of a flag without its value, spelled with hyphens."""
    return flag.partition("=")[0].replace("_", "-")


def with_values(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The name of each flag, and its value: its own or what follows."""
    for flag, following in zip_longest(flags, flags[1:], fillvalue=""):
        yield flag_name(flag), flag.partition("=")[2] or following


def refuse_flags(flags: Sequence[str], refused: Mapping[str, str]) -> None:
    """Refuse flags that are in this table of reasons, and abbreviations of them, which the hosts accept."""
    for flag in flags:
        name = flag_name(flag)
        reason = next((why for full, why in refused.items() if full.startswith(name)), None)
        if reason is not None and len(name) > len("--"):
            raise InvalidInput(f"Got {flag!r} after the -- but {reason}.")


def refuse_repeated(flags: Sequence[str], own_flags: Sequence[str], aliases: Mapping[str, str]) -> None:
    """Refuse flags that evenflow's own options set too. `aliases` are other spellings of the host's flags."""

    def setting(flag: str) -> str:
        name = flag_name(flag)
        return aliases.get(name, name).replace("--no-", "--")

    own = {setting(flag): flag for flag in own_flags if flag.startswith("--")}
    for flag in flags:
        if (given := own.get(setting(flag))) is not None:
            raise InvalidInput(
                f"Got {flag!r} after the -- but evenflow's own options before it set {given}: give it once."
            )
