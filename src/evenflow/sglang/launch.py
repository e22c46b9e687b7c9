"""How to start SGLang's server with evenflow's plug-in. Imports no SGLang."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from evenflow import __version__
from evenflow.advisor.sglang_flags import NEWEST_VERSION, OLDEST_VERSION, PACKAGES, command_flags
from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidInput
from evenflow.hosts.launch import (
    EVENFLOW_OPTION,
    HostLaunch,
    HostPackage,
    RunFolder,
    own_settings,
    refuse_flags,
    with_values,
)
from evenflow.hosts.settings import TARGET_VARIABLE

SGLANG = HostPackage(
    "SGLang",
    "sglang",
    PACKAGES,
    install="install it by SGLang's own instructions",
    tested_versions=(f"{OLDEST_VERSION} to {NEWEST_VERSION}",),
    without_plugin=f"unset {TARGET_VARIABLE} to serve without a target",
)

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
    server_module = "sglang.launch_server"
    id_fields = ("rid", "request_id")
    settings_paths = (("custom_params",), ("sampling_params", "custom_params"))
    salt_fields = ("cache_salt", "extra_key")
    aliases: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("--tensor-parallel-size", "--tp"), "--tp-size"),
        **dict.fromkeys(("--pipeline-parallel-size", "--pp"), "--pp-size"),
        **dict.fromkeys(("--data-parallel-size", "--dp"), "--dp-size"),
    }

    # Python's collector then leaves alone what is loaded: looking through it takes 0.3 s, in which no stream goes on.
    settle_path = "/freeze_gc"

    port: int | None = field(default_factory=free_port)  # SGLang cannot listen on a Unix socket

    def __post_init__(self) -> None:
        if len(self.model_names) > 1:
            names = ", ".join(self.model_names)
            raise InvalidInput(f"Got --served-model-name {names} but SGLang takes one name.")

    @classmethod
    def check_flags(cls, flags: Sequence[str]) -> None:
        refuse_flags(flags, _REFUSED_FLAGS)
        if ("--chunked-prefill-size", "-1") in with_values(flags):
            raise InvalidInput(
                f"Got '--chunked-prefill-size' -1 after the -- but {EVENFLOW_OPTION}, as --policy unchunked."
            )

    @classmethod
    def flags_of(cls, policy: PolicySpec | None, settings: Mapping[str, Any]) -> list[str]:
        flags, unknown = command_flags({**settings, **own_settings(policy)})
        if unknown:
            raise InvalidInput(f"Got --{unknown[0].replace('_', '-')} but SGLang has no such setting.")
        # By itself SGLang leaves the decodes out of a step with prefill; under `fixed` they come first.
        is_mixed = policy is not None and policy.names_budget
        return [*flags, "--enable-mixed-chunk"] if is_mixed else flags

    @classmethod
    def find_obstacle(cls, policy: PolicySpec | None, settings: Mapping[str, Any]) -> str | None:
        if settings.get("pipeline_parallel_size", 1) > 1:
            return "evenflow does not steer SGLang's pipeline stages; use --tensor-parallel-size, or --engine vllm"
        return super().find_obstacle(policy, settings)

    def own_flags(self, folder: RunFolder) -> list[str]:
        return ["--model-path", self.model, "--host", "127.0.0.1", "--port", str(self.port), "--enable-metrics"]

    def environment(self, folder: RunFolder, policy: PolicySpec | None) -> dict[str, str]:
        """SGLang finds the plug-in by its metadata, even where evenflow is not installed beside it."""
        metadata = folder.packages / f"evenflow-{__version__}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: evenflow\nVersion: {__version__}\n")
        (metadata / "entry_points.txt").write_text(_ENTRY_POINT)
        allowed = os.environ.get(_PLUGINS_VARIABLE)
        plugins = {_PLUGINS_VARIABLE: f"{allowed},evenflow"} if allowed else {}
        return super().environment(folder, policy) | _QUICK_HEALTH | plugins
