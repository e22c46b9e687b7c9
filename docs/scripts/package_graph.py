"""Draws a graph written for mermaid (`graph TD`, lines `a --> b`) as SVG: readers of the site then load no script."""

from __future__ import annotations

import re
from collections import defaultdict

_WIDTH, _HEIGHT, _BOX_WIDTH, _BOX_HEIGHT = 130, 74, 104, 32


def svg(source: str) -> str:
    """The graph from top to bottom, every arrow pointing down."""
    edges = re.findall(r"(\w+) --> (\w+)", source)
    layers = _ordered(_layers(edges), edges)
    width = _WIDTH * max(map(len, layers))
    places = {
        name: (width * (column + 0.5) / len(layer), _HEIGHT * (row + 0.5))
        for row, layer in enumerate(layers)
        for column, name in enumerate(layer)
    }
    lines = [_arrow(places[start], places[end]) for start, end in edges]
    boxes = [_box(name, *place) for name, place in places.items()]
    return (
        f'<svg viewBox="0 0 {width} {_HEIGHT * len(layers)}" style="max-width: 44rem" role="img" '
        'aria-label="Packages and what they import"><defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" '
        'markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
        + "".join(lines + boxes)
        + "</svg>"
    )


def _layers(edges: list[tuple[str, str]]) -> list[list[str]]:
    """Each node below all that point to it."""
    depth: dict[str, int] = defaultdict(int)
    for _ in edges:  # a path has at most as many edges as there are
        for start, end in edges:
            depth[end] = max(depth[end], depth[start] + 1)
    return [[name for name in depth if depth[name] == level] for level in range(max(depth.values()) + 1)]


def _ordered(layers: list[list[str]], edges: list[tuple[str, str]]) -> list[list[str]]:
    """Nodes under the middle of those that point to them, so that few arrows cross."""
    position: dict[str, float] = {}
    for layer in layers:
        above = {name: [position[start] for start, end in edges if end == name] for name in layer}
        layer.sort(key=lambda name: sum(above[name]) / max(1, len(above[name])))
        position |= {name: (index + 0.5) / len(layer) for index, name in enumerate(layer)}
    return layers


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (to_x, to_y) = start, end
    y, to_y = y + _BOX_HEIGHT / 2, to_y - _BOX_HEIGHT / 2
    middle = (y + to_y) / 2
    path = f"M{x:.0f} {y:.0f}C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y:.0f}"
    return f'<path d="{path}" fill="none" stroke="currentColor" opacity="0.6" marker-end="url(#head)"/>'


def _box(name: str, x: float, y: float) -> str:
    left, top = x - _BOX_WIDTH / 2, y - _BOX_HEIGHT / 2
    shape = f'width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="6" fill="#0094851f" stroke="#009485"'
    text = f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" font-size="14" fill="currentColor">{name}</text>'
    return f'<rect x="{left:.0f}" y="{top:.0f}" {shape}/>{text}'
