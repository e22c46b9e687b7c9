"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from evenflow.counts import counted


@pytest.mark.parametrize(("number", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (3000, "3,000 tokens")])
def test_a_noun_follows_its_number(number: int, text: str) -> None:
    assert counted(number, "token") == text
