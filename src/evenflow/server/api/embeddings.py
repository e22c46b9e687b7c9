"""POST /v1/embeddings: texts to vectors, by pooling what the model's last layer gives for a prompt.

A prompt is prefilled in chunks like any other, so embeddings delay no stream's next token beyond the target.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Sequence
from math import hypot
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from evenflow.core.request import SamplingParams
from evenflow.engine.outputs import RequestOutput
from evenflow.server.access import Caller
from evenflow.server.api.job import Job
from evenflow.server.api.json_pieces import Rows, encode_json
from evenflow.server.api.request_models import MAX_INT, EngineBody, Text, TokenIds, as_batch
from evenflow.server.api.service import ModelService
from evenflow.server.engine.served_engine import Prepared
from evenflow.server.errors import ApiError

MAX_INPUTS = 2048  # as with OpenAI
# The most that a number takes in a response.
_TEXT_BYTES = 24
_BASE64_BYTES = 6
MANY = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)


class EmbeddingsBody(EngineBody):
    """POST /v1/embeddings"""

    input: Text | TokenIds | Annotated[list[Text], MANY] | Annotated[list[TokenIds], MANY] = Field(
        description="Text or token ids; a list of either is a batch."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: little-endian 32-bit floats. By default a list of numbers."
    )
    dimensions: int | None = Field(
        None, ge=1, le=MAX_INT, description="Keep the first ones, at unit length. For models trained for it."
    )
    add_special_tokens: bool | None = Field(None, description="Add the model's special tokens to text.")


class EmbeddingsFormat:
    """The embeddings of one request's inputs."""

    def __init__(self, service: ModelService, body: EmbeddingsBody, caller: Caller) -> None:
        if service.pooling is None:
            advice = "Start it with --pooling last or --pooling mean, as the model was trained"
            raise ApiError(501, f"This server gives no embeddings. {advice}.", code="pooling_required")
        self._body = body
        self._prompts = as_batch(body.input)
        # A long batch runs part by part: it must not need more room than its caller ever has.
        most = min(service.gate.limits.max_n, service.gate.max_tenant_running)
        self.job = Job(service, body, caller, id_prefix="embd-", num_choices=min(len(self._prompts), most))
        self._sampling = SamplingParams(max_tokens=1, temperature=0.0, pooling=service.pooling, **body.targets)

    def template_question(self) -> None:
        """No template is used."""

    def prepare(self, rendered: str) -> list[Prepared]:
        requests = []
        for index, prompt in enumerate(self._prompts):
            token_ids = self.job.encode(prompt, "input", self._body.add_special_tokens)
            token_ids = self.job.truncated(token_ids, 1)
            self.job.service.check_length(len(token_ids), None, "input")
            requests.append(self.job.request(token_ids, self._sampling, index if len(self._prompts) > 1 else None))
        return requests

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        is_text = self._body.encoding_format != "base64"
        encode = as_numbers if is_text else _as_base64
        data = Rows(
            list(enumerate(self.vectors(outputs))),
            lambda one: {"object": "embedding", "index": one[0], "embedding": encode(one[1])},
        )
        counts = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]}
        return {"object": "list", "data": data, "model": self.job.model, "usage": counts}

    def vectors(self, outputs: Sequence[RequestOutput]) -> list[array[float]]:
        """One for each input; refused if they are too large a response."""
        embeddings = [self._embedding(output) for output in outputs]
        is_text = self._body.encoding_format != "base64"
        size = sum(map(len, embeddings)) * (_TEXT_BYTES if is_text else _BASE64_BYTES)
        allowed = self.job.service.gate.limits.max_response_size
        if size > allowed:  # no setting says how many numbers the model gives
            advice = "send fewer inputs" + ", or set encoding_format to base64" * is_text
            message = f"The response may take {size} bytes but this server allows {allowed}: {advice}."
            raise ApiError(400, message, code="response_too_large", param="input")
        return embeddings

    def _embedding(self, output: RequestOutput) -> array[float]:
        assert output.embedding is not None, "the engine pools what it is asked to"
        dimensions = self._body.dimensions
        return output.embedding if dimensions is None else _shortened(output.embedding, dimensions)


def _shortened(values: array[float], dimensions: int) -> array[float]:
    if dimensions > len(values):
        message = f"Got dimensions={dimensions} but this model's embeddings have {len(values)}."
        raise ApiError(400, message, param="dimensions")
    kept = values[:dimensions]
    length = hypot(*kept) or 1.0
    return array("f", [value / length for value in kept])


def _as_base64(values: array[float]) -> str:
    return b64encode(values.tobytes()).decode()


def as_numbers(values: array[float]) -> msgspec.Raw:
    """Written at once: as Python's numbers, those of a large batch would take eight times the memory."""
    return msgspec.Raw(encode_json(values.tolist()))
