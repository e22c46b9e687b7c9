"""`evenflow serve --engine vllm`: which options it takes, and how they become vLLM's flags."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from evenflow.advisor.vllm_flags import command_flags
from evenflow.cli.options import ModelOptions, SchedulingOptions, engine_settings
from evenflow.config import EngineConfig
from evenflow.errors import InvalidInput
from evenflow.vllm.checking import version_in
from evenflow.vllm.graphs import graph_flags
from evenflow.vllm.launch import VllmLaunch, check_flags, find_python

if TYPE_CHECKING:
    from evenflow.cli.serve import ServeOptions
    from evenflow.server.serving import Server, ServerSettings

logger = logging.getLogger("evenflow")

# Settings that both engines have, under the same name.
_SHARED_SETTINGS = (
    *("max_model_len", "gpu_memory_utilization", "max_num_batched_tokens", "enable_prefix_caching", "max_num_seqs"),
    "long_prefill_token_threshold",
)
_OWN_OPTIONS = (
    *("weights", "threads", "kv_cache_memory", "enable_chunked_prefill"),
    *("max_prompt_tokens", "max_n", "otlp_endpoint", "record"),
)


def make_launch(
    options: ServeOptions, model: ModelOptions, scheduling: SchedulingOptions, flags: Sequence[str]
) -> VllmLaunch:
    """The vLLM server that these options describe. Refuses those that only evenflow's own engine has."""
    for group in (model, scheduling, options):
        for field in fields(group):
            if field.name in _OWN_OPTIONS and getattr(group, field.name) != field.default:
                name = f"--{field.name.replace('_', '-')}"
                raise InvalidInput(f"Got {name} with --engine vllm, but only evenflow's own engine has that option.")
    if model.model == EngineConfig().model:
        raise InvalidInput("--engine vllm needs --model, a name or folder that vLLM can load; it has no default model.")
    policy = EngineConfig(policy=scheduling.policy, tbt_target=scheduling.tbt_target).spec
    if policy is None or policy.target is None:
        raise InvalidInput("--engine vllm needs --tbt-target, the time between tokens to keep, such as 50ms.")
    check_flags(flags)
    shared = {name: value for name, value in engine_settings(model, scheduling).items() if name in _SHARED_SETTINGS}
    python = find_python(options.vllm_python)
    return VllmLaunch(
        python=python,
        model=model.model,
        policy=policy,
        model_names=options.served_model_name or (),
        flags=[*graph_flags(version_in(python), flags), *command_flags(shared), *flags],
        warm_up=options.warm_up,
    )


async def serve(settings: ServerSettings, listener: socket.socket, launch: VllmLaunch, max_num_seqs: int) -> None:
    """Serve until a signal comes."""
    from evenflow.server.serving import serve_vllm

    host, port = listener.getsockname()[:2]
    started_at = time.monotonic()

    def on_start(server: Server) -> None:
        logger.info(
            "Starting vLLM (%s), which takes a minute or two; http://%s:%d/ready says when it is up.",
            *(launch.policy, host, port),
        )

    def on_ready() -> None:
        names, seconds = ", ".join(settings.model_names), time.monotonic() - started_at
        logger.info("Serving %s by vLLM after %.0f s at http://%s:%d/v1, until Ctrl-C.", names, seconds, host, port)

    await serve_vllm(settings, listener, launch, max_num_seqs, on_start, on_ready)
