"""POST /v1/completions: prompts as text or token ids, answers as text, with echo and logprobs.

Must not know: how answers reach the client.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evenflow.core.plan import RowLogprobs
from evenflow.core.request import Request
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.server.api.generation_response import encode_json, event_of, new_id
from evenflow.server.api.logprobs import completion_logprobs, prompt_logprobs
from evenflow.server.api.request_models import CompletionBody, StreamOptions
from evenflow.server.api.service import Service

_DEFAULT_MAX_TOKENS = 16


class CompletionFormat:
    """One request to /v1/completions."""

    def __init__(self, service: Service, body: CompletionBody, salt: str) -> None:
        self._service = service
        self._body = body
        self._salt = salt
        self._prompts = _as_batch(body.prompt)
        service.gate.check_num_answers(self.num_answers)
        self._max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self._id = new_id("cmpl")
        self._head = {
            "id": self._id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name(body.model),
        }
        # All of an event up to its text is the same for every token of an answer.
        head = encode_json(self._head)[:-1]
        self._event_starts = [
            b"data: " + head + b',"choices":[{"index":%d,"text":' % index for index in range(self.num_answers)
        ]
        self._prompt_texts: dict[int, str] = {}  # by answer, where they are echoed
        self._text_offsets = [0] * self.num_answers

    @property
    def num_answers(self) -> int:
        return len(self._prompts) * self._body.num_answers

    @property
    def num_answers_per_prompt(self) -> int:
        return self._body.num_answers

    @property
    def stream_options(self) -> StreamOptions | None:
        return self._body.streaming

    def prepare(self) -> list[Request]:
        body, service = self._body, self._service
        requests: list[Request] = []
        for prompt in self._prompts:
            token_ids = self._encode(prompt)
            service.check_length(len(token_ids), body.max_tokens, "prompt")
            for _ in range(body.num_answers):
                index = len(requests)
                sampling = body.sampling(
                    max_tokens=max(self._max_tokens, 1), index=index, logprobs=body.logprobs, grammar=body.grammar
                )
                if body.echo and body.logprobs is not None:
                    sampling = replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
                request_id = self._id if self.num_answers == 1 else f"{self._id}-{index}"
                requests.append(service.client.prepare(token_ids, sampling, request_id=request_id, tenant=self._salt))
                if body.echo:
                    text = prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt)
                    self._prompt_texts[index] = text
        return requests

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._service.tokenizer.encode(prompt, add_special_tokens=self._body.add_special_tokens is not False)
        return prompt

    # ---- whole ----

    def num_completion_tokens(self, output: RequestOutput) -> int:
        return min(len(output.token_ids), self._max_tokens)

    def whole(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            answer = output.text if self._max_tokens else ""
            choice: dict[str, Any] = {
                "index": index,
                "text": self._prompt_texts.get(index, "") + answer,
                "logprobs": self._logprobs(index, output, output.logprobs or [], output.token_ids),
                "finish_reason": output.finish_reason if self._max_tokens else "length",
            }
            if self._body.prompt_logprobs is not None:
                rows = output.prompt_logprobs or []
                choice["prompt_logprobs"] = prompt_logprobs(self._service.tokenizer, rows, self._body.prompt_logprobs)
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": usage}

    def _logprobs(
        self, index: int, output: RequestOutput, rows: Sequence[RowLogprobs], token_ids: Sequence[int]
    ) -> dict[str, Any] | None:
        """Of these output tokens, behind the prompt's where it is echoed and they are the first."""
        if self._body.logprobs is None:
            return None
        all_ids, all_rows = list(token_ids), list[RowLogprobs | None](rows)
        if not self._max_tokens:
            all_ids, all_rows = [], []
        is_first = len(token_ids) == len(output.token_ids)
        if self._body.echo and is_first:
            all_ids = [*output.prompt_token_ids, *all_ids]
            all_rows = [None, *(output.prompt_logprobs or []), *all_rows]
        found = completion_logprobs(
            self._service.tokenizer, all_ids, all_rows, self._body.logprobs, self._text_offsets[index]
        )
        self._text_offsets[index] += sum(map(len, found["tokens"]))
        return found

    # ---- as events ----

    def opening(self, index: int) -> bytes:
        return b""

    def event(self, index: int, delta: Delta, usage: bytes) -> bytes:
        output = delta.output
        text = delta.text if self._max_tokens else ""
        if delta.token_ids and len(delta.token_ids) == len(output.token_ids):
            text = self._prompt_texts.get(index, "") + text
        logprobs = b"null"
        if self._body.logprobs is not None and delta.token_ids:
            rows = (output.logprobs or [])[-len(delta.token_ids) :]
            logprobs = encode_json(self._logprobs(index, output, rows, delta.token_ids))
        elif not text and usage in (b"", b"null") and delta.finish_reason is None:
            return b""
        reason = delta.finish_reason if self._max_tokens or delta.finish_reason is None else "length"
        return b"".join(
            (
                self._event_starts[index],
                encode_json(text),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                encode_json(reason),
                b'}],"usage":' + usage + b"}\n\n" if usage else b"}]}\n\n",
            )
        )

    def usage_event(self, usage: bytes) -> bytes:
        return event_of(encode_json(self._head)[:-1] + b',"choices":[],"usage":' + usage + b"}")


def _as_batch(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
