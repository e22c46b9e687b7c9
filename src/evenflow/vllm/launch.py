"""How to start vLLM's server with evenflow's scheduler: its interpreter, command line and environment.

Imports no vLLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import evenflow
from evenflow.advisor.vllm_flags import installed_version
from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidInput, MissingDependency
from evenflow.hosts.settings import CONFIG_KEY, SOCKET_VARIABLE, TARGET_FILE_VARIABLE, TARGET_VARIABLE
from evenflow.vllm.checking import version_in

PYTHON_VARIABLE = "EVENFLOW_VLLM_PYTHON"

_SERVER_MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` command is missing or broken in some packages
_SCHEDULER_CLASS = "evenflow.vllm.LatencyTargetScheduler"

_EVENFLOW_OPTION = "it is an option of evenflow: give it before the --"
_PRIVATE = "vLLM serves only evenflow, over a private socket"
_REFUSED_FLAGS = {
    **dict.fromkeys(("--host", "--port", "--api-key", "--model", "--served-model-name"), _EVENFLOW_OPTION),
    **dict.fromkeys(("--uds", "--headless", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"), _PRIVATE),
    "--scheduler-cls": "the target needs evenflow's own scheduler",
}


def find_python(named: str | None) -> str:
    """The interpreter that has vLLM: the one named, the environment variable's, or this one."""
    python = named or os.environ.get(PYTHON_VARIABLE)
    if python is not None:
        version_in(python)  # raises if it has no vLLM
        return python
    if installed_version() is not None:
        return sys.executable
    raise MissingDependency(
        "--engine vllm needs vLLM, which is not installed here: install it with `make install-vllm` or by vLLM's own "
        f"instructions; if it is in another environment, name its Python with --vllm-python or ${PYTHON_VARIABLE}"
    )


def check_flags(flags: Sequence[str]) -> None:
    """Refuse flags that evenflow sets itself; vLLM checks the others."""
    for flag, value in zip_longest(flags, flags[1:], fillvalue=""):
        name, _, inline = flag.partition("=")
        name = name.replace("_", "-")
        if name in _REFUSED_FLAGS:
            raise InvalidInput(f"Got {flag!r} after the -- but {_REFUSED_FLAGS[name]}.")
        if name == "--additional-config" and f'"{CONFIG_KEY}"' in (inline or value):
            raise InvalidInput(f"Got {CONFIG_KEY!r} in --additional-config but evenflow sets it: use --tbt-target.")


class RunFolder:
    """The private folder that vLLM and evenflow's front share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.http_socket = path / "http"
        self.step_socket = path / "steps"
        self.policy_path = path / "target"
        self.packages = path / "packages"  # only this evenflow: on vLLM's path it hides none of vLLM's packages
        self.packages.mkdir()
        (self.packages / "evenflow").symlink_to(Path(evenflow.__file__).parent, target_is_directory=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLaunch:
    """One vLLM server to start."""

    python: str
    model: str
    policy: PolicySpec  # with a target
    model_names: Sequence[str] = ()  # that requests use; by default the model's own name
    flags: Sequence[str] = ()  # for vLLM, unchanged
    warm_up: bool = True  # before it serves

    def command(self, folder: RunFolder) -> list[str]:
        own = ["--model", self.model, "--uds", str(folder.http_socket), "--scheduler-cls", _SCHEDULER_CLASS]
        names = ["--served-model-name", *self.model_names] if self.model_names else []
        return [self.python, "-m", _SERVER_MODULE, *self.flags, *own, *names]

    def environment(self, folder: RunFolder, policy: PolicySpec) -> dict[str, str]:
        """The environment of vLLM's processes; `policy` is the one to start with."""
        return os.environ | {
            TARGET_VARIABLE: str(policy).removeprefix("target:"),
            SOCKET_VARIABLE: str(folder.step_socket),
            TARGET_FILE_VARIABLE: str(folder.policy_path),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder.packages), os.environ.get("PYTHONPATH")))),
        }
