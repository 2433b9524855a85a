"""Examples and benchmarks use khot's public names only."""

import ast

import pytest

from benchmarks.common import ROOT

FILES = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


def private_names(source: str) -> set[str]:
    """Everything private that a file takes from khot: `khot._x`, `khot.x._y`, or such an attribute of a module."""
    names, modules = set(), {"khot": "khot"}  # modules by the name they have in the file
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.add(alias.name)
                modules[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names.add(f"{node.module}.{alias.name}")
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            first, _, rest = owner.partition(".")
            names.add(".".join(filter(None, (modules.get(first, first), rest, node.attr))))
    return {
        name
        for name in names
        if name.partition(".")[0] == "khot" and any(part.startswith("_") for part in name.split("."))
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_name_of_khot_is_used(path):
    assert not private_names(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    [
        "import khot._math",
        "import khot._math as m",
        "from khot._math import threshold",
        "from khot.nn._router import Route",
        "from khot.bench import _measure",
        "from khot import _process as process",
        "import khot\nkhot.nn._router.width(1)",
        "from khot import nn\nnn._router",
        "def f():\n    from khot.sae._run import train",
    ],
)
def test_private_names_are_found(source):
    """Negative controls."""
    assert private_names(source)


def test_public_names_are_not_called_private():
    source = (
        "import khot\nfrom khot.nn import SparseAutoencoder as S\nfrom khot.sae import train\nkhot.__version__\nS._x"
    )
    assert private_names(source) == {"khot.nn.SparseAutoencoder._x"}
    assert not private_names("import _thread\nfrom benchmarks import common\ncommon._x\nself._y")
