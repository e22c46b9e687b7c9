"""The graph of packages in docs/tour.md is the one in the code."""

from __future__ import annotations

import re
from pathlib import Path

import grimp

Edges = set[tuple[str, str]]
TOUR = Path(__file__).parents[1] / "docs" / "tour.md"


def imports_between_packages() -> Edges:
    graph = grimp.build_graph("evenflow")
    packages = {module for module in graph.find_children("evenflow") if graph.find_children(module)}
    found = {
        (".".join(importer.split(".")[:2]), ".".join(imported.split(".")[:2]))
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    }
    return {
        (a.removeprefix("evenflow."), b.removeprefix("evenflow.")) for a, b in found if a != b and {a, b} <= packages
    }


def without_implied(edges: Edges) -> Edges:
    """The edges that no path of others stands for."""

    def reaches(start: str, end: str, edges: Edges) -> bool:
        return any(a == start and (b == end or reaches(b, end, edges - {(a, b)})) for a, b in edges)

    return {edge for edge in edges if not reaches(*edge, edges - {edge})}


def test_the_drawn_graph_is_the_codes() -> None:
    [drawn] = re.findall(r"```mermaid\ngraph TD\n(.*?)```", TOUR.read_text(), re.DOTALL)
    arrows = set(re.findall(r"^  (\w+) --> (\w+)$", drawn, re.MULTILINE))
    assert len(arrows) == drawn.count("-->")
    assert arrows == without_implied(imports_between_packages())
