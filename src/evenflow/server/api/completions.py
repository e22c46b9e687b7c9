"""POST /v1/completions: continues prompts given as text or token ids, with optional echo and logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from evenflow.core.logprobs import LogprobRows
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.model.text.tokenizer import InfillTokens, StreamDecoder
from evenflow.server.access import Caller
from evenflow.server.api.choices import Choices
from evenflow.server.api.formats import failed_stream
from evenflow.server.api.job import Job, ResponseSize
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.logprobs import TextOffsets, completion_logprobs, prompt_logprobs
from evenflow.server.api.request_models import CompletionBody, as_batch
from evenflow.server.api.service import ModelService
from evenflow.server.engine.served_engine import Prepared
from evenflow.server.errors import ApiError

_DEFAULT_MAX_TOKENS = 16


class CompletionFormat:
    """One completion request, which may hold several prompts."""

    failure_events = staticmethod(failed_stream)

    def __init__(self, service: ModelService, body: CompletionBody, caller: Caller) -> None:
        self._prompts = as_batch(body.prompt)
        self.job = Job.of_choices(service, body, caller, id_prefix="cmpl-", num_prompts=len(self._prompts))
        self.job.grammar = body.grammar
        self._body = body
        self._skips_special = body.skip_special_tokens is not False
        self._tokenizer = service.tokenizer
        self._choices = Choices(self.job, "text_completion", b"text", b'""')
        self.last_events = self._choices.last_events
        self._max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self.job.shows_output = self._max_tokens > 0
        self._is_plain = not (body.echo or body.return_token_ids or body.logprobs is not None) and self._max_tokens > 0
        self._echoed_prompts: list[str] = []
        self._scored: list[RequestOutput] = []  # the first of each prompt's, of a whole response
        self._text_offsets: dict[int, TextOffsets] = {}
        self._begun: set[int] = set()  # choices whose first event is written: outputs grow meanwhile, and cannot say

    # ---- the prompts ----

    def template_question(self) -> None:
        """No template is used."""

    def prepare(self, rendered: str) -> list[Prepared]:
        body, service = self._body, self.job.service
        prompts: list[list[int]] = []
        for prompt in self._prompts:
            whole = self._prompt(prompt)
            token_ids = self.job.truncated(whole, body.max_tokens)
            service.check_length(len(token_ids), body.max_tokens, "prompt")
            prompts.append(token_ids)
            if body.echo:
                text = prompt if isinstance(prompt, str) and token_ids is whole else self._decoded(token_ids)
                self._echoed_prompts.append(text)
        self._size().check(sum(map(len, prompts)), self._max_tokens)
        requests: list[Prepared] = []
        for token_ids in prompts:
            requests += self.job.requests(body, token_ids, max(self._max_tokens, 1), first_index=len(requests))
        return requests

    def _decoded(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def _size(self) -> ResponseSize:
        """Each choice repeats what is asked for of its prompt."""
        body, sizes = self._body, self.job.service.token_sizes
        token_id = sizes.token_id * bool(body.return_token_ids)
        per_token = sizes.plain + sizes.completion_row(body.logprobs) + token_id
        prompt_row = sizes.prompt_row(body.prompt_logprobs, self.job.service.limits.vocab_size)
        per_prompt_token = prompt_row + token_id + per_token * bool(body.echo)
        per_step = 0 if body.stream else self.job.num_choices * per_token
        return ResponseSize(self.job, per_prompt_token=per_prompt_token * body.num_choices, per_step=per_step)

    def _prompt(self, prompt: str | list[int]) -> list[int]:
        if self._body.suffix:
            return self._infill_prompt(prompt, self._body.suffix)
        return self.job.encode(prompt, "prompt", self._body.add_special_tokens)

    def _infill_prompt(self, prompt: str | list[int], suffix: str) -> list[int]:
        tokenizer = self._tokenizer
        if (tokens := InfillTokens.of(tokenizer)) is None:
            message = "suffix: this model was not trained to fill in text before one; leave it out."
            raise ApiError(400, message, param="suffix", code="unsupported_parameter")
        for text in (prompt, suffix):
            if isinstance(text, str):
                self.job.service.check_prompt(text, "prompt")
        before = tokenizer.encode_inside(prompt) if isinstance(prompt, str) else prompt
        starts = tokenizer.encode("")[:1] if self._body.add_special_tokens is not False else []
        first = [token for token in starts if token == tokenizer.bos_token_id]
        return first + tokens.prompt(before, tokenizer.encode_inside(suffix))

    # ---- whole ----

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        self._scored = list(outputs[:: self._body.num_choices])
        return self._choices.whole(self._whole_choices(outputs), usage)

    def _whole_choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        """Of each prompt's outputs the likeliest per token, the best first."""
        body, num_generated = self._body, self._body.num_choices
        for number, scored in enumerate(self._scored):
            indexes: Sequence[int] = range(number * num_generated, (number + 1) * num_generated)
            if num_generated > body.num_returned:
                best_first = sorted(indexes, key=lambda index: -_mean_logprob(outputs[index]))
                indexes = best_first[: body.num_returned]
            shared = self._prompt_fields(scored)
            for index in indexes:
                yield self._whole_choice(index, outputs[index], shared)

    def _prompt_fields(self, scored: RequestOutput) -> dict[str, Any]:
        """Of all choices of a prompt."""
        fields: dict[str, Any] = {}
        if (num_top := self._body.prompt_logprobs) is not None:
            rows, is_shared = scored.prompt_logprobs or (), self._body.num_returned > 1
            fields["prompt_logprobs"] = prompt_logprobs(self._tokenizer, rows, num_top, is_shared=is_shared)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = scored.prompt_token_ids
        return fields

    def _whole_choice(self, index: int, output: RequestOutput, shared: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(index, output, output.token_ids, output.logprobs or LogprobRows())
        choice = {
            "text": self._text(index, output.text, is_first=True),
            **shared,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(output.finish_reason),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = output.token_ids[: self._max_tokens]
        return choice

    # ---- streamed ----

    def event(self, index: int, delta: Delta, rows: LogprobRows, usage: bytes) -> bytes:
        if self._is_plain and delta.text and delta.finish_reason is None:
            return self._choices.text_event(index, delta.text, usage)
        is_first = bool(delta.token_ids) and index not in self._begun
        logprobs = token_ids = None
        if self._body.logprobs is not None and delta.token_ids:
            logprobs = self._logprobs(index, delta.output, delta.token_ids, rows)
        if self._body.return_token_ids:
            token_ids = delta.token_ids if self._max_tokens else ()
        if is_first:
            self._begun.add(index)
        return self._choices.events(
            index,
            encode_json(self._text(index, delta.text, is_first)),
            usage,
            reason=self._finish_reason(delta.finish_reason),
            logprobs=logprobs,
            token_ids=token_ids,
            prompt_token_ids=delta.output.prompt_token_ids if is_first and self._body.return_token_ids else None,
        )

    # ---- both ----

    def _text(self, index: int, text: str, is_first: bool) -> str:
        text = text if self._max_tokens else ""
        return self._echoed_prompts[index // self._body.num_choices] + text if self._body.echo and is_first else text

    def _finish_reason(self, reason: str | None) -> str | None:
        return reason if self._max_tokens or reason is None else "length"

    def _logprobs(
        self, index: int, output: RequestOutput, token_ids: Sequence[int], rows: LogprobRows
    ) -> dict[str, Any]:
        """Of the last output tokens, after the prompt's if it is echoed and they are the first."""
        tokenizer, prompt_ids = self._tokenizer, output.prompt_token_ids
        all_ids: list[int] = []
        all_rows = LogprobRows()
        text_offsets: list[int] = []
        if self._body.echo and index not in self._begun:
            scored = self._scored[index // self._body.num_choices] if self._scored else output
            all_ids += prompt_ids
            all_rows.extend(scored.prompt_logprobs or LogprobRows())
            decoder = StreamDecoder(tokenizer, skip_special_tokens=self._skips_special)
            text_offsets += TextOffsets(decoder).take(prompt_ids)
        if self._max_tokens:
            all_ids += token_ids
            all_rows.extend(rows)
            if index not in self._text_offsets:
                start = len(self._text(index, "", is_first=True))
                decoder = tokenizer.stream_decoder(prompt_ids, skip_special_tokens=self._skips_special)
                self._text_offsets[index] = TextOffsets(decoder, start)
            text_offsets += self._text_offsets[index].take(token_ids)
        return completion_logprobs(tokenizer, all_ids, all_rows, self._body.logprobs or 0, text_offsets)


def _mean_logprob(output: RequestOutput) -> float:
    chosen = () if output.logprobs is None else output.logprobs.chosen
    return sum(chosen) / max(1, len(chosen))
