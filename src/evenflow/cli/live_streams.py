"""Draws streams in the terminal while they run: a row for each stream, a mark for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from evenflow.bench.timeline import ASCII_MARKS, UNICODE_MARKS, Timeline, draw

_REFRESHES_PER_S = 5  # drawing takes time from the engine


@contextmanager
def live_streams(console: Console, clock: Callable[[], float]) -> Iterator[Callable[[Timeline], None]]:
    """Show the timelines given to the result, as they grow. The last picture stays on the terminal."""
    picture = _Picture(clock)
    with Live(picture, console=console, refresh_per_second=_REFRESHES_PER_S):
        yield picture.timelines.append
    console.print()


class _Picture:
    """Drawn anew for each refresh, on a thread of rich."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.timelines: list[Timeline] = []
        self._clock = clock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = ASCII_MARKS if options.ascii_only else UNICODE_MARKS
        yield Text(f"{marks.waiting} waits   {marks.prefill} prefill   {marks.token} tokens", style="dim")
        for line in draw(self.timelines, self._clock(), options.max_width, marks):
            text = Text(line, no_wrap=True)
            if marks is UNICODE_MARKS:  # the others are letters of names, too
                for mark, style in ((marks.waiting, "dim"), (marks.prefill, "yellow"), (marks.token, "green")):
                    text.highlight_regex(f"{mark}+", style)
            yield text
