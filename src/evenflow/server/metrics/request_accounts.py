"""The checks of `evenflow audit`: reads request logs and checks that each accepted request ended exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from evenflow.counts import counted
from evenflow.errors import InvalidInput

_MAX_PROBLEMS = 20  # listed at most


@dataclass(slots=True)
class Accounts:
    """The outcomes of the requests in a log."""

    num_accepted: int = 0
    num_first_tokens: int = 0  # requests with a token
    num_retries: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # by finish reason
    num_ended_only: int = 0  # accepted before this log's first line: the log was rotated
    cut_off: list[str] = field(default_factory=list)  # open at a server's death
    still_open: list[str] = field(default_factory=list)  # at the end of a log that its server did not close
    num_killed: int = 0  # servers that ended without closing the log
    is_closed: bool = True  # False: the last server runs, or was killed
    num_torn_lines: int = 0
    num_lost_lines: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def adds_up(self) -> bool:
        """Whether every accepted request ended exactly once, or was open when its server died or the log ended."""
        others = len(self.cut_off) + len(self.still_open) - self.num_ended_only
        return not self.problems and self.num_accepted == sum(self.ended.values()) + others

    def as_json(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self), "adds_up": self.adds_up}


def read_accounts(paths: Iterable[str | Path]) -> Accounts:
    """The accounts of a log, given as its files from oldest to newest."""
    reader, files = _Reader(), [Path(path) for path in paths]
    for path in files:
        reader.read(path)
    if reader.is_empty:
        raise InvalidInput(f"Got {str(files[-1])!r} but it is not a request log: it is empty.")
    return reader.finish()


class _Reader:
    def __init__(self) -> None:
        self._accounts = Accounts()
        self._open: dict[str, bool] = {}  # request id to whether it has a token
        self._is_whole: bool | None = None  # the log begins with the server's start; None: no line yet
        self._is_closed = True  # by the last server

    @property
    def is_empty(self) -> bool:
        return self._is_whole is None

    def read(self, path: Path) -> None:
        """Read a file, which may be empty right after a rotation."""
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise InvalidInput(f"Got the log {str(path)!r} but it cannot be read: {error.strerror}.") from error
        has_entries = False
        for line in _parsed(lines, self._accounts):
            try:
                self._take(line, path)
            except KeyError as missing:
                raise InvalidInput(
                    f"Got {str(path)!r} but it is not a request log: a line with the event {line['event']!r} has no "
                    f"{missing.args[0]!r}."
                ) from missing
            has_entries = True
        if any(lines) and not has_entries:
            raise InvalidInput(f"Got {str(path)!r} but it is not a request log: none of its lines is an entry.")

    def finish(self) -> Accounts:
        self._accounts.still_open, self._accounts.is_closed = list(self._open), self._is_closed
        return self._accounts

    def _take(self, line: dict[str, Any], path: Path) -> None:
        event, accounts = line.get("event"), self._accounts
        if self._is_whole is None:
            self._is_whole = event == "opened"
        was_closed, self._is_closed = self._is_closed, event == "closed"
        match event:
            case "opened":
                accounts.num_killed += not was_closed
                accounts.cut_off += self._open
                self._open = {}
            case "closed":
                for request_id in self._open:
                    self._add_problem(f"the server ended and request {request_id} had not")
                self._open = {}
            case "lost":
                accounts.num_lost_lines += line["lines"]
                are = "is" if line["lines"] == 1 else "are"
                self._add_problem(f"{counted(line['lines'], 'line')} {are} missing: not taken by the disk")
            case "accepted" | "first_token" | "retried" | "ended":
                self._take_request(event, line)
            case _:
                raise InvalidInput(f"Got {str(path)!r} but it is not a request log: a line has the event {event!r}.")

    def _take_request(self, event: str, line: dict[str, Any]) -> None:
        accounts, request_id = self._accounts, line["id"]
        if event == "accepted":
            accounts.num_accepted += 1
            if request_id in self._open:
                self._add_problem(f"request {request_id} was accepted twice")
            self._open[request_id] = False
        elif request_id not in self._open:
            if self._is_whole:
                self._add_problem(f"request {request_id} has the event {event} but is not open")
            elif event == "ended":
                accounts.num_ended_only += 1
                accounts.ended[line["finish_reason"]] += 1
        elif event == "first_token":
            accounts.num_first_tokens += not self._open[request_id]
            self._open[request_id] = True
        elif event == "retried":
            accounts.num_retries += 1
        else:
            del self._open[request_id]
            accounts.ended[line["finish_reason"]] += 1

    def _add_problem(self, text: str) -> None:
        if len(self._accounts.problems) < _MAX_PROBLEMS:
            self._accounts.problems.append(text)


def _parsed(lines: list[bytes], accounts: Accounts) -> Iterator[dict[str, Any]]:
    """Decode lines; counts those torn by a crash, which are not JSON."""
    for line in filter(None, lines):
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            accounts.num_torn_lines += 1
