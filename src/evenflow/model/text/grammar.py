"""Which tokens may come next in output that must match a grammar, computed by llguidance.

Grammars compile on a thread of their own while the prompt is computed.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from typing import Any, TypeGuard

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from evenflow.core.grammar import Grammar
from evenflow.errors import InvalidRequest
from evenflow.model.text.tokenizer import Tokenizer

# Schemas come from untrusted clients. These allow what people write and bound the cost of one grammar.
_limits = partial(
    LLParserLimits,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    max_lexer_states=10_000,  # of up to 2 kB each
    max_grammar_size=200_000,
    verbose_errors=False,
)
_LIMITS = _limits(step_max_items=10_000, max_items_in_row=2_000)
# A grammar of two lines can be so ambiguous that each token costs more than the one before: 20 ms at these limits.
_LARK_LIMITS = _limits(step_max_items=2_000, max_items_in_row=500)
# Some grammars take longer than these counts suggest. CPU seconds, so that a busy machine refuses no more than others.
_MAX_COMPILE_S = 0.5
_MAX_MASK_S = 0.1
_TRIAL_TOKENS = 4
_MAX_CACHED = 64  # compiled grammars, for requests that send the same one
# A space, or a new line with its indentation: with more freedom, small models write blanks for ever.
BLANKS_IN_JSON = r"\x20|\x0A[\x20\x09]{0,32}"

# In a JSON schema: what has schemas by names of the user's, and what has none.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NO_SCHEMAS = ("const", "enum", "default", "examples")
# Of an exclusive bound: llguidance reads some floats wrong in the last bit, and makes patterns of all their digits.
_MIN_MARGIN, _MARGIN_ULPS = 1e-15, 4


class Grammars:
    """Compiles grammars for one model, and reads its vocabulary at the first one. Thread-safe."""

    def __init__(self, vocabulary: Tokenizer, num_logits: int) -> None:
        self._vocabulary = vocabulary
        self._num_logits = num_logits
        self._worker = ThreadPoolExecutor(1, "evenflow-grammar")
        self._compile_soon = lru_cache(_MAX_CACHED)(lambda grammar: self._worker.submit(self._compile, grammar))

    def close(self) -> None:
        """End the thread, which would else outlive the model."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def read_vocabulary(self) -> None:
        """Build what all grammars share, ahead of the first."""
        _ = self._tokenizer

    def check(self, grammar: Grammar) -> None:
        """Compile it; InvalidRequest if it cannot be used."""
        self._compile_soon(grammar).result()

    def constrain(self, grammar: Grammar) -> Constraint:
        """For one answer. Returns at once; sampling waits for the grammar if it must."""
        return Constraint(self._compile_soon(grammar), self._num_logits, self._vocabulary.eos_token_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        tokenizer, began = self._tokenizer, time.thread_time()
        limits = _LARK_LIMITS if grammar.kind == "lark" else _LIMITS
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        _try_out(matcher.deep_copy(), grammar.kind)
        if time.thread_time() - began > _MAX_COMPILE_S:
            raise InvalidRequest(f"the {grammar.kind} cannot be used: it takes too long to compile")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        if not self._vocabulary.eos_token_ids:
            raise InvalidRequest("a grammar cannot be used: this model has no token that ends an answer")
        view = TokenizerWrapper(_TokenizerView(self._vocabulary, self._num_logits))
        return LLTokenizer(view, eos_token=list(self._vocabulary.eos_token_ids))


class Constraint:
    """Follows one answer through its grammar."""

    def __init__(self, compiled: Future[LLMatcher], num_logits: int, eos_token_ids: tuple[int, ...]) -> None:
        self._compiled = compiled
        self._num_logits = num_logits
        self._eos_token_ids = eos_token_ids
        self._num_taken = 0

    @cached_property
    def _matcher(self) -> LLMatcher:
        return self._compiled.result().deep_copy()

    def allowed(self, tokens: Sequence[int], num_prompt_tokens: int) -> NDArray[np.bool_]:
        """By token id, whether it may follow `tokens`: the prompt, then the answer so far.

        Since the last call it may have grown by several tokens (a recomputed request) or shrunk (a failed step).
        """
        matcher, end = self._matcher, len(tokens)
        while end > num_prompt_tokens and tokens[end - 1] in self._eos_token_ids:
            end -= 1  # a step in flight samples past the end of an answer; its token is dropped
        num_output = end - num_prompt_tokens
        if num_output < self._num_taken:
            matcher.rollback(self._num_taken - num_output)
        else:
            matcher.consume_tokens(list(tokens[num_prompt_tokens + self._num_taken : end]))
        self._num_taken = num_output
        began = time.thread_time()
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot go on after {num_output} tokens: {_reason(matcher)}")
        if time.thread_time() - began > _MAX_MASK_S:
            raise InvalidRequest(f"the grammar cannot go on after {num_output} tokens: it takes too long")
        return np.unpackbits(bits, count=self._num_logits, bitorder="little").view(np.bool_)


class _TokenizerView:
    """A vocabulary with the attributes that llguidance expects."""

    def __init__(self, vocabulary: Tokenizer, num_logits: int) -> None:
        self._vocabulary = vocabulary
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(num_logits)]
        self.special_token_ids = [token_id for token_id in range(num_logits) if vocabulary.is_special(token_id)]

    def __call__(self, text: str) -> list[int]:
        """The token ids of this text inside a longer one."""
        encode, is_special = self._vocabulary.encode, self._vocabulary.is_special
        token_ids = encode(text, add_special_tokens=False)
        if len(text) > 1 and any(map(is_special, token_ids)):
            # A special token's name is text here; one character at a time it is not taken for the token.
            return [token_id for character in text for token_id in self(character)]
        if b"".join(map(self._vocabulary.token_bytes, token_ids)) == text.encode():
            return token_ids
        return self._vocabulary.encode_inside(text)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    try:
        match grammar.kind:
            case "json_schema":
                text = grammar.text
                if "exclusive" in text:
                    text = json.dumps(_with_inclusive_bounds(json.loads(text)))
                return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": BLANKS_IN_JSON})
            case "regex":
                # \d means 0 to 9 to people, not every digit of Unicode.
                return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.text, use_ascii='d')}/")
            case "choice":
                texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text)]
                return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
            case "lark":
                return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    except Exception as error:  # of many kinds: not JSON, too deep, the library's own
        raise InvalidRequest(f"the {grammar.kind} cannot be used: {error}") from error


