"""POST /v1/embeddings: OpenAI's client and shapes, against what the model itself computes."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from evenflow.model.loader import load_model
from evenflow.server.api.response_models import Embeddings
from tests.models import reference_model, tiny_llama
from tests.server.serving import MODEL, RunningServer, model_server, scripted_server

PATH = "/v1/embeddings"
HIDDEN_SIZE = 64
TEXT = "the end of it"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    served = {"pooling": "mean", "limits": {"max_n": 8, "max_waiting": 2, "max_tenant_requests": 5}}
    with model_server(str(tiny_llama()), served=served, policy="fixed:16", max_num_seqs=6) as running:
        yield running


def embed(server: RunningServer, asked: Any, **fields: Any) -> list[Any]:
    response = server.post(PATH, {"input": asked, **fields})
    assert response.status_code == 200, response.text
    Embeddings.model_validate_json(response.content, strict=True)
    data = response.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


def expected(prompt: list[int]) -> list[float]:
    with torch.inference_mode():
        pooled = reference_model("LlamaForCausalLM").model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
    vector: list[float] = (pooled / pooled.norm()).tolist()
    return vector


def assert_close(one: list[float], other: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_texts_and_ids_give_the_models_own_vectors(server: RunningServer) -> None:
    ids = load_model(str(tiny_llama())).tokenizer.encode(TEXT)
    long = [1, *range(5, 205)]
    for asked, prompts in ((TEXT, [ids]), (ids, [ids]), ([TEXT, "the"], [ids, None]), ([ids, long], [ids, long])):
        for found, prompt in zip(embed(server, asked), prompts, strict=True):
            if prompt is not None:
                assert_close(found, expected(prompt))


def test_openais_client_reads_them(server: RunningServer) -> None:
    """By default it asks for base64, and decodes that."""
    answer = server.openai().embeddings.create(model=MODEL, input=[TEXT, "the"], encoding_format="float")
    assert_close(answer.data[0].embedding, embed(server, TEXT)[0])
    decoded = server.openai().embeddings.create(model=MODEL, input=TEXT).data[0].embedding
    assert_close(decoded, answer.data[0].embedding)


def test_ollamas_routes_give_the_same_vectors(server: RunningServer) -> None:
    both = server.post("/api/embed", {"model": MODEL, "input": [TEXT, "the"], "keep_alive": "5m"}).json()
    for found, wanted in zip(both["embeddings"], embed(server, [TEXT, "the"]), strict=True):
        assert_close(found, wanted)
    assert both["model"] == MODEL
    assert both["prompt_eval_count"] == server.post(PATH, {"input": [TEXT, "the"]}).json()["usage"]["prompt_tokens"]
    assert both["total_duration"] > 0
    [one] = server.post("/api/embed", {"model": MODEL, "input": TEXT, "dimensions": 8}).json()["embeddings"]
    assert_close(one, embed(server, TEXT, dimensions=8)[0])
    older = server.post("/api/embeddings", {"model": f"{MODEL}:latest", "prompt": TEXT}).json()
    assert list(older) == ["embedding"]
    assert_close(older["embedding"], embed(server, TEXT)[0])
    long = {"model": MODEL, "input": TEXT * 100}
    assert server.post("/api/embed", long).status_code == 200  # its last tokens
    refused = server.post("/api/embed", {**long, "truncate": False})
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
    assert "embedding" in server.post("/api/show", {"model": MODEL}).json()["capabilities"]


def test_usage_counts_the_inputs(server: RunningServer) -> None:
    usage = server.post(PATH, {"input": [[5, 6, 7], [8]]}).json()["usage"]
    assert usage == {"prompt_tokens": 4, "total_tokens": 4}


def test_base64_holds_the_same_floats(server: RunningServer) -> None:
    [plain] = embed(server, TEXT)
    [encoded] = embed(server, TEXT, encoding_format="base64")
    assert array("f", base64.b64decode(encoded)).tolist() == plain


def test_fewer_dimensions_are_the_first_ones_at_unit_length(server: RunningServer) -> None:
    [plain] = embed(server, TEXT)
    [short] = embed(server, TEXT, dimensions=10)
    length = math.hypot(*plain[:10])
    assert_close(short, [value / length for value in plain[:10]])
    assert math.isclose(math.hypot(*short), 1, rel_tol=1e-6)
    assert len(embed(server, TEXT, dimensions=HIDDEN_SIZE)[0]) == HIDDEN_SIZE


def test_a_batch_may_be_larger_than_the_queue(server: RunningServer) -> None:
    """Five requests of one caller may run or wait: a batch of more runs part by part."""
    batch = [[index, index + 1] for index in range(3, 33)]
    found = embed(server, batch)
    assert len(found) == 30
    assert_close(found[29], expected(batch[29]))


def test_a_client_that_leaves_ends_its_batch(server: RunningServer) -> None:
    """Also the parts of it that have not begun."""

    def num_prompt_tokens() -> float:
        lines = server.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prompt_tokens_total{"))

    before, batch = num_prompt_tokens(), [[index, *range(5, 205)] for index in range(210, 410)]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{PATH}", json={"input": batch}, timeout=httpx.Timeout(30, read=0.2))
    server.until(lambda: not server.client.num_open and not server.server.service.gate.num_inside)
    assert num_prompt_tokens() - before < sum(map(len, batch))


def test_a_response_is_bounded(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = server.server.service.gate
    monkeypatch.setattr(gate, "limits", replace(gate.limits, max_response_size=2 * HIDDEN_SIZE * 24))
    response = server.post(PATH, {"input": [[5], [6], [7]]})
    assert response.status_code == 400
    assert "may take 4608 bytes but this server allows 3072: send fewer" in response.json()["error"]["message"]
    response = server.post(PATH, {"input": [[5]] * 9, "encoding_format": "base64"})
    assert response.json()["error"]["code"] == "response_too_large"
    assert len(embed(server, [[5], [6]])) == 2
    assert len(embed(server, [[5], [6], [7]], encoding_format="base64")) == 3
    assert len(embed(server, [[5], [6], [7]], dimensions=40)) == 3


def test_a_long_input_may_be_truncated(server: RunningServer) -> None:
    long = [1, *range(5, 405)]
    refused = server.post(PATH, {"input": long})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    [found] = embed(server, long, truncate_prompt_tokens=-1)
    assert_close(found, expected([1, *long[-254:]]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": ""}, "input: String should have at least 1 character"),
        ({"input": []}, "input"),
        ({"input": ["a", [5]]}, "input"),
        ({"input": [600]}, "token id 600"),
        ({"input": TEXT, "dimensions": 65}, "Got dimensions=65 but this model's embeddings have 64"),
        ({"input": TEXT, "encoding_format": "int8"}, "encoding_format: got 'int8' but expected 'float' or 'base64'"),
        ({"input": TEXT, "temperature": 0}, "Unknown field: temperature"),
        ({"input": ["a"] * 2049}, "at most 2048"),
    ],
)
def test_wrong_requests_are_refused_by_name(server: RunningServer, fields: dict[str, Any], message: str) -> None:
    response = server.post(PATH, fields)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_a_server_without_pooling_says_how_to_start_it() -> None:
    with scripted_server() as running:
        response = running.post(PATH, {"input": TEXT})
        assert response.status_code == 501
        assert "--pooling last" in response.json()["error"]["message"]
        ranked = running.post("/v1/rerank", {"query": "a", "documents": ["b"]})
        assert ranked.status_code == 501
        assert "score head" in ranked.json()["error"]["message"]
