"""`evenflow serve --engine vllm` or `sglang`: which options a host engine takes, and how they become its flags."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from evenflow.cli.options import ModelOptions, SchedulingOptions, engine_settings
from evenflow.cli.serve_options import ServeOptions
from evenflow.config import EngineConfig
from evenflow.core.policies import PolicySpec, policy_forms, policy_kinds
from evenflow.errors import InvalidInput
from evenflow.hosts.launch import HostLaunch, refuse_repeated
from evenflow.model.hub.cached_models import find_cached, note_use
from evenflow.sglang.launch import SglangLaunch
from evenflow.vllm.launch import VllmLaunch

if TYPE_CHECKING:
    from evenflow.server.serving import Server, ServerSettings

logger = logging.getLogger("evenflow")

_HOSTS: dict[str, type[HostLaunch]] = {kind.package.engine: kind for kind in (VllmLaunch, SglangLaunch)}
# Settings that host engines have too.
_SHARED_SETTINGS = (
    *("max_model_len", "gpu_memory_utilization", "max_num_batched_tokens", "enable_prefix_caching", "max_num_seqs"),
    *("long_prefill_token_threshold", "enable_chunked_prefill"),
)
_OWN_OPTIONS = (
    *("device", "weights", "load_format", "deterministic", "threads", "kv_cache_memory"),
    *("kv_offload_memory", "kv_offload_format", "cache_dir", "cache_dir_size"),
    *("max_response_size", "max_prompt_tokens", "max_n", "max_open_tokens", "shares", "allow_special_tokens"),
    *("pooling", "otlp_endpoint", "request_log", "step_timeout", "record", "other_model"),
)


def make_launch(
    options: ServeOptions, model: ModelOptions, scheduling: SchedulingOptions, flags: Sequence[str]
) -> HostLaunch:
    """The host's server that these options describe. Refuses those that only evenflow's own engine has."""
    kind, engine = _HOSTS[options.engine], f"--engine {options.engine}"
    for group in (model, scheduling, options):
        for field in fields(group):
            if field.name in _OWN_OPTIONS and getattr(group, field.name) != field.default:
                name = f"--{field.name.replace('_', '-')}"
                raise InvalidInput(f"Got {name} with {engine}, but only evenflow's own engine has that option.")
    if model.model == EngineConfig().model:
        raise InvalidInput(f"{engine} needs --model, a name or folder that it can load; it has no default model.")
    given = engine_settings(model, scheduling)
    policy = _policy(EngineConfig(**given), engine)
    settings = {name: given[name] for name in _SHARED_SETTINGS if name in given} | options.parallel_sizes
    obstacle = kind.find_obstacle(policy, settings)
    has_target = policy is not None and policy.target is not None
    if has_target and obstacle is not None:
        raise InvalidInput(f"Got policy='{policy}' with {engine} but no target can be kept: {obstacle}.")
    own_flags = kind.flags_of(policy, settings)
    kind.check_flags(flags)
    refuse_repeated(flags, own_flags, kind.aliases)
    python = kind.package.find_python(getattr(options, f"{options.engine}_python"))
    loaded, names = _model_for_host(model.model)
    return kind(
        python=python,
        model=loaded,
        policy=policy,
        why_no_target=obstacle,
        model_names=options.served_model_name or names,
        flags=[*(kind.target_flags(python, flags) if has_target else ()), *own_flags, *flags],
        warm_up=options.warm_up,
    )


def _model_for_host(model: str) -> tuple[str, Sequence[str]]:
    """What the host engine loads, and the name it serves that under, if it is another. It finds hub names by itself."""
    found = None if Path(model).expanduser().exists() else find_cached(model)
    if found is None or (found.source == "hub" and found.path.is_dir()):
        return model, ()
    note_use(found.name)
    return str(found.path), (model,)


def _policy(config: EngineConfig, engine: str) -> PolicySpec | None:
    """None: the host's own settings."""
    policy = config.chosen_policy
    if policy is not None and not policy.kind.runs_on_hosts:
        forms = policy_forms(kind for kind in policy_kinds() if kind.runs_on_hosts)
        raise InvalidInput(
            f"Got policy='{policy}' with {engine} but expected one of: {forms}: only evenflow's own engine has the "
            "others."
        )
    if config.max_model_len is not None:
        config.resolve_policy(config.max_model_len)  # checks that unchunked prompts fit
    return policy


async def serve(settings: ServerSettings, listener: socket.socket, launch: HostLaunch, max_num_seqs: int) -> None:
    """Serve until a signal comes."""
    from evenflow.server.serving import serve_host

    host, port = listener.getsockname()[:2]
    started_at = time.monotonic()

    def on_start(server: Server) -> None:
        logger.info(
            "Starting %s (%s), which takes a minute or two; http://%s:%d/ready says when it is up.",
            *(launch.package.name, launch.summary, host, port),
        )

    def on_ready() -> None:
        names, seconds = ", ".join(settings.model_names), time.monotonic() - started_at
        logger.info(
            "Serving %s by %s after %.0f s at http://%s:%d/v1, with a live page at http://%s:%d/, until Ctrl-C.",
            *(names, launch.package.name, seconds, host, port, host, port),
        )

    await serve_host(settings, listener, launch, max_num_seqs, on_start, on_ready)
