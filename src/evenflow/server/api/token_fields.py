"""Fields of a request that favour or forbid single tokens: OpenAI's `logit_bias`, and two of vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from evenflow.core.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGIT_BIASES,
)
from evenflow.errors import InvalidRequest

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]  # JSON has no numbers as names
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
MAX_RULE_VALUES = 1 << 18  # for all choices of a request: each takes its own to the engine
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]


class TokenFields(BaseModel):
    """For chats and completions."""

    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=MAX_LOGIT_BIASES)] | None = Field(
        None, description="Added to the logits of these tokens, named by id."
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None
    ) = Field(None, description="Generate no other tokens. An answer ends only by an end token that is among them.")
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = Field(
        None, description="Never generate the last token of one of these words after its other tokens."
    )

    def check_size(self, num_choices: int) -> None:
        """Refuse rules that are short for one choice and long for all."""
        num_characters = sum(map(len, self.bad_words or ()))
        num_values = (len(self.allowed_token_ids or ()) + num_characters) * num_choices
        if num_values > MAX_RULE_VALUES:
            raise InvalidRequest(
                f"Got allowed_token_ids and bad_words of {num_values} ids and characters for {num_choices} choices but "
                f"expected at most {MAX_RULE_VALUES}."
            )

    @property
    def token_rules(self) -> dict[str, Any]:
        """Those that are given, for `SamplingParams`."""
        rules: dict[str, Any] = {}
        if self.logit_bias:
            rules["logit_bias"] = {int(token_id): bias for token_id, bias in self.logit_bias.items()}
        if self.allowed_token_ids is not None:
            rules["allowed_token_ids"] = tuple(self.allowed_token_ids)
        if self.bad_words:
            rules["bad_words"] = tuple(self.bad_words)
        return rules