def _with_inclusive_bounds(schema: Any) -> Any:
    """The schema with inclusive bounds in place of exclusive ones on the side of zero.

    llguidance lets numbers reach such a bound if it is whole and the other bound less than 1 away.
    """
    if isinstance(schema, list):
        return [_with_inclusive_bounds(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: _with_inclusive_bounds(one) for name, one in value.items()}
        else:
            found[key] = value if key in _NO_SCHEMAS else _with_inclusive_bounds(value)
    _make_inclusive(found, "minimum", "exclusiveMinimum", 1, max)
    _make_inclusive(found, "maximum", "exclusiveMaximum", -1, min)
    return found


def _make_inclusive(
    schema: dict[str, Any], name: str, exclusive: str, sign: int, tighter: Callable[[float, float], float]
) -> None:
    bound, other = schema.get(exclusive), schema.get(name)
    if bound is True:  # in older drafts, it is about the other
        bound = other
    if not _is_finite(bound) or sign * bound < 0 or not (other is None or _is_finite(other)):
        return
    del schema[exclusive]
    inclusive = bound + sign * max(_MIN_MARGIN, _MARGIN_ULPS * math.ulp(bound))
    schema[name] = inclusive if other is None else tighter(inclusive, other)


def _is_finite(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _try_out(matcher: LLMatcher, kind: str) -> None:
    """Generate a few tokens: some limits are only hit then."""
    for _ in range(_TRIAL_TOKENS):
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest(f"the {kind} cannot be used: {_reason(matcher)}")
        if matcher.is_stopped():
            return
        # The last token allowed: in most vocabularies ends of text come first.
        matcher.consume_token(int(np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))[-1]))


def _reason(matcher: LLMatcher) -> str:
    """The error on one line."""
    error = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
    return "no text matches it" if error.startswith("NoExtension") else error
