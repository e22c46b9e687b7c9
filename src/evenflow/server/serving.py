"""Runs the server: binds the port, starts the engine, serves until a signal, then drains open requests."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple, cast

import uvicorn

from evenflow.core.request import Pooling
from evenflow.errors import EngineFailed, EvenflowError, InvalidConfig
from evenflow.host import EXIT_SIGNALS, has_terminal, return_freed_memory
from evenflow.hosts.launch import HostLaunch
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.access import ApiKeys, turn_of
from evenflow.server.api.grammar_gate import GrammarGate
from evenflow.server.api.large_work import LargeWork
from evenflow.server.api.response_size import TokenSizes
from evenflow.server.api.service import ModelService, Service, fingerprint
from evenflow.server.api.template_renderer import TemplateRenderer
from evenflow.server.app import make_app
from evenflow.server.arrivals import Arrivals
from evenflow.server.connections import BoundedProtocol, bounded_protocol, in_pieces
from evenflow.server.engine.model_switch import ModelSwitch
from evenflow.server.engine.process import EngineFactory
from evenflow.server.engine.served_engine import ServedEngine, ServedModel
from evenflow.server.gate import Gate, ServerLimits
from evenflow.server.live.feed import LiveFeed
from evenflow.server.metrics.observer import Observer
from evenflow.server.metrics.request_log import RequestLog
from evenflow.server.metrics.tracing import make_tracer
from evenflow.server.proxy.host_engine import HostEngine
from evenflow.server.proxy.response import HostService
from evenflow.server.request_lines import RequestLines
from evenflow.server.turns import Turns
from evenflow.shares_file import Shares

logger = logging.getLogger("evenflow")

_GRACE_S = 2.0  # for error responses to be sent after the drain
_DRAIN_CHECK_S = 0.05
_ONE_SIGNAL_S = 0.2  # from several senders, or from one to a process and to its group
_FEW_CONNECTIONS = 64  # what a flood of more leaves is freed at once, though no request ran
_TICKS_PER_CHECK = 5  # of 0.1 s: between looks at what connections hold
_BACKLOG = 2048  # connections that wait to be accepted
_UNREAD_BYTES = 128 << 10  # of a connection that the system holds, twice as many on Linux: else it takes megabytes


class ModelSource(NamedTuple):
    """A model to serve: its names in requests, and how its engine is built, in another process, and its tokenizer."""

    names: tuple[str, ...]
    factory: EngineFactory
    load_tokenizer: Callable[[], Tokenizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a server listens, and for whom."""

    model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    admin_api_keys: Sequence[str] = ()
    metrics_api_keys: Sequence[str] = ()  # which may only read /metrics
    allowed_hosts: Sequence[str] = ()  # names of this server, besides its own; for servers without keys
    allowed_origins: Sequence[str] = ()
    allows_special_tokens: bool = False  # in the text of chats
    limits: ServerLimits = field(default_factory=ServerLimits)
    drain_s: float = 30.0  # for open requests to finish after SIGTERM
    otlp_endpoint: str | None = None  # where traces are sent
    request_log: Path | None = None
    shares: Shares = field(default_factory=Shares)  # its tenants are NAME of a key, or NAME/TENANT of an admin's
    pooling: Pooling | None = None  # of embeddings; None: the server gives none
    engine: str = ""  # its settings as text, for the fingerprint
    access_log: bool = False  # a line for every HTTP request
    reread: Callable[[], ServerSettings] | None = None  # these settings from their files as they are now

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise InvalidConfig("Got an empty --served-model-name but expected at least one character.")
        if not 0 <= self.port <= 65535:
            raise InvalidConfig(f"Got --port {self.port} but expected 0 to 65535.")
        # Refuse bad ones before anything is loaded.
        self.make_keys()

    def make_keys(self) -> ApiKeys:
        keys = ApiKeys(self.api_keys, self.admin_api_keys, self.metrics_api_keys)
        keys.check_tenants(self.shares.tenants)
        return keys


