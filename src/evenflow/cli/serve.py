"""`evenflow serve`: the OpenAI-compatible server, over evenflow's own engine or, by `serve_vllm`, over vLLM."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from evenflow.cli.options import (
    ModelOptions,
    SchedulingOptions,
    knobs,
    parse_duration,
    parse_new_file,
    parse_size,
    takes_options,
)
from evenflow.config import EngineConfig
from evenflow.errors import InvalidInput, MissingDependency
from evenflow.model.default_model import default_model_path

if TYPE_CHECKING:
    from evenflow.model.tokenizer import Tokenizer
    from evenflow.server.serving import Server, ServerSettings

logger = logging.getLogger("evenflow")

_KEY_VARIABLE = "EVENFLOW_API_KEY"


class EngineName(StrEnum):
    """Who runs the model."""

    EVENFLOW = "evenflow"
    VLLM = "vllm"


@takes_options
def serve(
    *,
    vllm_flags: Annotated[
        list[str],
        Argument(metavar="[-- VLLM_FLAGS]", help="With --engine vllm: flags for vLLM, passed on as they are."),
    ] = [],  # noqa: B006
    engine: Annotated[EngineName, Option(help="evenflow's own engine, or vLLM steered by evenflow: docs/vllm.md.")] = (
        EngineName.EVENFLOW
    ),
    vllm_python: Annotated[
        str | None,
        Option(metavar="PATH", help="The Python that has vLLM.", show_default="$EVENFLOW_VLLM_PYTHON, or this one"),
    ] = None,
    host: Annotated[str, Option(help="Address to serve on; 0.0.0.0 is every one of this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to serve on; 0: one that is free.")] = 8000,
    served_model_name: Annotated[
        list[str], Option(metavar="NAME", help="Name for requests to use, instead of --model; may be repeated.")
    ] = [],  # noqa: B006
    api_key: Annotated[
        list[str], Option(metavar="KEY", help=f"Key to ask for; may be repeated. Better: a file, or ${_KEY_VARIABLE}.")
    ] = [],  # noqa: B006
    api_key_file: Annotated[Path | None, Option(metavar="PATH", help="File of keys, one a line.")] = None,
    allow_origin: Annotated[
        list[str], Option(metavar="ORIGIN", help="Site whose pages may ask from a browser; may be repeated; *: any.")
    ] = [],  # noqa: B006
    max_body_size: Annotated[int, Option(parser=parse_size, metavar="SIZE", help="Largest body.")] = "8MiB",  # type: ignore[assignment]
    max_prompt_tokens: Annotated[int, Option(help="Longest prompt; 0: what the context holds.")] = 0,
    max_n: Annotated[int, Option(help="Most answers of one request: n times its prompts.")] = 128,
    max_waiting: Annotated[int, Option(help="Most answers that wait for a place; more are refused.")] = 1024,
    max_tenant_requests: Annotated[
        int, Option(help="Most answers of one tenant that run or wait; 0: no such limit.")
    ] = 0,
    drain_time: Annotated[
        float, Option(parser=parse_duration, metavar="DURATION", help="Time for open requests to end after SIGTERM.")
    ] = "30s",  # type: ignore[assignment]
    otlp_endpoint: Annotated[
        str | None, Option(metavar="URL", help="Send traces there, to an OTLP collector over HTTP.")
    ] = None,
    record: Annotated[
        Path | None,
        Option(parser=parse_new_file, metavar="PATH", help="Write every step's plan and seconds there, as JSON lines."),
    ] = None,
    model: ModelOptions,
    scheduling: SchedulingOptions,
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API. See docs/server.md."""
    config = EngineConfig(**knobs(model, scheduling))
    if engine is EngineName.EVENFLOW and (vllm_flags or vllm_python):
        raise InvalidInput(f"Got {vllm_python or ' '.join(vllm_flags)!r} for vLLM, but the engine is evenflow's own.")
    try:
        from evenflow.server.access import ServerLimits, read_key_file
        from evenflow.server.serving import ServerSettings, bind
    except ImportError as error:
        raise MissingDependency(
            f"the server needs {error.name}, which is not installed: pip install 'evenflow[engine]'"
        ) from error
    keys = [*api_key, *(read_key_file(api_key_file) if api_key_file is not None else [])]
    if variable := os.environ.get(_KEY_VARIABLE):
        keys.append(variable)
    settings = ServerSettings(
        model_names=tuple(served_model_name) or (config.model,),
        host=host,
        port=port,
        api_keys=keys,
        allowed_origins=allow_origin,
        limits=ServerLimits(
            max_body_bytes=max_body_size,
            max_prompt_tokens=max_prompt_tokens,
            max_n=max_n,
            max_waiting=max_waiting,
            max_tenant_requests=max_tenant_requests,
        ),
        drain_s=drain_time,
        otlp_endpoint=otlp_endpoint,
    )
    if engine is EngineName.VLLM:
        from evenflow.cli import serve_vllm

        serve_vllm.refuse_own(model, scheduling, settings, record)
        launch = serve_vllm.launch_of(model, scheduling, served_model_name, vllm_python, vllm_flags)
        with bind(host, port) as listener:
            _run(serve_vllm.serving(settings, listener, launch, config.max_num_seqs))
        return
    with bind(host, port) as listener:
        if config.model == "default":
            default_model_path()  # fetched here, where it can show how far it is
        _run(_serving(settings, listener, config, record))


async def _serving(
    settings: ServerSettings, listener: socket.socket, config: EngineConfig, record: Path | None
) -> None:
    from evenflow.server.engine.process import build_served_engine
    from evenflow.server.serving import serve

    host, port = listener.getsockname()[:2]

    def on_ready(server: Server) -> None:
        # What is loaded now stays: without it a full collection makes every stream wait.
        gc.collect()
        gc.freeze()
        names, policy = ", ".join(settings.model_names), server.service.client.policy
        logger.info("Serving %s (%s) at http://%s:%d/v1, until Ctrl-C.", names, policy, host, port)

    await serve(
        settings,
        listener,
        functools.partial(build_served_engine, config, record),
        functools.partial(_load_tokenizer, config.model),
        on_ready,
    )


def _run(serving: Coroutine[Any, Any, None]) -> None:
    if "EVENFLOW_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.INFO)

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # while the model is loaded
        await serving

    try:
        with asyncio.Runner(loop_factory=_fast_loop) as runner:
            runner.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(1) from None


def _fast_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _load_tokenizer(model: str) -> Tokenizer:
    from evenflow.model.loader import load_model

    return load_model(model).tokenizer
