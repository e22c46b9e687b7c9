"""A pytest plugin for llama.cpp's tests: its servers become evenflow's, and tests of llama.cpp alone are skipped.

Each server of the tests is a small proxy that translates names, in front of an `evenflow serve` with the same settings.
Servers with the same settings are shared: a start takes seconds. The tests' model is llama.cpp's own, stories260K, so
their token counts hold; sampled texts differ between engines, so a text that should match a pattern must only be there.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
import requests
import utils  # of llama.cpp's tests
from checking import WORK
from llama_cpp_groups import LLAMA_SPECIFIC, group_of
from llama_cpp_names import COMBINED, Body, Defaults, Send, error_of, path_of, request_of, response_of
from server_process import start_server, stop_server

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LONG = {"max_position_embeddings": 8192}  # llama.cpp lets a context be longer than the model was trained for
_UPSTREAM_S = 300.0
_RELAYED_HEADERS = ("Authorization", "X-Api-Key")
_CONSTRAINED = ("response_format", "json_schema", "grammar")  # in the names of tests whose texts are not free


# ---- servers ----


@cache
def _model_folder(template: str) -> Path:
    """The tests' model with this chat template. llama.cpp adds the BOS token itself where the template does not."""
    if "bos_token" not in template:
        template = "{{ bos_token }}" + template
    folder, source = Path(tempfile.mkdtemp(prefix="model-", dir=WORK)), WORK / "model"
    changes = {"tokenizer_config.json": {"chat_template": template}, "config.json": _LONG}
    for path in source.iterdir():
        if path.name in changes:
            (folder / path.name).write_text(json.dumps({**json.loads(path.read_text()), **changes[path.name]}))
        else:
            (folder / path.name).symlink_to(path)
    return folder


class _Servers:
    """Running servers by their options; the one that was used least recently makes room for another."""

    _MOST = 3

    def __init__(self) -> None:
        self._running: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], str]] = {}
        self._num_started = 0
        atexit.register(self._keep, 0)

    def address(self, *options: str) -> str:
        if options in self._running:
            self._running[options] = self._running.pop(options)
        else:
            self._keep(self._MOST - 1)
            self._running[options] = self._start(options)
        return self._running[options][1]

    def _keep(self, most: int) -> None:
        while len(self._running) > most:
            process, _ = self._running.pop(next(iter(self._running)))
            stop_server(process)

    def _start(self, options: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], str]:
        self._num_started += 1
        command = [os.environ["EVENFLOW_COMMAND"], "serve", *options]
        return start_server(command, WORK / f"server-{self._num_started}.log")


_servers = _Servers()


class EvenflowServer(utils.ServerProcess):  # type: ignore[misc, name-defined]
    """A server of the tests: llama-server's settings become options of `evenflow serve`."""

    _proxy: ThreadingHTTPServer | None = None

    def start(self, timeout_seconds: float = 0) -> None:
        settings = {
            "--model": _model_folder(self._template()),
            "--served-model-name": self.model_alias,
            "--max-model-len": self.n_ctx if self.kv_unified else self.n_ctx // (self.n_slots or 1),
            "--max-num-seqs": self.n_slots,
            "--max-num-batched-tokens": self.n_batch,
            "--api-key": self.api_key,
            "--pooling": (self.pooling or "last") if self.server_embeddings else None,
            "--kv-cache-memory": "64MiB",
            "--threads": 1,
        }
        options = [text for name, value in settings.items() if value is not None for text in (name, str(value))]
        sampling = self.temperature, self.seed, self.n_predict
        defaults = Defaults(self.model_alias, *sampling, self.debug, self.reasoning != "off")
        handler = type("Handler", (_Proxy,), {"address": _servers.address(*options), "defaults": defaults})
        self._proxy = ThreadingHTTPServer((self.server_host, 0), handler)
        self.server_port = self._proxy.server_port
        Thread(target=self._proxy.serve_forever, daemon=True).start()
        utils.server_instances.add(self)

    def stop(self) -> None:
        utils.server_instances.discard(self)
        if self._proxy is not None:
            self._proxy.shutdown()
            self._proxy.server_close()
            self._proxy = None

    def _template(self) -> str:
        if self.chat_template_file:
            return Path(self.chat_template_file).read_text()
        return _CHATML if self.chat_template in (None, "chatml") else self.chat_template


