"""A bar on standard error for a file that is being fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(name: str, num_bytes: int | None, *, shown: bool) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on standard error, if `shown`; yields a function that sets the bytes fetched so far, and of all."""
    if not shown:
        yield lambda num_bytes, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("Fetching {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=num_bytes)
        yield lambda num_bytes, total: bar.update(task, completed=num_bytes, total=total)


def format_bytes(num_bytes: float) -> str:
    """A size for people: 93.8 MB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.{0 if unit == 'B' else 1}f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
