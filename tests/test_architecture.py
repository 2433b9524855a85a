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
        1_733,
        {"coding", "sindy.py", "_math/best_subset.py", "_math/pursuit.py", "_sparse.py"}
        | {"sklearn/_ksvd.py", "sklearn/_regressor.py"},
    ),
    "neighbours": (615, {"nn/neighbors.py", "sklearn/_neighborhood.py"}),
    "search": (922, {"search", "hf/_beams.py"}),
    "attention": (1_484, {"attention", "nn/_attention.py", "hf/_attention.py", "_math/tails.py", "_math/cells.py"}),
    "spark and tokens": (
        1_333,
        {"nn/spark.py", "nn/tokens.py", "hf/_spark.py", "hf/_tokens.py"}
        | {"relaxations/_statistical.py", "ops/_statistical.py", "_math/statistical.py"},
    ),
    "surveys and data": (1_430, {"survey", "data", "designs/_rows.py", "designs/_balanced.py", "_math/balanced.py"}),
    "sparse networks": (3_147, {"nn/sparsity", "nn/_budgets.py", "nn/_choice.py"}),
    "one row on many ranks": (
        1_279,
        {"distributed", "nn/sae/_ranks.py", "_math/across.py", "_math/chunks.py"},
    ),
    "feature selection": (
        3_491,
        {f"jobs/{name}.py" for name in ("_compare", "_table", "_text", "_trust", "_values", "_wish")}
        | {"jobs/select.py", "jobs/select_report.py"}
        | {f"sklearn/{name}.py" for name in ("_blocks", "_gate", "_judges", "_knockoffs", "_portfolio", "_problem")}
        | {"sklearn/_selector.py"},
    ),
    "feature browser": (713, {"jobs/_browser.py", "jobs/sae_names.py", "sae/_features.py", "sae/_texts.py"}),
    "autoencoders": (2_655, {"sae", "nn/sae", "jobs/sae_report.py"}),
    "the rest": (13_962, set()),
}
"""Ratchets of lines, with the folders and files that each counts. Lower them when code shrinks."""


def area_of(path):
    """The area of a file, given relative to the package: the first that names it or a folder it is in."""
    places = {path.as_posix(), *(folder.as_posix() for folder in path.parents)}
    return next((area for area, (_, own) in AREAS.items() if own & places), "the rest")


def test_the_library_stays_small():
    sizes = {area: [] for area in AREAS}
    for path in FILES:
        sizes[area_of(path.relative_to(PACKAGE))].append(len(path.read_text().splitlines()))
    assert len([size for size in sizes["the rest"] if size]) <= 93
    assert {area: sum(lines) for area, lines in sizes.items() if sum(lines) > AREAS[area][0]} == {}


def test_an_area_is_a_place_and_not_a_file_name():
    named = {name for _, own in AREAS.values() for name in own}
    assert [name for name in named if not (PACKAGE / name).exists()] == []
    core = ("_math/select.py", "_math/budgets.py", "_math/kth.py", "designs/_file.py", "cli/_select.py", "cli/_sae.py")
    assert {area_of(Path(name)) for name in core} == {"the rest"}


def test_test_files_stay_short():
    files = [path for path in sorted(Path(__file__).parent.rglob("*")) if path.suffix in (".py", ".h", ".cpp")]
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
@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("name", PATHS)
def test_a_call_crosses_few_files(name, is_direct, monkeypatch):
    """An extension skips most of these files, so calls that it leaves to the checks are counted by themselves."""
    most, fn = PATHS[name]
    if not is_direct:
        monkeypatch.setattr(ops, "direct_topk", lambda *arguments: None)
    x = torch.randn(3, 6, requires_grad=True)
    files = khot_files(lambda: fn(x).sum().backward())
    assert is_direct or "ops/_topk.py" in files
    assert ("_math/threshold.py" in files) == (name == "eager"), "the way that the name promises"
    assert is_direct or "_check.py" in files
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