class _Proxy(BaseHTTPRequestHandler):
    """Passes one request on, in evenflow's names, and the answer back in llama.cpp's."""

    address: ClassVar[str]
    defaults: ClassVar[Defaults]

    def do_POST(self) -> None:
        self._relay()

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest's output is the log."""

    def _relay(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(content) if self.command == "POST" and content else None
        if (combine := COMBINED.get(self.path)) is not None:
            self._combine(combine, body)
            return
        asked = None if body is None else request_of(self.path, body, self.defaults)
        upstream = self._send(path_of(self.path), asked)
        kind = upstream.headers.get("Content-Type", "")
        if "event-stream" in kind:
            self._begin(upstream, kind)
            for line in upstream.iter_lines():
                self.wfile.write(_event_line(self.path, line) + b"\n")
        else:
            answer = upstream.content
            if asked is not None:
                answer = json.dumps(self._translated(upstream)).encode()
            self._begin(upstream, kind)
            self.wfile.write(answer)

    def _translated(self, upstream: requests.Response) -> Any:
        answer = upstream.json()
        if not upstream.ok:
            return error_of(answer)
        if self.defaults.is_verbose and "prompt_token_ids" in answer:
            prompt = self._ask("/detokenize", {"tokens": answer["prompt_token_ids"]})["prompt"]
            answer["__verbose"] = {"prompt": prompt}
        return response_of(self.path, answer)

    def _combine(self, combine: Callable[[Send, Body], Body], body: Body) -> None:
        try:
            content, status = json.dumps(combine(self._ask, request_of(self.path, body, self.defaults))).encode(), 200
        except requests.HTTPError as error:
            content, status = error.response.content, error.response.status_code
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def _ask(self, path: str, body: Body) -> Body:
        upstream = self._send(path, body)
        if not upstream.ok:
            raise requests.HTTPError(response=upstream)
        answer: Body = upstream.json()
        return answer

    def _send(self, path: str, body: Body | None) -> requests.Response:
        headers = {name: value for name in _RELAYED_HEADERS if (value := self.headers.get(name)) is not None}
        url = self.address + path
        return requests.request(self.command, url, json=body, headers=headers, stream=True, timeout=_UPSTREAM_S)

    def _begin(self, upstream: requests.Response, kind: str) -> None:
        """The status, and a response that ends where the connection does."""
        self.send_response(upstream.status_code)
        self.send_header("Content-Type", kind)
        self.end_headers()


def _event_line(path: str, line: bytes) -> bytes:
    if not line.startswith(b"data: {"):
        return line
    return b"data: " + json.dumps(response_of(path, json.loads(line[6:]))).encode()


class _Match:
    """In place of their `match_regex`: what is sampled freely differs between engines, so it must only be there."""

    is_free = True

    def __init__(self, original: Callable[[str, str], bool]) -> None:
        self._original = original

    def __call__(self, pattern: str, text: str) -> bool:
        return bool(text) if self.is_free else self._original(pattern, text)


utils.ServerProcess = EvenflowServer
utils.match_regex = _match = _Match(utils.match_regex)
utils.ServerPreset.load_all = staticmethod(lambda: None)  # it would download every model


def pytest_runtest_setup(item: pytest.Item) -> None:
    _match.is_free = not any(word in item.name for word in _CONSTRAINED)


# ---- the report ----

_groups: Counter[str] = Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("unit/")
        if (group := group_of(name)) is not None:
            _groups[group] += 1
            item.add_marker(pytest.mark.skip(reason=group))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error")}
    standard = f"{counts['passed']} passed, {counts['failed'] + counts['error']} failed"
    terminalreporter.write_line(f"tests of standard behaviour: {standard}")
    terminalreporter.write_line(f"tests of llama.cpp alone, not run: {_groups.total()}")
    for group, count in _groups.most_common():
        terminalreporter.write_line(f"  {count:4} {group}: {LLAMA_SPECIFIC[group].reason}")
