"""Durations as people write them. One rule for units everywhere, and one range for a request's targets."""

from __future__ import annotations

import re

from evenflow.errors import InvalidConfig, InvalidInput

NUMBER_PATTERN = r"[0-9]+(?:\.[0-9]+)?"
DURATION_PATTERN = rf"^({NUMBER_PATTERN}) ?(ms|s)?$"
MIN_TARGET_S, MAX_TARGET_S = 0.0001, 3600.0
NEEDS_UNIT_S = 10.0  # too long for a gap between tokens: a number without unit was meant as milliseconds


def parse_duration(given: object, error: type[InvalidInput] = InvalidInput, got: str = "", prefix: str = "") -> float:
    """Seconds: a text has a unit (50ms, 0.3s), a bare number is in seconds and below 10.

    The error begins with `got` and suggests correct forms, with `prefix` before the duration.
    """
    got = got or f"Got {repr(given)[:100]}"
    number, unit = given, None
    if isinstance(given, str):
        match = re.fullmatch(DURATION_PATTERN, given)
        # Not divided: 33.3ms is the same float as 0.0333.
        number, unit = (float(match[1] + ("e-3" if match[2] == "ms" else "")), match[2]) if match else (None, None)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise error(f"{got} but expected a duration such as 50ms or 0.3s.")
    if unit is None and NEEDS_UNIT_S <= number <= 1000 * MAX_TARGET_S:
        forms = f'"{prefix}{number:g}ms" or {prefix}{number / 1000:g}'
        if_meant = f', or "{prefix}{number:g}s" if you mean it' if number <= MAX_TARGET_S else ""
        raise error(f"{got}, which is {number:g} seconds; write {forms}{if_meant}.")
    return number


def parse_target(
    given: object, error: type[InvalidInput] = InvalidConfig, got: str = "", prefix: str = "", name: str = "tbt_target"
) -> float:
    """The same for a target or deadline of requests: in its range, and in whole nanoseconds."""
    got = got or f"Got {name}={repr(given)[:100]}"
    seconds = parse_duration(given, error, got, prefix)
    if not MIN_TARGET_S <= seconds <= MAX_TARGET_S:
        raise error(f"{got} but expected {MIN_TARGET_S:g} to {MAX_TARGET_S:g} seconds.")
    return round(float(seconds), 9)


def format_range(low: float, high: float) -> str:
    """Milliseconds, as an estimate: 180 to 320 ms."""
    return f"{1000 * high:.4g} ms" if low == high else f"{1000 * low:.4g} to {1000 * high:.4g} ms"


def format_duration(seconds: float) -> str:
    """Milliseconds, exactly as written: 50ms, 2.5ms."""
    text = f"{1000 * seconds:.6f}".rstrip("0").rstrip(".")
    return f"{text}ms"
