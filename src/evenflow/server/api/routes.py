"""The API's routes; /metrics and the live page have theirs elsewhere."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request, Response

from evenflow import __version__
from evenflow.hosts.policy_file import NO_TARGET
from evenflow.server.access import require_admin
from evenflow.server.api import response_models as models
from evenflow.server.api.chat import ChatFormat
from evenflow.server.api.completions import CompletionFormat
from evenflow.server.api.conversation import encode_rendered, template_question
from evenflow.server.api.embeddings import EmbeddingsBody, EmbeddingsFormat
from evenflow.server.api.engine_response import EngineResponse
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.logprobs import token_text
from evenflow.server.api.openapi import described
from evenflow.server.api.request_body import read_body
from evenflow.server.api.request_models import ChatBody, CompletionBody, DetokenizeBody, TargetBody, TokenizeBody
from evenflow.server.api.service import ModelService, Service
from evenflow.server.engine.supervised import SupervisedEngine
from evenflow.server.errors import ApiError, overloaded

logger = logging.getLogger("evenflow")

BUSY_ERRORS = (404, 429, 503)
GENERATION_ERRORS = (*BUSY_ERRORS, 500)
_MAX_TARGET_BYTES = 1 << 12


def _json(content: object) -> Response:
    return Response(encode_json(content), media_type="application/json")


def generation_routes(service: ModelService) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/v1/completions",
        summary="Continue prompts",
        **described(models.Completion, body=CompletionBody, errors=GENERATION_ERRORS, streams=True),
    )
    async def completions(request: Request) -> Response:
        return await EngineResponse.to(request, service, CompletionBody, CompletionFormat)

    @routes.post(
        "/v1/chat/completions",
        summary="Continue a conversation",
        **described(models.ChatCompletion, body=ChatBody, errors=GENERATION_ERRORS, streams=True),
    )
    async def chat_completions(request: Request) -> Response:
        return await EngineResponse.to(request, service, ChatBody, ChatFormat)

    @routes.post(
        "/v1/embeddings",
        summary="Texts to vectors",
        **described(models.Embeddings, body=EmbeddingsBody, errors=(*GENERATION_ERRORS, 501)),
    )
    async def embeddings(request: Request) -> Response:
        return await EngineResponse.to(request, service, EmbeddingsBody, EmbeddingsFormat)

    @routes.post("/v1/rerank", include_in_schema=False)
    async def rerank() -> Response:
        names = ", ".join(service.all_names)
        reason = "ranking documents needs a model with a score head, which no architecture of this engine has"
        raise ApiError(501, f"{names} cannot do this: {reason}. Use --engine vllm.", code="unsupported_endpoint")

    return routes


def health_routes(service: Service) -> APIRouter:
    """Health and version, for monitors: no key needed."""
    routes = APIRouter()

    @routes.get("/health", summary="Whether the engine is up", **described(models.Status, errors=(503,)))
    async def health() -> Response:
        is_switching = isinstance(service, ModelService) and service.switch.is_switching
        if not (service.client.is_up or service.client.is_warming_up or is_switching):
            raise overloaded("The engine is down; it is being restarted.")
        return _json({"status": "ok"})

    @routes.get("/ready", summary="Whether the server accepts requests", **described(models.Status, errors=(503,)))
    async def ready() -> Response:
        if service.gate.is_draining:
            raise overloaded("The server accepts no requests now: it is shutting down.")
        if isinstance(service, ModelService) and service.switch.is_switching:
            return _json({"status": "ready"})  # requests are accepted, and wait for their model
        if not service.client.is_up:
            raise overloaded(f"The server accepts no requests now: {service.client.failure}.")
        if (stuck := service.client.admission_failure) is not None:
            raise overloaded(f"The server accepts requests but serves none: {stuck}.")
        return _json({"status": "ready"})

    @routes.get("/version", summary="evenflow's version", **described(models.Version))
    async def version() -> Response:
        return _json({"version": __version__})

    return routes


def model_routes(service: ModelService) -> APIRouter:
    """The model and its tokenizer."""
    routes = APIRouter()

    def model_card(name: str) -> dict[str, object]:
        intake = service.serving(name).model.intake
        return {
            "id": name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "evenflow",
            "max_model_len": None if intake is None else intake.limits.max_model_len,
        }

    @routes.get("/v1/models", summary="The served models", **described(models.ModelList))
    async def list_models() -> Response:
        return _json({"object": "list", "data": [model_card(name) for name in service.all_names]})

    @routes.get("/v1/models/{name:path}", summary="One model", **described(models.ModelCard, errors=(404,)))
    async def model(name: str) -> Response:
        return _json(model_card(service.serving(name).model_name(name)))

    @routes.post(
        "/tokenize", summary="Text to tokens", **described(models.Tokens, body=TokenizeBody, errors=BUSY_ERRORS)
    )
    async def tokenize(request: Request) -> Response:
        body, num_bytes = await read_body(request, service, TokenizeBody)
        caller, chosen = request.state.caller, service.serving(body.model)
        with await chosen.hold(caller):
            rendered = await chosen.render(num_bytes, caller.client, _template_question, chosen, body)
            return await chosen.in_turn(caller, num_bytes, _tokenize, chosen, body, rendered)

    @routes.post(
        "/detokenize", summary="Tokens to text", **described(models.PlainText, body=DetokenizeBody, errors=BUSY_ERRORS)
    )
    async def detokenize(request: Request) -> Response:
        body, num_bytes = await read_body(request, service, DetokenizeBody)
        caller, chosen = request.state.caller, service.serving(body.model)
        with await chosen.hold(caller):
            return await chosen.in_turn(caller, num_bytes, _detokenize, chosen, body)

    return routes


def target_routes(service: Service) -> APIRouter:
    """The latency target, which can be changed while the server runs."""
    routes = APIRouter()
    client = service.client

    @routes.get("/v1/target", summary="The latency target", **described(models.CurrentTarget))
    async def get_target() -> Response:
        return _json(_target(client))

    @routes.put(
        "/v1/target",
        summary="Change the latency target",
        **described(models.CurrentTarget, body=TargetBody, errors=(403,)),
    )
    async def put_target(request: Request) -> Response:
        require_admin(request.state.caller)
        body, _ = await read_body(request, service, TargetBody, _MAX_TARGET_BYTES)
        client.set_target(body.tbt_target, body.paced)
        logger.info("The policy is now %s.", client.policy or NO_TARGET)
        return _json(_target(client))

    return routes


def _target(client: SupervisedEngine) -> dict[str, object]:
    policy = client.policy
    return {
        "policy": NO_TARGET if policy is None else str(policy),
        "tbt_target": None if policy is None else policy.target,
        "paced": policy is not None and policy.target is not None and policy.is_paced,
        "feasible_target": client.feasible_target_s,
    }


def _template_question(service: ModelService, body: TokenizeBody) -> bytes | None:
    if body.messages is None:
        return None
    tools = [tool.for_template() for tool in body.tools or ()] or None
    return template_question(service, body, body.messages, tools)


def _tokenize(service: ModelService, body: TokenizeBody, rendered: str) -> Response:
    tokenizer, max_model_len = service.tokenizer, service.limits.max_model_len
    if body.messages is not None:
        tokens = encode_rendered(service, rendered)
    else:
        assert body.prompt is not None
        service.check_prompt(body.prompt, "prompt")
        tokens = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    response: dict[str, object] = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
    if body.return_token_strs:
        response["token_strs"] = [token_text(tokenizer, token) for token in tokens]
    return _json(response)


def _detokenize(service: ModelService, body: DetokenizeBody) -> Response:
    vocab_size = service.limits.vocab_size
    for token in body.tokens:
        if token >= vocab_size:
            raise ApiError(400, f"Got token id {token} but the vocabulary has ids 0 to {vocab_size - 1}.")
    return _json({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})
