"""How to start SGLang's server with evenflow's plug-in. Imports no SGLang."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenflow import __version__
from evenflow.advisor.sglang_flags import PACKAGES, command_flags
from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidInput
from evenflow.hosts.launch import EVENFLOW_OPTION, HostLaunch, HostPackage, RunFolder, refuse_flags

SGLANG = HostPackage("SGLang", "sglang", PACKAGES, "install it by SGLang's own instructions")

_SERVER_MODULE = "sglang.launch_server"
_ENTRY_POINT = "[sglang.srt.plugins]\nevenflow = evenflow.sglang.plugin:load\n"
_PLUGINS_VARIABLE = "SGLANG_PLUGINS"  # if set, SGLang loads only these plug-ins
# Otherwise /health generates a token and takes at least a second, longer than the front waits.
_QUICK_HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}

_PRIVATE = "SGLang serves only evenflow, on a port of its own"
_REFUSED_FLAGS = {
    **dict.fromkeys(("--host", "--port", "--api-key", "--served-model-name"), EVENFLOW_OPTION),
    **dict.fromkeys(("--model", "--model-path"), EVENFLOW_OPTION + ", as --model"),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--grpc-mode"), _PRIVATE),
}


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, kw_only=True)
class SglangLaunch(HostLaunch):
    """One SGLang server to start."""

    package = SGLANG

    port: int | None = field(default_factory=free_port)  # SGLang cannot listen on a Unix socket

    def __post_init__(self) -> None:
        if len(self.model_names) > 1:
            names = ", ".join(self.model_names)
            raise InvalidInput(f"Got --served-model-name {names} but SGLang takes one name.")

    @classmethod
    def check_flags(cls, flags: Sequence[str]) -> None:
        refuse_flags(flags, _REFUSED_FLAGS)

    @classmethod
    def flags_of(cls, settings: Mapping[str, Any]) -> list[str]:
        flags, unknown = command_flags(settings)
        if unknown:
            raise InvalidInput(f"Got --{unknown[0].replace('_', '-')} but SGLang has no such setting.")
        return flags

    def command(self, folder: RunFolder) -> list[str]:
        own = ["--model-path", self.model, "--host", "127.0.0.1", "--port", str(self.port), "--enable-metrics"]
        names = ["--served-model-name", *self.model_names] if self.model_names else []
        return [self.python, "-m", _SERVER_MODULE, *self.flags, *own, *names]

    def environment(self, folder: RunFolder, policy: PolicySpec) -> dict[str, str]:
        """SGLang finds the plug-in by its metadata, even where evenflow is not installed beside it."""
        metadata = folder.packages / f"evenflow-{__version__}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: evenflow\nVersion: {__version__}\n")
        (metadata / "entry_points.txt").write_text(_ENTRY_POINT)
        allowed = os.environ.get(_PLUGINS_VARIABLE)
        plugins = {_PLUGINS_VARIABLE: f"{allowed},evenflow"} if allowed else {}
        return super().environment(folder, policy) | _QUICK_HEALTH | plugins
