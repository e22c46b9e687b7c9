"""`evenflow serve --engine vllm`: which options it takes, and what they are in vLLM's words."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evenflow.advisor.vllm_flags import command_flags
from evenflow.cli.options import ModelOptions, SchedulingOptions, knobs
from evenflow.config import EngineConfig
from evenflow.core.policies import has_target
from evenflow.errors import InvalidInput
from evenflow.vllm.launch import VllmLaunch, check_flags, find_python

if TYPE_CHECKING:
    from evenflow.server.serving import Server, ServerSettings

logger = logging.getLogger("evenflow")

# Settings that both engines have, under one name.
_SHARED_SETTINGS = (
    *("max_model_len", "gpu_memory_utilization", "max_num_batched_tokens", "enable_prefix_caching", "max_num_seqs"),
    "long_prefill_token_threshold",
)


def refuse_own(
    model: ModelOptions, scheduling: SchedulingOptions, settings: ServerSettings, record: Path | None
) -> None:
    """Refuse the options that only evenflow's own engine has."""
    from evenflow.server.access import ServerLimits

    limits, usual = settings.limits, ServerLimits()
    given = {
        "--weights": model.weights is not None,
        "--threads": model.threads is not None,
        "--kv-cache-memory": model.kv_cache_memory is not None,
        "--enable-chunked-prefill": scheduling.enable_chunked_prefill is not None,
        "--max-prompt-tokens": limits.max_prompt_tokens != usual.max_prompt_tokens,
        "--max-n": limits.max_n != usual.max_n,
        "--otlp-endpoint": settings.otlp_endpoint is not None,
        "--record": record is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise InvalidInput(f"Got {option} with --engine vllm, but only evenflow's own engine has that option.")


def launch_of(
    model: ModelOptions,
    scheduling: SchedulingOptions,
    model_names: Sequence[str],
    vllm_python: str | None,
    flags: Sequence[str],
) -> VllmLaunch:
    """The vLLM that these options ask for."""
    if model.model == EngineConfig().model:
        raise InvalidInput(
            "--engine vllm needs --model: a name or a folder that vLLM can load; the default model is none."
        )
    policy = EngineConfig(policy=scheduling.policy, tbt_target=scheduling.tbt_target).policy
    if policy is None or not has_target(policy):
        raise InvalidInput("--engine vllm needs --tbt-target, such as 50ms: the time between tokens to keep.")
    check_flags(flags)
    shared = {name: value for name, value in knobs(model, scheduling).items() if name in _SHARED_SETTINGS}
    return VllmLaunch(
        python=find_python(vllm_python),
        model=model.model,
        policy=policy,
        model_names=model_names,
        flags=[*command_flags(shared), *flags],
    )


async def serving(settings: ServerSettings, listener: socket.socket, launch: VllmLaunch, max_num_seqs: int) -> None:
    """Serve until a signal comes."""
    from evenflow.server.serving import serve_vllm

    host, port = listener.getsockname()[:2]
    began = time.monotonic()

    def on_start(server: Server) -> None:
        logger.info(
            "Starting vLLM (%s), which takes a minute or two; http://%s:%d/ready says when.", launch.policy, host, port
        )

    def on_ready() -> None:
        names, seconds = ", ".join(settings.model_names), time.monotonic() - began
        logger.info("Serving %s by vLLM after %.0f s at http://%s:%d/v1, until Ctrl-C.", names, seconds, host, port)

    await serve_vllm(settings, listener, launch, max_num_seqs, on_start, on_ready)
