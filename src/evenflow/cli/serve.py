"""`evenflow serve`: the OpenAI-compatible server, over evenflow's own engine or, by `serve_host`, over another."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from evenflow.cli import serve_host
from evenflow.cli.options import ModelOptions, SchedulingOptions, engine_settings, takes_options
from evenflow.cli.output import engine_imports
from evenflow.cli.serve_options import EngineFlags, ServeOptions
from evenflow.config import EngineConfig
from evenflow.errors import InvalidInput
from evenflow.line_file import LineFile
from evenflow.log_output import log_as_server
from evenflow.model.hub.cached_models import find_model

if TYPE_CHECKING:
    from evenflow.model.text.tokenizer import Tokenizer
    from evenflow.server.serving import Server, ServerSettings

logger = logging.getLogger("evenflow")


@takes_options
def serve(
    *,
    engine_flags: EngineFlags = None,
    options: ServeOptions,
    model: ModelOptions,
    scheduling: SchedulingOptions,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API.

    docs/server.md describes the endpoints, limits and errors.
    """
    shares = options.read_shares()
    given: dict[str, Any] = {} if options.step_timeout is None else {"step_timeout": options.step_timeout}
    config = EngineConfig(**engine_settings(model, scheduling), **shares.engine_settings, **given)
    if options.engine == "evenflow":
        options.check_own_engine(engine_flags or ())
    with engine_imports("the server"):
        from evenflow.server.serving import bind

        settings = options.server_settings(config, shares)
    if options.engine != "evenflow":
        launch = serve_host.make_launch(options, model, scheduling, engine_flags or ())
        with bind(options.host, options.port) as listener:
            _run(options, serve_host.serve(settings, listener, launch, config.max_num_seqs))
        return
    with bind(options.host, options.port) as listener:
        if options.record is not None:
            _empty(options.record)
        others = options.other_configs(config)
        for one in (config, *others.values()):
            find_model(one.model)  # before the slow imports; fetches `default`, where a progress bar can be shown
        host, port = listener.getsockname()[:2]

        def say_ready(server: Server) -> None:
            names, policy = ", ".join([*settings.model_names, *others]), server.service.client.policy
            logger.info(
                "Serving %s (%s) at http://%s:%d/v1, with a live page at http://%s:%d/, until Ctrl-C.",
                *(names, policy, host, port, host, port),
            )

        _run(options, serve_model(settings, listener, config, options.record, say_ready, others))


def _empty(path: Path) -> None:
    """An engine that is restarted later must not overwrite what the first one recorded, so that is decided here."""
    try:
        LineFile(path, "wb").close()
    except OSError as error:
        raise InvalidInput(f"Got --record {str(path)!r} but it cannot be written: {error.strerror}.") from error


async def serve_model(
    settings: ServerSettings,
    listener: socket.socket,
    config: EngineConfig,
    record: Path | None,
    on_ready: Callable[[Server], None],
    others: Mapping[str, EngineConfig] | None = None,
) -> None:
    """Serve a model by evenflow's own engine until a signal comes; `others`, by name, when requests ask for them."""
    from evenflow.server.engine.process import build_served_engine
    from evenflow.server.serving import ModelSource, serve

    def freeze(server: Server) -> None:
        # Keep what is loaded now out of garbage collections: a full one would stall every stream.
        gc.collect()
        gc.freeze()
        on_ready(server)

    def load_tokenizer(config: EngineConfig) -> Tokenizer:
        from evenflow.model.loader import load_model  # slow: it imports torch

        return load_model(config.model, is_dummy=config.load_format == "dummy").tokenizer

    def source(names: tuple[str, ...], config: EngineConfig) -> ModelSource:
        return ModelSource(names, partial(build_served_engine, config, record), partial(load_tokenizer, config))

    first = source(settings.model_names, config)
    more = [source((name,), one) for name, one in (others or {}).items()]
    await serve(settings, listener, first.factory, first.load_tokenizer, freeze, more)


def _run(options: ServeOptions, serving: Coroutine[Any, Any, None]) -> None:
    log_as_server(options.log_format)

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        # Until the server is up and installs its own handler.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, logger.warning, "Nothing is reloaded: the server starts.")
        await serving

    try:
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(1) from None


def event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not available on this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
