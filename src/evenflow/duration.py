"""Durations as people write them: 50ms, 2s. The target between tokens has one rule for units and one range."""

from __future__ import annotations

import re

from evenflow.errors import InvalidConfig, InvalidInput

NUMBER_PATTERN = r"[0-9]+(?:\.[0-9]+)?"
DURATION_PATTERN = rf"^({NUMBER_PATTERN}) ?(ms|s)$"
MIN_TARGET_S, MAX_TARGET_S = 0.0001, 3600.0
NEEDS_UNIT_S = 10.0  # too long for a gap between tokens: a number without unit was meant as milliseconds


def parse_duration(text: str) -> float:
    """Seconds, from text such as 50ms."""
    match = re.match(DURATION_PATTERN, text.strip().lower())
    if match is None:
        raise InvalidInput(f"Got {text!r} but expected a duration such as 50ms or 2s.")
    return float(match[1] + {"ms": "e-3", "s": ""}[match[2]])  # not divided: 33.3ms is the same float as 0.0333


def parse_target(given: object, error: type[InvalidInput] = InvalidConfig, got: str = "", prefix: str = "") -> float:
    """Seconds between tokens, in whole nanoseconds: a number is in seconds, a text has a unit.

    The error begins with `got` and suggests a correct form, with `prefix` before the duration.
    """
    got = got or f"Got tbt_target={repr(given)[:100]}"
    if isinstance(given, str) and re.fullmatch(NUMBER_PATTERN, given):
        forms = [f'"{prefix}{given}{unit}"' for unit in ("ms", "s") if unit == "ms" or float(given) < NEEDS_UNIT_S]
        raise error(f"{got} without a unit; write {' or '.join(forms)}.")
    if isinstance(given, str) and re.fullmatch(DURATION_PATTERN, given):
        seconds = parse_duration(given)
    elif isinstance(given, str | bool) or not isinstance(given, int | float):
        raise error(f"{got} but expected a duration such as 50ms or 0.3s.")
    elif NEEDS_UNIT_S <= given <= 1000 * MAX_TARGET_S:
        raise error(f'{got}, which is {given:g} seconds; write "{prefix}{given:g}ms".')
    else:
        seconds = given
    if not MIN_TARGET_S <= seconds <= MAX_TARGET_S:
        raise error(f"{got} but expected {MIN_TARGET_S:g} to {MAX_TARGET_S:g} seconds.")
    return round(float(seconds), 9)


def format_duration(seconds: float) -> str:
    """Milliseconds, exactly as written: 50ms, 2.5ms."""
    text = f"{1000 * seconds:.6f}".rstrip("0").rstrip(".")
    return f"{text}ms"
