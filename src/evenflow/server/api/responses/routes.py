"""The routes of the Responses API: make a response, and read or delete a stored one."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from evenflow.server.access import Caller
from evenflow.server.api.engine_response import EngineResponse, make_loaded, with_question
from evenflow.server.api.formats import Format
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.openapi import described
from evenflow.server.api.request_body import read_body
from evenflow.server.api.responses.format import ResponsesFormat
from evenflow.server.api.responses.models import DeletedResponse, InputItemList, ResponseObject
from evenflow.server.api.responses.request import ResponsesBody
from evenflow.server.api.responses.store import ResponseStore, StoredResponse
from evenflow.server.api.routes import GENERATION_ERRORS
from evenflow.server.api.service import ModelService
from evenflow.server.errors import ApiError

MAX_LISTED = 100  # input items of one page
_WHY_NOT = "it is not yours, was not stored, was deleted, or later ones took its place"


def responses_routes(service: ModelService, store: ResponseStore | None = None) -> APIRouter:
    routes = APIRouter()
    store = ResponseStore() if store is None else store
    work = service.large_work

    @routes.post(
        "/v1/responses",
        summary="Answer, as OpenAI's Responses API does",
        **described(ResponseObject, body=ResponsesBody, errors=GENERATION_ERRORS, streams=True),
    )
    async def create_response(request: Request) -> Response:
        body, num_bytes = await read_body(request, service, ResponsesBody)
        caller, chosen = request.state.caller, service.serving(body.model)
        previous = _previous(store, body, caller)
        if previous is not None:
            num_bytes += previous.num_bytes

        def make_format() -> tuple[Format, bytes | None]:
            return with_question(ResponsesFormat(chosen, store, body, previous, caller))

        (form, question), hold = await make_loaded(chosen, caller, num_bytes, make_format)
        return EngineResponse(form, question, num_bytes, form.job.body.streaming, hold)

    @routes.get(
        "/v1/responses/{response_id}", summary="A stored response", **described(ResponseObject, errors=(400, 404))
    )
    async def get_response(response_id: str, request: Request, stream: str = "false") -> Response:
        found = _stored(store, response_id, request.state.caller)
        if stream == "true":
            raise ApiError(400, "stream: a stored response is returned whole; leave it out.", param="stream")
        return Response(found.response, media_type="application/json")

    @routes.delete(
        "/v1/responses/{response_id}", summary="Delete a stored response", **described(DeletedResponse, errors=(404,))
    )
    async def delete_response(response_id: str, request: Request) -> Response:
        _stored(store, response_id, request.state.caller)
        store.remove(response_id)
        content = encode_json({"id": response_id, "object": "response", "deleted": True})
        return Response(content, media_type="application/json")

    @routes.get(
        "/v1/responses/{response_id}/input_items",
        summary="What a stored response answers",
        **described(InputItemList, errors=(400, 404)),
    )
    async def list_input_items(
        response_id: str, request: Request, limit: str = "20", order: str = "desc", after: str | None = None
    ) -> Response:
        caller = request.state.caller
        found = _stored(store, response_id, caller)
        content = await work.run(found.num_bytes, caller.client, _page, found.input_items, limit, order, after)
        return Response(content, media_type="application/json")

    return routes


def _page(input_items: bytes, limit: str, order: str, after: str | None) -> bytes:
    """One page of a list. Values are text: the framework would refuse others in its own words."""
    if order not in ("asc", "desc"):
        raise ApiError(400, f"Got order={order!r} but expected 'asc' or 'desc'.", param="order")
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LISTED):
        raise ApiError(400, f"Got limit={limit!r} but expected 1 to {MAX_LISTED}.", param="limit")
    items: list[dict[str, Any]] = msgspec.json.decode(input_items)
    if order == "desc":
        items.reverse()
    if after is not None:
        at = next((at for at, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise ApiError(400, f"Got after={after!r} but no item has that id.", param="after")
        items = items[at + 1 :]
    page = items[: int(limit)]
    ids = [page[0]["id"], page[-1]["id"]] if page else [None, None]
    found = {"object": "list", "data": page, "first_id": ids[0], "last_id": ids[1], "has_more": len(page) < len(items)}
    return encode_json(found)


def _stored(store: ResponseStore, response_id: str, caller: Caller) -> StoredResponse:
    found = store.find(response_id, caller)
    if found is None:
        message = f"No response with the id {response_id!r} is stored: {_WHY_NOT}."
        raise ApiError(404, message, code="response_not_found", param="response_id")
    return found


def _previous(store: ResponseStore, body: ResponsesBody, caller: Caller) -> StoredResponse | None:
    """The response that a request continues, which must be of its own tenant."""
    wanted = body.previous_response_id
    if wanted is None:
        return None
    found = store.find(wanted, caller)
    if found is None or found.tenant != (body.tenant or ""):
        message = f"Previous response with id {wanted!r} not found: {_WHY_NOT}. Send the whole conversation as input."
        raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
    return found
