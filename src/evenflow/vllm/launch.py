"""How to start vLLM's server with evenflow's scheduler. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from evenflow.advisor.vllm_flags import PACKAGES, command_flags
from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidInput
from evenflow.hosts.launch import (
    EVENFLOW_OPTION,
    HostLaunch,
    HostPackage,
    RunFolder,
    flag_name,
    own_settings,
    refuse_flags,
    with_values,
)
from evenflow.hosts.settings import CONFIG_KEY
from evenflow.vllm.graphs import graph_flags

VLLM = HostPackage(
    "vLLM",
    "vllm",
    PACKAGES,
    install="install it with `make install-vllm` or by vLLM's own instructions",
    tested_versions=("0.26", "0.32", "0.33"),
    without_plugin="start vLLM without --scheduler-cls",
)

_SCHEDULER_CLASS = "evenflow.vllm.LatencyTargetScheduler"
_WORKER_CLASS = "evenflow.vllm.WarmWorker"

_PRIVATE = "vLLM serves only evenflow, over a private socket"
_REFUSED_FLAGS = {
    **dict.fromkeys(("--host", "--port", "--api-key", "--model", "--served-model-name"), EVENFLOW_OPTION),
    **dict.fromkeys(("--uds", "--headless", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"), _PRIVATE),
    "--scheduler-cls": "the target needs evenflow's own scheduler",
    "--no-enable-chunked-prefill": EVENFLOW_OPTION + ", as --policy unchunked",
}


_AGAINST_A_TARGET = {"--stream-interval": "no gap keeps a target if tokens are delivered several at a time"}


class VllmLaunch(HostLaunch):
    """One vLLM server to start."""

    package = VLLM
    server_module = "vllm.entrypoints.openai.api_server"  # the `vllm` command is missing or broken in some packages
    id_fields = ("request_id",)
    settings_paths = (("vllm_xargs",),)
    salt_fields = ("cache_salt",)
    aliases: ClassVar[Mapping[str, str]] = {
        "-tp": "--tensor-parallel-size",
        "-pp": "--pipeline-parallel-size",
        "-dp": "--data-parallel-size",
    }

    @classmethod
    def check_flags(cls, flags: Sequence[str]) -> None:
        refuse_flags(flags, _REFUSED_FLAGS)
        for name, value in with_values(flags):
            is_whole = name == "--additional-config" and f'"{CONFIG_KEY}"' in value
            if is_whole or f"{name}.".startswith(f"--additional-config.{CONFIG_KEY}."):
                raise InvalidInput(f"Got {CONFIG_KEY!r} in --additional-config but evenflow sets it: use --tbt-target.")

    @classmethod
    def target_flags(cls, python: str, flags: Sequence[str]) -> list[str]:
        refuse_flags(flags, _AGAINST_A_TARGET)
        version = VLLM.version_in(python)
        return [] if "cpu" in version else [*graph_flags(flags), *worker_flags(flags)]

    @classmethod
    def flags_of(cls, policy: PolicySpec | None, settings: Mapping[str, Any]) -> list[str]:
        return command_flags({**settings, **own_settings(policy)})  # it has them under the same names

    def own_flags(self, folder: RunFolder) -> list[str]:
        return ["--model", self.model, "--uds", str(folder.http_socket), "--scheduler-cls", _SCHEDULER_CLASS]


def worker_flags(flags: Sequence[str]) -> list[str]:
    """Flags for vLLM that warm up its output layer, unless `flags` name another worker."""
    is_named = any(flag_name(flag) == "--worker-cls" for flag in flags)
    return [] if is_named else ["--worker-cls", _WORKER_CLASS]