def bind(host: str, port: int) -> socket.socket:
    """Reserve the port before anything is loaded; `listen` opens it when the engine is ready."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise InvalidConfig(f"Got --host {host!r} but it is not an address of this machine: {error}.") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_serve(host, port, error) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Fails if another server has begun to listen on the port meanwhile, which uvloop would not say."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _cannot_serve(host, port, error) from error


def _cannot_serve(host: str, port: int, error: OSError) -> EngineFailed:
    advice = "; --port gives another, 0 a free one" if error.errno == errno.EADDRINUSE else ""
    return EngineFailed(f"cannot serve on {host} port {port}: {error.strerror}{advice}")


async def serve(
    settings: ServerSettings,
    listener: socket.socket,
    factory: EngineFactory,
    load_tokenizer: Callable[[], Tokenizer],
    on_ready: Callable[[Server], None] = lambda server: None,
    others: Sequence[ModelSource] = (),
) -> None:
    """Serve on a bound socket until a signal. Raises the error if the engine's first start fails.

    The engine starts with the first model; `others` are loaded in its place when requests name them.
    """
    tracer = make_tracer(settings.otlp_endpoint, settings.model_names[0])
    observer = Observer(settings.model_names[0])
    request_log = None if settings.request_log is None else RequestLog(settings.request_log, observer)
    sources = [ModelSource(settings.model_names, factory, load_tokenizer), *others]
    tokenizers = [await asyncio.to_thread(source.load_tokenizer) for source in sources]
    if tracer is not None:
        observer.listen(tracer)
    models = [ServedModel(one.names[0], one.factory, codec) for one, codec in zip(sources, tokenizers, strict=True)]
    client = ServedEngine(models[0], observer)
    gate = Gate(settings.limits, lambda: client.max_num_seqs, observer.on_request_rejected, settings.shares)
    work, switch, services = LargeWork(), ModelSwitch(client), list[ModelService]()
    for source, tokenizer, model in zip(sources, tokenizers, models, strict=True):
        service = ModelService(
            *(client, gate, work),
            tokenizer=tokenizer,
            token_sizes=TokenSizes(tokenizer),
            grammar_gate=GrammarGate(tokenizer, tokenizer.vocab_size),
            templates=TemplateRenderer(tokenizer, allows_special_tokens=settings.allows_special_tokens),
            model_names=source.names,
            system_fingerprint=fingerprint(settings.engine + (model.name if others else "")),
            model=model,
            switch=switch,
            served=services,
            pooling=settings.pooling,
        )
        services.append(service)
    try:
        await services[0].templates.start()
        await client.start()
        server = Server(services[0], observer, settings)
        listen(listener)
        on_ready(server)
        await server.serve(sockets=[listener])
    finally:
        switch.close(EngineFailed("the server is shutting down"))
        await client.close()
        for one in services:
            await one.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        if request_log is not None:
            await asyncio.to_thread(request_log.close)


async def serve_host(
    settings: ServerSettings,
    listener: socket.socket,
    launch: HostLaunch,
    max_num_seqs: int,
    on_start: Callable[[Server], None] = lambda server: None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal, and already while the host starts. Raises the error if its first start fails."""
    listen(listener)
    observer = Observer(settings.model_names[0])
    engine = HostEngine(launch, observer, has_keys=bool(settings.api_keys or settings.admin_api_keys))
    try:
        first_start = engine.start()
        gate = Gate(settings.limits, lambda: max_num_seqs, observer.on_request_rejected)
        server = Server(HostService(engine, gate, LargeWork()), observer, settings)

        def on_first_start(start: asyncio.Future[None]) -> None:
            if start.cancelled() or start.exception() is not None:
                server.should_exit = True
            else:
                on_ready()

        first_start.add_done_callback(on_first_start)
        on_start(server)
        await server.serve(sockets=[listener])
        if first_start.done():
            first_start.result()
    finally:
        await engine.close()


