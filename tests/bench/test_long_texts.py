from __future__ import annotations

import pytest

from evenflow.bench.long_texts import GARDEN_DIARY, HARBOUR_LOG, LongText


def count_words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("text", [HARBOUR_LOG, GARDEN_DIARY])
@pytest.mark.parametrize("num_tokens", [200, 1500, 2000])
def test_a_text_fills_its_length_with_different_entries_and_ends_in_its_question(
    text: LongText, num_tokens: int
) -> None:
    made = text.of_length(num_tokens, count_words)
    assert num_tokens - 60 < count_words(made) <= num_tokens
    assert made.startswith(text.opening)
    assert made.endswith("\n" + text.question)
    entries = [line.partition(": ")[2] for line in made.splitlines() if ": " in line]
    assert len(entries) > 3
    assert len(set(entries)) == len(entries)
