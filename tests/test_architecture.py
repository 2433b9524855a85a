"""The shape of the code: front doors, one path, few files; and the page that describes it."""

import ast
import sys
from pathlib import Path

import pytest
import torch

import khot
from benchmarks.style import dark
from docs import make_architecture as page
from khot import ops

PACKAGE = Path(khot.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
SHARED = {"_check", "_shape", "_torch", "_process", "_version", "_math", "ops"}
"""Rooms below all others, whose underscore keeps users out and not khot."""


def private_doors(path, source):
    """The imports of a file that go through another room's private file."""
    here = path.relative_to(PACKAGE).parts
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = list(here[: len(here) - node.level])
        names = [[*base, *(node.module or "").split(".")]] if node.module else [[*base, a.name] for a in node.names]
        if node.module and not any(part.startswith("_") for part in node.module.split(".")):
            names += [[*base, *node.module.split("."), a.name] for a in node.names]  # `from ..room import _file`
        for target in names:
            room = page_room(target)
            private = [part for part in target[len(room) :] if part.startswith("_")]
            own = page_room(list(here))[: len(room)] == room  # the same room, or the folder that it is in
            if private and target[0] not in SHARED and not own:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} imports {'.'.join(target)}")
    return found


def page_room(parts):
    """The folder directly below the package, or below `nn`."""
    return tuple(parts[:2]) if parts[0] == "nn" and len(parts) > 2 else tuple(parts[:1])


def test_nobody_imports_another_rooms_private_file():
    assert [line for path in FILES for line in private_doors(path, path.read_text())] == []
    wrong = "from ..relaxations._family import relax\nfrom ..designs import _design\nfrom .._math import cdfs\n"
    assert len(private_doors(PACKAGE / "nn" / "moe.py", wrong)) == 2, "the check finds what it should"


AREAS = {
    "sparse coding": (
        1_735,
        {"coding", "sindy.py", "best_subset.py", "pursuit.py", "_ksvd.py", "_regressor.py", "_sparse.py"},
    ),
    "neighbours": (620, {"neighbors.py", "_neighborhood.py"}),
    "search": (925, {"search", "_beams.py"}),
    "attention": (1_485, {"attention", "_attention.py", "tails.py", "cells.py"}),
    "spark and tokens": (
        1_335,
        {"_spark.py", "_statistical.py", "_tokens.py", "spark.py", "statistical.py", "tokens.py"},
    ),
    "surveys and data": (1_500, {"survey", "data", "_rows.py", "_balanced.py", "balanced.py"}),
    "sparse networks": (3_260, {"_budgets.py", "_choice.py", "budgets.py", "sparsity"}),
    "one row on many ranks": (1_500, {"_file.py", "_ranks.py", "across.py", "chunks.py", "distributed", "kth.py"}),
    "feature selection": (
        3_740,
        {"_blocks.py", "_gate.py", "_judges.py", "_knockoffs.py", "_portfolio.py", "_problem.py", "_selector.py"}
        | {"select.py", "_compare.py", "select_report.py", "_select.py", "_trust.py", "_wish.py"}
        | {"_table.py", "_text.py", "_values.py"},
    ),
    "feature browser": (690, {"_browser.py", "_features.py", "_texts.py", "sae_names.py"}),
    "autoencoders": (2_800, {"sae", "_sae.py", "sae_report.py"}),
    "the rest": (12_680, set()),
}
"""Ratchets of lines, with the folders and files that each counts. Lower them when code shrinks."""


def test_the_library_stays_small():
    sizes = {area: [] for area in AREAS}
    for path in FILES:
        parts = path.relative_to(PACKAGE).parts
        area = next((name for name, (_, own) in AREAS.items() if own.intersection(parts)), "the rest")
        sizes[area].append(len(path.read_text().splitlines()))
    assert len([size for size in sizes["the rest"] if size]) <= 110
    assert {area: sum(lines) for area, lines in sizes.items() if sum(lines) > AREAS[area][0]} == {}


def test_test_files_stay_short():
    files = sorted(Path(__file__).parent.rglob("*.py"))
    assert len(files) > 100
    assert {path.name: n for path in files if (n := len(path.read_text().splitlines())) > 400} == {}


def khot_files(call):
    """The files of khot that have a Python frame during a call."""
    seen = set()

    def look(frame, event, argument):
        if frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen.add(Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix())

    call()  # imports and caches are not the path
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


MASK = torch.tensor([True, True, False, True, True, True])
PATHS = {
    "plain": (5, lambda x: khot.sigmoid_topk(x, 2)),
    "mask": (5, lambda x: khot.sigmoid_topk(x, 2, mask=MASK)),
    "layer": (6, khot.nn.SigmoidTopK(2)),
    "eager": (7, lambda x: khot.normal_topk(x.double(), 2)),  # no kernel computes it in float64
}


@pytest.mark.skipif(not ops.HAS_NATIVE, reason="the native library is not built")
@pytest.mark.parametrize("name", PATHS)
def test_a_call_crosses_few_files(name):
    most, fn = PATHS[name]
    x = torch.randn(3, 6, requires_grad=True)
    files = khot_files(lambda: fn(x).sum().backward())
    assert "ops/_topk.py" in files
    assert ("_math/threshold.py" in files) == (name == "eager"), "the way that the name promises"
    assert len(files) <= most, sorted(files)


def test_the_page_and_its_picture_are_true():
    text = page.PAGE.read_text()
    assert page.referenced(text) == text, "run `python docs/make_architecture.py`"
    assert page.PICTURE.read_text() == page.picture(page.imports()), "run `python docs/make_architecture.py`"
    assert page.DARK.read_text() == dark(page.PICTURE.read_text())
    assert len(page.REFERENCE.findall(text)) >= 8
    shifted = page.REFERENCE.sub(lambda m: m[0].replace(m["line"], str(int(m["line"]) + 1)), text)
    assert page.referenced(shifted) != shifted


def test_rooms_import_downwards_only():
    with pytest.raises(ValueError, match="a → b → a"):
        page.levels({"a": {"b"}, "b": {"a"}})
    order = [room for level in page.levels(page.imports()) for room in level]
    for lower, upper in (
        ("_math", "ops"),
        ("ops", "relaxations"),
        ("relaxations", "designs"),
        ("designs", "nn"),
        ("nn", "cli"),
    ):
        assert order.index(lower) < order.index(upper)
