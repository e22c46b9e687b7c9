"""Numbers with their nouns: 1 token, 2,000 tokens."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
