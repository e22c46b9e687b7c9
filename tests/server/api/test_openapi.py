"""/openapi.json is true: what is answered is as it says, and so is what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from threading import get_ident
from typing import Any

import pytest
from pydantic import BaseModel

from evenflow.server.api import openapi
from evenflow.server.api import response_models as models
from evenflow.server.api.messages.models import InputTokens, Message, MessageErrorBody
from evenflow.server.api.responses.models import ResponseObject
from tests.server.serving import RunningServer, scripted_server

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(policy="target:50ms") as running:
        yield running


def test_the_document_is_made_once_and_beside_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the event loop made it, in a second, and wrote its 100 kB anew for anyone who asked."""
    makers, written = [], []
    make, write = openapi.get_openapi, openapi.encode_json
    monkeypatch.setattr(openapi, "get_openapi", lambda **options: makers.append(get_ident()) or make(**options))
    monkeypatch.setattr(openapi, "encode_json", lambda value: written.append(get_ident()) or write(value))
    with scripted_server() as server:
        for _ in range(3):
            assert server.get("/openapi.json").status_code == 200
        assert server.post("/health").headers["Allow"] == "GET"
    assert len(makers) == len(written) == 1
    assert makers != written, "on a thread of its own"


RESPONSES: list[tuple[str, str, Any, type[BaseModel]]] = [
    ("post", "/v1/completions", {"prompt": "a", "max_tokens": 3}, models.Completion),
    ("post", "/v1/completions", {"prompt": "a", "max_tokens": 3, "logprobs": 2}, models.Completion),
    ("post", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}, models.ChatCompletion),
    (
        "post",
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 1},
        models.ChatCompletion,
    ),
    ("post", "/v1/messages", {"model": "a-model", "messages": MESSAGES, "max_tokens": 3}, Message),
    ("post", "/v1/messages", {"messages": MESSAGES}, MessageErrorBody),
    ("post", "/v1/messages/count_tokens", {"model": "a-model", "messages": MESSAGES}, InputTokens),
    ("post", "/v1/messages/count_tokens", {"model": "other", "messages": MESSAGES}, MessageErrorBody),
    ("post", "/v1/responses", {"input": "a", "max_output_tokens": 3}, ResponseObject),
    ("post", "/tokenize", {"prompt": "a"}, models.Tokens),
    ("post", "/tokenize", {"messages": MESSAGES, "return_token_strs": True}, models.Tokens),
    ("post", "/detokenize", {"tokens": [70, 71]}, models.PlainText),
    ("get", "/v1/models", None, models.ModelList),
    ("get", "/v1/models/another-name", None, models.ModelCard),
    ("get", "/v1/target", None, models.CurrentTarget),
    ("put", "/v1/target", {"tbt_target": 0.06}, models.CurrentTarget),
    ("get", "/health", None, models.Status),
    ("get", "/ready", None, models.Status),
    ("get", "/version", None, models.Version),
    ("put", "/v1/target", {"tbt_target": 0}, models.ErrorBody),
    ("get", "/v1/models/other", None, models.ErrorBody),
    ("get", "/v1/requests/other/chunks", None, models.ErrorBody),
]


@pytest.mark.parametrize(("method", "path", "body", "model"), RESPONSES)
def test_responses_are_as_described(
    server: RunningServer, method: str, path: str, body: Any, model: type[BaseModel]
) -> None:
    response = server.request(method, path, body)
    model.model_validate_json(response.content, strict=True)
    documented = server.get("/openapi.json").json()["paths"]
    template = "/v1/models/{name}" if path.startswith("/v1/models/") else path
    template = "/v1/requests/{request_id}/chunks" if path.startswith("/v1/requests/") else template
    told = documented[template][method]["responses"][str(response.status_code)]
    schema = told["content"]["application/json"]["schema"]
    assert schema == {"$ref": f"#/components/schemas/{model.__name__}"}


def test_chunks_are_as_described(server: RunningServer) -> None:
    response_id = server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).json()["id"]
    found = server.get(f"/v1/requests/{response_id}/chunks")
    assert models.RequestChunks.model_validate_json(found.content, strict=True).requests[0].chunks


def test_every_reference_has_its_schema_and_bodies_are_strict(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    text = str(document)
    names = {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= schemas.keys()
    assert schemas["ChatBody"]["additionalProperties"] is False
    assert {"messages"} == set(schemas["ChatBody"]["required"])
    assert "422" not in text
    assert schemas["ResponsesBody"]["additionalProperties"] is False
    assert {"input"} == set(schemas["ResponsesBody"]["required"])
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        told = document["paths"][path]["post"]
        assert told["responses"].keys() == {"200", "400", "404", "413", "415", "429", "500", "503"}
        assert "text/event-stream" in told["responses"]["200"]["content"]


def test_tokens_and_text_are_there_and_back(server: RunningServer) -> None:
    text = "Grüße, 世界! <|im_start|>"
    tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    with_start = server.post("/tokenize", {"prompt": text}).json()
    assert with_start["tokens"] == [1, *tokens]
    assert with_start["count"] == len(tokens) + 1


def test_a_changed_target_is_kept(server: RunningServer) -> None:
    told = server.request("put", "/v1/target", {"tbt_target": "70ms", "paced": True}).json()
    assert told == {"policy": "target:70ms,paced", "tbt_target": 0.07, "paced": True, "feasible_target": None}
    assert server.get("/v1/target").json() == told
    assert server.post("/v1/completions", {"prompt": "a", "tbt_target": "20ms", "ttft_target": 1.5}).status_code == 200
    told = server.request("put", "/v1/target", {"tbt_target": "2.5ms"}).json()
    assert told == {"policy": "target:2.5ms,paced", "tbt_target": 0.0025, "paced": True, "feasible_target": None}


def test_a_target_can_be_taken_back(server: RunningServer) -> None:
    before = server.get("/v1/target").json()
    server.request("put", "/v1/target", {"tbt_target": "70ms"})
    told = server.request("put", "/v1/target", {"tbt_target": None}).json()
    assert (told["tbt_target"], told["paced"]) == (None, False)
    assert not told["policy"].startswith("target")
    assert server.get("/v1/target").json() == told
    refused = server.post("/v1/completions", {"prompt": "a", "tbt_target": "20ms"})
    assert refused.status_code == 400
    if before["tbt_target"] is not None:
        server.request("put", "/v1/target", {"tbt_target": before["tbt_target"], "paced": before["paced"]})
