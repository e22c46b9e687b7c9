"""What mkdocs does beside its own work: generated reference pages, files outside docs/, a check for foreign assets."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import package_graph
import reference

ROOT = Path(__file__).resolve().parents[2]
_GENERATED = re.compile(r"<!-- generated: (\w+)((?: [\w.]+)*) -->")
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
_MERMAID = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
_MAKERS: dict[str, Callable[..., str]] = {
    "commands": reference.commands,
    "fields": reference.fields,
    "api": reference.api,
}


def on_files(files: Files, config: Any) -> Files:
    """Copy what pages link to outside docs/, such as the dashboard and the examples."""
    for page in Path(config.docs_dir).glob("*.md"):
        for name in set(_OUTSIDE.findall(page.read_text(encoding="utf-8"))):
            if not (ROOT / name).is_file():
                raise PluginError(f"{page.name} links to ../{name}, which is not a file.")
            if files.get_file_from_path(_copy_of(name)) is None:
                files.append(File.generated(config, _copy_of(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in the generated parts, draw graphs, and lead links to the copies."""
    if page.file.src_uri.startswith("log/"):
        return markdown  # its links to `../` stay inside docs/
    markdown = _GENERATED.sub(_generate, markdown)
    markdown = _MERMAID.sub(lambda found: package_graph.svg(found[1]), markdown)
    return _OUTSIDE.sub(lambda found: f"]({_copy_of(found[1])}", markdown)


def on_post_build(config: Any) -> None:
    """Readers fetch nothing from elsewhere."""
    for page in Path(config.site_dir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        tags = re.findall(r"<(?:link|script|img|iframe|source)\b[^>]*>", text)
        foreign = [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)]
        if foreign:
            raise PluginError(f"{page.name} loads from elsewhere: {foreign[0]}")


def _generate(found: re.Match[str]) -> str:
    make, names = _MAKERS[found[1]], found[2].split()
    return "\n\n".join(make(name) for name in names) if names else make()


def _copy_of(name: str) -> str:
    # Not rendered as a page, and not mistaken for one of the site's own.
    return f"files/{name}"
