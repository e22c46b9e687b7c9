"""Durations as people write them: 50ms, 2s."""

from __future__ import annotations

import re

from evenflow.errors import InvalidInput

DURATION_PATTERN = r"^([0-9]+(?:\.[0-9]+)?) ?(ms|s)$"


def parse_duration(text: str) -> float:
    """Seconds, from text such as 50ms."""
    match = re.match(DURATION_PATTERN, text.strip().lower())
    if match is None:
        raise InvalidInput(f"Got {text!r} but expected a duration such as 50ms or 2s.")
    return float(match[1] + {"ms": "e-3", "s": ""}[match[2]])  # not divided: 33.3ms is the same float as 0.0333


def format_duration(seconds: float) -> str:
    """Milliseconds, as exactly as they were written: 50ms, 2.5ms."""
    text = f"{1000 * seconds:.6f}".rstrip("0").rstrip(".")
    return f"{text}ms"