class Server(uvicorn.Server):
    """uvicorn that drains open requests, then fails the rest."""

    def __init__(self, service: ModelService | HostService, observer: Observer, settings: ServerSettings) -> None:
        self.service: Service = service
        self._feed = LiveFeed(observer)
        self._drain_s = settings.drain_s
        self._exit_asked_at = -math.inf
        self._had_terminal = False
        self._work = (True, True)  # at the last check: did requests run, and were there many connections?
        self._arrivals: list[Arrivals] = []
        hosts = (settings.host, *settings.allowed_hosts)
        self._keys = keys = settings.make_keys()
        self._protocol = bounded_protocol(partial(turn_of, keys))
        self._settings = settings
        self._reload_lock = asyncio.Lock()
        self._reloads: set[asyncio.Task[None]] = set()
        self._lines = RequestLines(settings.access_log)
        app = make_app(service, observer, self._feed, keys, hosts, settings.allowed_origins)
        config = uvicorn.Config(
            in_pieces(Turns(app), self._lines),
            http=self._protocol,
            ws="none",
            access_log=False,
            log_config=None,
            log_level="warning",
            backlog=_BACKLOG,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # a client could make up its address
        )
        super().__init__(config)

    @property
    def num_pages(self) -> int:
        """Live pages that are open."""
        return self._feed.num_readers

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_CHECK == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                cast("BoundedProtocol", connection).check(now)
            is_busy = self.service.gate.num_inside > 0
            had_work, self._work = self._work, (is_busy, len(self.server_state.connections) > _FEW_CONNECTIONS)
            if not is_busy and had_work > self._work:  # it takes milliseconds, for which nobody waits
                gc.collect()  # errors hold on to what they interrupted
                return_freed_memory()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        if not self.should_exit:
            made = self._protocol
            self._arrivals = [Arrivals(one, self._new_protocol, made.held, made.owner_of) for one in sockets or ()]

    def _new_protocol(self) -> BoundedProtocol:
        return self._protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._drain()
        for arrivals in self._arrivals:
            arrivals.close()
        await super().shutdown(sockets)
        self._lines.close()

    async def _drain(self) -> None:
        """Wait for open requests to finish, then fail those that are left. New ones get a 503 meanwhile."""
        gate, loop = self.service.gate, asyncio.get_running_loop()
        gate.is_draining = True
        self._feed.close()
        if gate.num_inside:
            logger.warning(
                "Shutting down. Open requests: %d, with %.0f s to finish. Press Ctrl-C again to quit at once.",
                *(gate.num_inside, self._drain_s),
            )
        for limit in (self._drain_s, _GRACE_S):
            end = loop.time() + limit
            while gate.num_inside and loop.time() < end and not self.force_exit:
                await asyncio.sleep(_DRAIN_CHECK_S)
            await self.service.fail_all(EngineFailed("the server is shutting down"))
        await asyncio.sleep(_DRAIN_CHECK_S)  # for the last bytes to be sent
        self.force_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, quit at the second. `timeout` sends its signal twice and means one."""
        now = time.monotonic()
        if not self.should_exit:
            self.should_exit, self._exit_asked_at = True, now
        elif now - self._exit_asked_at > _ONE_SIGNAL_S:
            self.force_exit = True

    def handle_hangup(self) -> None:
        """Read the files of keys and shares again; if it was the terminal that closed, shut down."""
        if self._had_terminal and not has_terminal():
            self.handle_exit(signal.SIGHUP, None)
            return
        reload = asyncio.get_running_loop().create_task(self.reload())
        self._reloads.add(reload)
        reload.add_done_callback(self._reloads.discard)

    async def reload(self) -> None:
        """Read the files of keys and shares again. What is wrong in them changes nothing."""
        if self._settings.reread is None:
            return
        async with self._reload_lock:
            try:
                found = await asyncio.to_thread(self._settings.reread)
                if found.shares.classes != self._settings.shares.classes:
                    raise InvalidConfig("Got other classes of service: they need a restart of the server.")
                self._keys.replace(found.make_keys())
            except EvenflowError as error:
                logger.error("Nothing is reloaded: %s", error)
                return
            self.service.set_shares(found.shares)
            names, tenants = self._keys.names, found.shares.tenants
            logger.info("Reloaded. API keys: %s. Tenants with settings: %d.", ", ".join(names) or "none", len(tenants))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which would raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in EXIT_SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        # Under nohup a closed terminal means nothing.
        self._had_terminal = has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        loop.add_signal_handler(signal.SIGHUP, self.handle_hangup)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            for number in EXIT_SIGNALS:
                loop.remove_signal_handler(number)
