"""The routes of Ollama's API that its clients need."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from evenflow import __version__
from evenflow.server.api.engine_response import EngineResponse, make_for_model, with_question
from evenflow.server.api.formats import Format
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.ollama.format import OllamaChatFormat, OllamaEmbedFormat, OllamaGenerateFormat, head
from evenflow.server.api.ollama.request import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from evenflow.server.api.request_body import read_body
from evenflow.server.api.service import ModelService
from evenflow.server.errors import ApiError

API_VERSION = "0.13.0"  # of Ollama: clients refuse servers with an API that is older than they need


def ollama_routes(service: ModelService) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.post("/api/chat")
    async def chat(request: Request) -> Response:
        return await _respond(request, service, OllamaChatBody, OllamaChatFormat)

    @routes.post("/api/generate")
    async def generate(request: Request) -> Response:
        return await _respond(request, service, OllamaGenerateBody, OllamaGenerateFormat)

    @routes.post("/api/embed")
    async def embed(request: Request) -> Response:
        return await EngineResponse.to(request, service, OllamaEmbedBody, OllamaEmbedFormat)

    @routes.post("/api/embeddings")
    async def embeddings(request: Request) -> Response:
        return await EngineResponse.to(request, service, OllamaEmbeddingsBody, OllamaEmbedFormat)

    @routes.get("/api/version")
    async def version() -> Response:
        return _json({"version": API_VERSION, "evenflow": __version__})

    @routes.get("/api/tags")
    async def tags() -> Response:
        return _json({"models": [{**_card(name), "modified_at": _started(service)} for name in service.all_names]})

    @routes.get("/api/ps")
    async def loaded() -> Response:
        [chosen] = [one for one in service.served if one.model is service.client.model]
        if chosen.model.intake is None:  # it is being loaded
            return _json({"models": []})
        more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": chosen.limits.max_model_len}
        return _json({"models": [{**_card(name), **more} for name in chosen.model_names]})

    @routes.post("/api/show")
    async def show(request: Request) -> Response:
        body, _ = await read_body(request, service, OllamaShowBody)
        if (asked := body.model or body.name) is None:
            raise ApiError(400, "model: Field required.", param="model")
        return _json(_about(service.serving(asked), asked))

    return routes


async def _respond(request: Request, service: ModelService, kind: Any, form: Any) -> Response:
    def make(chosen: ModelService, body: Any) -> tuple[Format, bytes | None] | dict[str, Any]:
        asks = body.messages if isinstance(body, OllamaChatBody) else body.prompt or body.suffix
        if asks:
            return with_question(form(chosen, body, request.state.caller))
        # A client wants the model to be loaded, as it is now.
        said = {"message": {"role": "assistant", "content": ""}} if kind is OllamaChatBody else {"response": ""}
        return {**head(body.model), **said, "done": True, "done_reason": "load"}

    made, num_bytes, hold = await make_for_model(request, service, kind, make)
    if isinstance(made, dict):
        if hold is not None:
            hold.release()
        return _json(made)
    made_format, question = made
    return EngineResponse(made_format, question, num_bytes, made_format.job.body.streaming, hold)


def _card(name: str) -> dict[str, Any]:
    """Sizes are not known here, and clients only show them."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {"name": name, "model": name, "size": 0, "digest": digest, "details": _details()}


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "evenflow",
        "families": ["evenflow"],
        "parameter_size": "",
        "quantization_level": "",
    }


def _about(service: ModelService, name: str) -> dict[str, Any]:
    template = service.tokenizer.chat_template
    info: dict[str, Any] = {"general.architecture": "evenflow", "general.basename": service.model_name(name)}
    if service.model.intake is not None:  # else it has not been loaded yet
        info["evenflow.context_length"] = service.limits.max_model_len
        info["evenflow.vocab_size"] = service.limits.vocab_size
    embeds = ["embedding"] if service.pooling is not None else []
    capabilities = ["completion", *(["tools"] if template is not None else []), *embeds]
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "license": "",
        "modified_at": _started(service),
        "details": _details(),
        "model_info": info,
        "capabilities": capabilities,
    }


def _started(service: ModelService) -> str:
    return datetime.fromtimestamp(service.started_at, UTC).isoformat().replace("+00:00", "Z")


def _json(content: object) -> Response:
    return Response(encode_json(content), media_type="application/json")
