"""Refuses invalid evenflow settings in a request, which a host engine would silently ignore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from evenflow.core.service_classes import Classes, find_class
from evenflow.errors import InvalidInput
from evenflow.hosts.settings import REQUEST_SETTINGS, check_setting
from evenflow.server.access import Caller, check_own_target
from evenflow.server.errors import ApiError

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_settings(
    content: bytes, paths: Sequence[Sequence[str]], caller: Caller, target: float | None, classes: Classes
) -> None:
    """Raise for the first invalid setting. A body that is not a JSON object is left to the host."""
    try:
        fields = _decode(content)
        given = [(path, msgspec.json.decode(fields[path[0]])) for path in paths if path[0] in fields]
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return
    for path, value in given:
        for settings in _at(value, path[1:]):
            found = {name: _checked(settings, name, path, classes) for name in REQUEST_SETTINGS}
            of_class = find_class(classes, found["service_class"])
            check_own_target(caller, found["tbt_target"], target, of_class, ".".join((*path, "tbt_target")))


def _at(value: Any, path: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """The objects at this path, in every member of a batch."""
    if isinstance(value, list):
        for one in value:
            yield from _at(one, path)
    elif isinstance(value, dict):
        if path:
            yield from _at(value.get(path[0]), path[1:])
        else:
            yield value


def _checked(settings: Mapping[str, Any], name: str, path: Sequence[str], classes: Classes) -> Any:
    if settings.get(name) is None:
        return None
    try:
        return check_setting(name, settings[name], classes)
    except InvalidInput as error:
        raise ApiError(400, f"{'.'.join(path)}: {error}", param=".".join((*path, name))) from None
