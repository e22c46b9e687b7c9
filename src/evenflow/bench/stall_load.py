"""The stall load: chats that keep decoding, and long prompts that arrive beside them at a fixed interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from evenflow.bench.endpoints import Ask
from evenflow.bench.long_texts import GARDEN_DIARY, HARBOUR_LOG, LongText
from evenflow.errors import InvalidRequest

_QUESTIONS = (
    "Could you tell me how rain forms, and why it falls in drops of such different sizes?",
    "Write a short poem about the sea in winter, and mention a lighthouse and its keeper.",
    "What is a computer made of, and what does each of these parts do while a program runs?",
    "I would like to bake bread at home. Which flour should I buy, and how long does it rise?",
    "Tell me a story about a fox who wanted to learn how to swim across the wide river.",
    "Why do leaves change their color in autumn, and why do some trees keep them in winter?",
    "Explain to a child how a bicycle stays upright while it moves, and why it falls at rest.",
    "Which three places should one visit in a small town by a lake, and at what time of day?",
)
_STYLE = " Please answer in simple words, in three or four sentences."
_ENTRIES_APART = 37  # long prompts must not share a beginning


@dataclass(frozen=True, slots=True)
class StallLoad:
    """Begins once every chat has a token, and ends with the last long prompt's answer; chats that end are replaced."""

    num_chats: int
    chat_prompts: Sequence[Sequence[int]]  # used in turn
    chat_tokens: int  # of an answer, and a few more for some chats, so that they do not end together
    long_prompts: Sequence[Sequence[int]]
    long_answer_tokens: int
    interval: float  # seconds from one long prompt to the next
    first_number: int = 1  # of the long prompts

    def __post_init__(self) -> None:
        if not (self.num_chats and self.long_prompts):
            raise InvalidRequest(
                f"Got {self.num_chats} chats and {len(self.long_prompts)} long prompts but expected some of both."
            )

    def chat(self, number: int) -> Ask:
        """Chats are numbered from 0, in the order in which they start."""
        prompt = self.chat_prompts[number % len(self.chat_prompts)]
        return Ask(prompt, self.chat_tokens + 7 * (number % self.num_chats))

    @property
    def max_chat_length(self) -> int:
        """Most tokens of a chat, prompt and answer."""
        return max(map(len, self.chat_prompts)) + self.chat(self.num_chats - 1).max_tokens

    def long_asks(self) -> dict[str, Ask]:
        return {
            f"long-{self.first_number + place}": Ask(prompt, self.long_answer_tokens, place * self.interval)
            for place, prompt in enumerate(self.long_prompts)
        }

    def parts(self, num_prompts: int) -> list[StallLoad]:
        """The load cut into several, with this many long prompts each."""
        return [
            replace(self, long_prompts=self.long_prompts[start : start + num_prompts], first_number=1 + start)
            for start in range(0, len(self.long_prompts), num_prompts)
        ]


class Prompts(NamedTuple):
    chats: list[list[int]]
    long: list[list[int]]


def english_prompts(encode: Callable[[str], list[int]], num_long: int, long_tokens: int) -> Prompts:
    """Real text: questions for the chats; logs and diaries of exactly `long_tokens`, each ending in a question."""
    texts = (HARBOUR_LOG, GARDEN_DIARY)
    long = [_long_prompt(texts[number % 2], number, encode, long_tokens) for number in range(num_long)]
    return Prompts([encode(question + _STYLE) for question in _QUESTIONS], long)


def _long_prompt(text: LongText, number: int, encode: Callable[[str], list[int]], num_tokens: int) -> list[int]:
    question = encode("\n\n" + text.question)
    ids = encode(f"Volume {number + 1}. {text.opening}")
    for entry in islice(text.entries(), _ENTRIES_APART * number, None):
        if len(ids) >= num_tokens:
            break
        ids += encode(entry + "\n")
    return (ids[: max(0, num_tokens - len(question))] + question)[-num_tokens:]
