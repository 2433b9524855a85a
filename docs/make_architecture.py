"""Draw the rooms of khot from its import graph, and set the line numbers of docs/architecture.md.

`python docs/make_architecture.py` rewrites docs/img/rooms.svg and the references of the page; a test compares both
with the sources.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from benchmarks.style import dark

ROOT = Path(__file__).parents[1]
PACKAGE, PAGE, PICTURE = ROOT / "src" / "khot", ROOT / "docs" / "architecture.md", ROOT / "docs" / "img" / "rooms.svg"
DARK = PICTURE.with_name("rooms-dark.svg")
REFERENCE = re.compile(r"`(?P<path>[\w/]+\.py):(?P<line>\d+)` `(?P<name>\w+(\.\w+)?)`")
WIDTH, ROW, BOX, GAP = 900, 78, 34, 12


def room_of(path: Path) -> str:
    """Name the room a file belongs to: a folder or a file directly below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports() -> dict[str, set[str]]:
    """Return which rooms each room imports, from the sources; the package's own `__init__` is left out."""
    graph: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        if room.startswith("__"):
            continue
        found = graph.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                depth = len(path.relative_to(PACKAGE).parts) - node.level
                if depth < 0:
                    raise ValueError(f"{path}: line {node.lineno} imports from outside the package")
                base = list(path.relative_to(PACKAGE).parts[:depth]) + (node.module.split(".") if node.module else [])
                found |= {base[0]} if base else {alias.name for alias in node.names}
    graph.pop("_version")  # a number that many rooms print
    return {room: used & set(graph) - {room} for room, used in graph.items()}


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the rooms from the bottom up: each stands above all that it imports."""
    height: dict[str, int] = {}

    def climb(room: str, above: tuple[str, ...] = ()) -> int:
        if room in above:
            raise ValueError(f"rooms import each other: {' → '.join((*above, room))}")
        if room not in height:
            height[room] = 1 + max((climb(below, (*above, room)) for below in graph[room]), default=-1)
        return height[room]

    for room in graph:
        climb(room)
    return [sorted(room for room in graph if height[room] == level) for level in range(max(height.values()) + 1)]


def picture(graph: dict[str, set[str]]) -> str:
    """Draw boxes in levels and a line for each import; what is implied by other lines is left out."""
    stack = levels(graph)
    tall = ROW * len(stack) + GAP
    place: dict[str, tuple[float, float]] = {}
    for level, rooms in enumerate(stack):
        for i, room in enumerate(rooms):
            place[room] = (WIDTH * (i + 0.5) / len(rooms), tall - ROW * (level + 0.5))
    lines, boxes = [], []
    for room in sorted(graph):
        implied = set().union(*(reach(graph, below) for below in graph[room]))
        for below in sorted(graph[room] - implied):
            (x, y), (u, v) = place[room], place[below]
            points = ((x, y + BOX / 2), (x, y + ROW / 2), (u, v - ROW / 2), (u, v - BOX / 2))
            first, *others = (f"{a:.0f},{b:.0f}" for a, b in points)
            lines.append(f'<path d="M{first} C{" ".join(others)}"><title>{room} imports {below}</title></path>')
        x, y = place[room]
        wide = 16 + 9 * len(room)
        boxes.append(
            f'<rect x="{x - wide / 2:.0f}" y="{y - BOX / 2:.0f}" width="{wide}" height="{BOX}" rx="6"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}">{room}</text>'
        )
    style = (
        "path{fill:none;stroke:#9aa5ae;stroke-width:1.2}rect{fill:#fbfbfb;stroke:#0072b2}"
        "text{font:15px DejaVu Sans,sans-serif;text-anchor:middle;fill:#22303c}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" role="img">'
    title = "<title>Who imports whom</title>"
    return "\n".join([head, title, f"<style>{style}</style>", *lines, *boxes, "</svg>", ""])


def reach(graph: dict[str, set[str]], room: str) -> set[str]:
    """Return all that a room imports, also through others."""
    return graph[room].union(*(reach(graph, below) for below in graph[room]))


def line_of(path: str, name: str) -> int:
    """Return the line on which a function, class or method (`Class.method`) is defined."""
    scope: ast.AST = ast.parse((PACKAGE / path).read_text())
    for part in name.split("."):
        found = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == part]
        if not found:
            raise LookupError(f"{path} does not define {name}")
        scope = found[0]
    assert isinstance(scope, (ast.FunctionDef, ast.ClassDef))
    return scope.lineno


def referenced(page: str) -> str:
    """Return the page with the line number of each reference set from the sources."""
    return REFERENCE.sub(lambda m: f"`{m['path']}:{line_of(m['path'], m['name'])}` `{m['name']}`", page)


if __name__ == "__main__":
    light = picture(imports())
    PICTURE.write_text(light)
    DARK.write_text(dark(light))
    PAGE.write_text(referenced(PAGE.read_text()))
    print(f"wrote {PICTURE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
