"""POST /v1/completions: continues prompts given as text or token ids, with optional echo and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import Request
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.model.text.tokenizer import InfillTokens, StreamDecoder
from evenflow.server.access import Caller
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.logprobs import TextOffsets, completion_logprobs
from evenflow.server.api.request_models import CompletionBody, as_batch
from evenflow.server.api.response_size import written_bytes
from evenflow.server.api.response_writer import ResponseWriter
from evenflow.server.api.service import ModelService
from evenflow.server.errors import ApiError

_DEFAULT_MAX_TOKENS = 16


class CompletionWriter(ResponseWriter[CompletionBody]):
    """Writes the response to one completion request, which may hold several prompts."""

    _ID_PREFIX = "cmpl-"
    _DELTA_NAME = b"text"
    _NO_CONTENT = b'""'

    def __init__(self, service: ModelService, body: CompletionBody, caller: Caller) -> None:
        self._prompts = as_batch(body.prompt)
        super().__init__(service, body, caller, "text_completion", num_prompts=len(self._prompts))
        self.grammar = body.grammar
        self._max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self._is_text_changed = body.echo or not self._max_tokens
        self._echoed_prompts: list[str] = []
        self._scored: list[RequestOutput] = []  # the first of each prompt's, of a whole response
        self._prompt_rows: dict[int, object] = {}  # by prompt, for all its choices
        self._text_offsets: dict[int, TextOffsets] = {}
        self._begun: set[int] = set()  # choices whose first event is written: outputs grow meanwhile, and cannot say

    def prepare(self, rendered: str) -> list[Request]:
        body, service = self.body, self._service
        prompts: list[list[int]] = []
        for prompt in self._prompts:
            whole = self._prompt(prompt)
            token_ids = self._truncated(whole, body.max_tokens)
            service.check_length(len(token_ids), body.max_tokens, "prompt")
            prompts.append(token_ids)
            if body.echo:
                text = prompt if isinstance(prompt, str) and token_ids is whole else service.tokenizer.decode(token_ids)
                self._echoed_prompts.append(text)
        self._check_size([len(token_ids) for token_ids in prompts], self._max_tokens)
        requests: list[Request] = []
        for token_ids in prompts:
            requests += self._requests(token_ids, max(self._max_tokens, 1), first_index=len(requests))
        return requests

    def _prompt_bytes(self, num_tokens: int) -> int:
        """Each choice repeats what is asked for."""
        per_token = self._prompt_row_bytes() + self._sizes.token_id * bool(self.body.return_token_ids)
        if self.body.echo:
            per_token += self._token_bytes()
        return num_tokens * per_token * self.body.num_choices

    def _token_bytes(self) -> int:
        row = 0 if self.body.logprobs is None else self._sizes.completion_row(self.body.logprobs)
        return self._sizes.plain + row + self._sizes.token_id * bool(self.body.return_token_ids)

    def _prompt(self, prompt: str | list[int]) -> list[int]:
        if self.body.suffix:
            return self._infill_prompt(prompt, self.body.suffix)
        return self._encode(prompt, "prompt", self.body.add_special_tokens)

    def _infill_prompt(self, prompt: str | list[int], suffix: str) -> list[int]:
        service, tokenizer = self._service, self._service.tokenizer
        if (tokens := InfillTokens.of(tokenizer)) is None:
            message = "suffix: this model was not trained to fill in text before one; leave it out."
            raise ApiError(400, message, param="suffix", code="unsupported_parameter")
        for text in (prompt, suffix):
            if isinstance(text, str):
                service.check_prompt(text, "prompt")
        before = tokenizer.encode_inside(prompt) if isinstance(prompt, str) else prompt
        starts = tokenizer.encode("")[:1] if self.body.add_special_tokens is not False else []
        first = [token for token in starts if token == tokenizer.bos_token_id]
        return first + tokens.prompt(before, tokenizer.encode_inside(suffix))

    def _returned(self, outputs: Sequence[RequestOutput]) -> Sequence[int]:
        """Of each prompt's outputs the likeliest per token, the best first."""
        num_generated, num_returned = self.body.num_choices, self.body.num_returned
        if num_generated == num_returned:
            return super()._returned(outputs)
        prompts = [range(first, first + num_generated) for first in range(0, len(outputs), num_generated)]
        best_first = [sorted(indexes, key=lambda index: -_mean_logprob(outputs[index])) for indexes in prompts]
        return [index for indexes in best_first for index in indexes[:num_returned]]

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        self._scored = list(outputs[:: self.body.num_choices])
        return super().response(outputs, usage)

    def num_completion_tokens(self, output: RequestOutput) -> int:
        return min(len(output.token_ids), self._max_tokens)

    def _content(self, index: int, output: RequestOutput) -> dict[str, Any]:
        content: dict[str, Any] = {"text": self._text(index, output.text, is_first=True)}
        if self.body.prompt_logprobs is not None:
            content["prompt_logprobs"] = self._shared_prompt_logprobs(index, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            content["prompt_token_ids"] = output.prompt_token_ids
        return content

    def _shared_prompt_logprobs(self, index: int, num_top: int) -> object:
        number = index // self.body.num_choices
        if number not in self._prompt_rows:
            self._prompt_rows[number] = self._prompt_logprobs(self._scored[number], num_top, self.body.num_returned)
        return self._prompt_rows[number]

    def event_bytes(self, delta: Delta, rows: LogprobRows) -> int:
        """The first one of an echo has the prompt's too."""
        is_first = len(rows) == len(delta.output.token_ids)
        return written_bytes(rows, delta.output.prompt_logprobs if is_first else None)

    def event(self, index: int, delta: Delta, rows: LogprobRows, usage: bytes) -> bytes:
        event = super().event(index, delta, rows, usage)
        if delta.token_ids:
            self._begun.add(index)
        return event

    def _is_first(self, index: int, delta: Delta) -> bool:
        return bool(delta.token_ids) and index not in self._begun

    def _delta_content(self, index: int, delta: Delta) -> bytes:
        text = delta.text
        if self._is_text_changed:
            text = self._text(index, text, is_first=self._is_first(index, delta))
        return encode_json(text)

    def _token_ids(self, index: int, delta: Delta) -> bytes:
        fields = b',"token_ids":' + encode_json(delta.token_ids if self._max_tokens else ())
        if self._is_first(index, delta):
            fields += b',"prompt_token_ids":' + encode_json(delta.output.prompt_token_ids)
        return fields

    def _text(self, index: int, text: str, is_first: bool) -> str:
        text = text if self._max_tokens else ""
        return self._echoed_prompts[index // self.body.num_choices] + text if self.body.echo and is_first else text

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        return reason if self._max_tokens else "length"

    def _logprobs(
        self, index: int, output: RequestOutput, token_ids: Sequence[int], rows: LogprobRows
    ) -> dict[str, Any]:
        """Of the last output tokens, after the prompt's if it is echoed and they are the first."""
        tokenizer, prompt_ids = self._service.tokenizer, output.prompt_token_ids
        all_ids: list[int] = []
        all_rows = LogprobRows()
        text_offsets: list[int] = []
        if self.body.echo and index not in self._begun:
            scored = self._scored[index // self.body.num_choices] if self._scored else output
            all_ids += prompt_ids
            all_rows.extend(scored.prompt_logprobs or LogprobRows())
            text_offsets += TextOffsets(StreamDecoder(tokenizer)).take(prompt_ids)
        if self._max_tokens:
            all_ids += token_ids
            all_rows.extend(rows)
            if index not in self._text_offsets:
                start = len(self._text(index, "", is_first=True))
                self._text_offsets[index] = TextOffsets(tokenizer.stream_decoder(prompt_ids), start)
            text_offsets += self._text_offsets[index].take(token_ids)
        return completion_logprobs(tokenizer, all_ids, all_rows, self.body.logprobs or 0, text_offsets)


def _mean_logprob(output: RequestOutput) -> float:
    chosen = () if output.logprobs is None else output.logprobs.chosen
    return sum(chosen) / max(1, len(chosen))
