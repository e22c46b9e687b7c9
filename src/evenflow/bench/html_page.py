"""Reports as one self-contained HTML file: text, tables, and pictures inside it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from html import escape
from io import BytesIO
from pathlib import Path

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #8884 }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; background: white }
pre { overflow-x: auto }
"""


def write_page(path: Path, title: str, body: Iterable[str]) -> None:
    """The body is made by the functions below."""
    path.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style>
<h1>{escape(title)}</h1>
{"".join(body)}</html>
""",
        encoding="utf-8",
    )


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


def commands(text: str) -> str:
    return f"<pre>{escape(text)}</pre>\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr><th>{'<th>'.join(map(escape, heads))}</tr>{''.join(lines)}</table>\n"


def picture(alt: str, draw: Callable[[BytesIO], None]) -> str:
    draw(content := BytesIO())
    encoded = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{encoded}">\n'
