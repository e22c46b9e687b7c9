"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from evenflow.server.access import Caller
from evenflow.server.api.conversation import Conversation, encode_rendered
from evenflow.server.api.engine_response import EngineResponse
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.messages import models
from evenflow.server.api.messages.chat_request import as_chat
from evenflow.server.api.messages.format import MessagesFormat
from evenflow.server.api.messages.request import CountTokensBody, MessagesBody
from evenflow.server.api.openapi import described
from evenflow.server.api.request_body import read_body
from evenflow.server.api.routes import BUSY_ERRORS
from evenflow.server.api.service import ModelService
from evenflow.server.error_shapes import MESSAGES_PATH, new_request_id


def messages_routes(service: ModelService, *, needs_key: bool) -> APIRouter:
    routes = APIRouter()
    errors = (*BUSY_ERRORS, 401) if needs_key else BUSY_ERRORS

    @routes.post(
        MESSAGES_PATH,
        summary="Continue a conversation, in the form of Anthropic's API",
        **described(
            models.Message,
            body=MessagesBody,
            errors=(*errors, 500),
            streams=True,
            error_body=models.MessageErrorBody,
        ),
    )
    async def messages(request: Request) -> Response:
        return await EngineResponse.to(request, service, MessagesBody, MessagesFormat)

    @routes.post(
        MESSAGES_PATH + "/count_tokens",
        summary="Count the tokens of a conversation",
        **described(models.InputTokens, body=CountTokensBody, errors=errors, error_body=models.MessageErrorBody),
    )
    async def count_tokens(request: Request) -> Response:
        body, num_bytes = await read_body(request, service, CountTokensBody)
        caller, chosen = request.state.caller, service.serving(body.model)
        with await chosen.hold(caller):
            rendered = await chosen.render(num_bytes, caller.client, _question, chosen, body, caller)
            tokens = await chosen.in_turn(caller, num_bytes, encode_rendered, chosen, rendered)
        content, headers = encode_json({"input_tokens": len(tokens)}), {"request-id": new_request_id()}
        return Response(content, headers=headers, media_type="application/json")

    return routes


def _question(service: ModelService, body: CountTokensBody, caller: Caller) -> bytes:
    """The one that a message with this body would ask the template renderer."""
    return Conversation(service, as_chat(body), caller, id_prefix="msg_").template_question()
