"""Separates the requests of different API keys in a host engine, which does not know keys.

With keys, each request gets an id with its key's name (`~NAME~ID`), which separates the host's reports and stored
responses, and the key's salt for the prefix cache. Both replace the client's choice.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from typing import Any

import httpx
import msgspec

from evenflow.hosts.launch import HostLaunch
from evenflow.server.access import Caller
from evenflow.server.errors import ApiError

ID_HEADER = "x-request-id"  # vLLM prefers it to the body's field

_RESPONSES = "/v1/responses"
_STORED_RESPONSE = re.compile(rf"{_RESPONSES}/([^/]+)(/cancel)?")
_RENDER = "render"  # a fixed path in the place of a stored response's id
_OWNER = re.compile(r"~([A-Za-z0-9._-]{1,64})~")
_CHOSEN_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")
# They reach another request's KV or continue after the response, so their owner cannot be checked here.
_ADMINS_FIELDS = {
    "background",
    "bootstrap_host",
    "bootstrap_pair_key",
    "bootstrap_port",
    "bootstrap_room",
    "ec_transfer_params",
    "encoder_urls",
    "http_worker_ipc",
    "kv_transfer_params",
    "session_params",
}
_NOTHING = (b"null", b"false")
_JSON_TYPES = ("", "application/json")
_FORM_TYPES = ("multipart/form-data", "application/x-www-form-urlencoded")  # for audio; hosts parse them nowhere else

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode


def owner_of(host_id: str) -> str:
    """The name of the owning key; "" if the id has none."""
    found = _OWNER.search(host_id)  # the first match is the front's: the client's part follows it
    return "" if found is None else found[1]


def check_stored_response(path: str, caller: Caller) -> None:
    """Refuse another key's stored response as if it did not exist."""
    stored = _STORED_RESPONSE.fullmatch(path)
    if stored is not None and stored[1] != _RENDER:
        _check_owner(stored[1], caller)


def keep_apart(request: httpx.Request, launch: type[HostLaunch], caller: Caller) -> httpx.Request:
    """The request with its key's id and salts, if it has a key."""
    if not caller.name:
        return request
    headers, content = request.headers.copy(), request.read()
    chosen: object = headers.get(ID_HEADER)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _JSON_TYPES or kind.endswith("+json"):
        fields = _parse(content)
        chosen = chosen or next((_value(fields[name]) for name in launch.id_fields if name in fields), None)
        _check_fields(fields, caller)
        headers[ID_HEADER] = new_id = _id_for(caller, request.url.path, chosen)
        for name in launch.id_fields:
            fields[name] = msgspec.Raw(_encode(new_id))
        for name in launch.salt_fields:
            fields[name] = msgspec.Raw(_encode(_salted(caller, _value(fields.get(name, msgspec.Raw(b"null"))))))
        content = _encode(fields)
    elif kind in _FORM_TYPES:
        headers[ID_HEADER] = _id_for(caller, request.url.path, chosen)
    else:
        raise ApiError(415, f"Got Content-Type {kind[:100]!r} but expected application/json.")
    headers.pop("content-length", None)
    return httpx.Request(request.method, request.url, headers=headers, content=content)


def _parse(content: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _decode(content) if content else {}
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        raise ApiError(400, "The body is not a JSON object.", code="invalid_json") from None


def _value(field: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(field)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        raise ApiError(400, "The body is not valid JSON.", code="invalid_json") from None


def _check_fields(fields: dict[str, msgspec.Raw], caller: Caller) -> None:
    if not caller.is_admin:
        for name in sorted(_ADMINS_FIELDS & fields.keys()):
            if bytes(fields[name]).strip() not in _NOTHING:
                raise ApiError(403, f"The field {name!r} needs an admin's key.", code="admin_key_required", param=name)
    previous = _value(fields.get("previous_response_id", msgspec.Raw(b"null")))
    if previous is not None:
        _check_owner(str(previous), caller)


def _check_owner(response_id: str, caller: Caller) -> None:
    if caller.name and not caller.is_admin and owner_of(response_id) != caller.name:
        message = f"No response of yours has the id {response_id[:200]!r}."
        raise ApiError(404, message, code="response_not_found")


def _id_for(caller: Caller, path: str, chosen: object) -> str:
    """An id of this key, with the client's own part if that is plain text, else a random one."""
    is_plain = isinstance(chosen, str) and _CHOSEN_ID.fullmatch(chosen) is not None
    own_id = f"~{caller.name}~{chosen if is_plain else uuid.uuid4().hex}"
    return f"resp_{own_id}" if path == _RESPONSES else own_id  # the only form in which hosts find a response


def _salted(caller: Caller, salt: Any) -> str | list[str]:
    """The client's salt, or those of its batch, made unique to its key."""
    if isinstance(salt, list):
        return [str(_salted(caller, one)) for one in salt]
    return hashlib.sha256(f"{caller.key}/{'' if salt is None else salt}".encode()).hexdigest()
