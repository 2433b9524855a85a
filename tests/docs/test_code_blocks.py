"""Every code block of README and docs runs as a reader would paste it.

Blocks of `python` and of shell commands are run here, from top to bottom of their page, in one fresh namespace and an
empty folder. `pycon` blocks are run by `make doctest`. A block that cannot be run says why, in a comment before it:
`<!-- not run: … -->`.
"""

import doctest

import fences
import pytest
from fences import ROOT, SHELL, SHOWN, Block, blocks

REASONS = {"it downloads a model", "it needs pyro-ppl"}  # the only ones that are accepted
MOST_NOT_RUN = 3
PAGES = fences.pages()
WITH_CODE = [
    page for page in PAGES if any(b.language in ("python", *SHELL) for b in blocks(page.read_text(encoding="utf-8")))
]


def named(page):
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("page", WITH_CODE, ids=named)
def test_code_runs_and_prints_what_the_page_says(page, tmp_path):
    for block, printed in fences.run(page, tmp_path):
        if block.output is not None:
            assert prints(printed, block.output), f"line {block.line} prints:\n{printed}\nnot:\n{block.output}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_has_a_language_that_is_run_or_only_shown(page):
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language in ("python", *SHELL, *SHOWN), f"line {block.line}: {block.language!r}"


def test_few_blocks_are_not_run_and_each_says_why():
    not_run = [(named(page), b.reason) for page in PAGES for b in blocks(page.read_text(encoding="utf-8")) if b.reason]
    assert {reason for _, reason in not_run} <= REASONS, not_run
    assert len(not_run) <= MOST_NOT_RUN, not_run


def test_blocks_are_found():
    """So that a page cannot pass because nothing is read from it."""
    count = sum(b.language == "python" for page in PAGES for b in blocks(page.read_text(encoding="utf-8")))
    assert count >= 10
    assert any(b.language in SHELL for b in blocks((ROOT / "README.md").read_text(encoding="utf-8")))


def prints(got, expected):
    """Return whether an output is the expected one, by the rules of the doctests here."""
    return doctest.OutputChecker().check_output(expected, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


PAGE = """Words.

```python
import math
x = 2
print(math.sqrt(x))
```

```text
1.414...
```

!!! note
    ```sh
    KEY=1 python -c "open('made.txt', 'w').write('4')"  # a comment
    ```

```python
print(x + int(open("made.txt").read()))
```
"""


def test_a_page_is_run_from_top_to_bottom_in_one_namespace(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    found = fences.run(page, tmp_path)
    assert [printed for _, printed in found] == ["1.4142135623730951\n", "6\n"]
    assert prints(found[0][1], found[0][0].output)
    assert found[1][0].output is None
    assert [b.line for b in blocks(PAGE)] == [4, 10, 15, 19]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nprint(torch)\n```\n", "NameError: name 'torch'"),  # nothing is imported for the reader
        ("```python\nx = 1\nassert x == 2\n```\n", "line 3"),  # the line of the page
        ("```python\nopen('acts.npz')\n```\n", "acts.npz"),
        ("```sh\nkhot sae acts.npz\n```\n", "acts.npz"),
        ("```sh\nkhot select --no-such-option\n```\n", "--no-such-option"),
        ("```console\n$ khot nothing\noutput\n```\n", "nothing"),
    ],
)
@pytest.mark.slow
@pytest.mark.long
def test_a_broken_block_fails(text, message, tmp_path):
    """Negative controls."""
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(RuntimeError, match=message):
        fences.run(page, tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("make no-such-target", "no target no-such-target"),
        ("pip install '.[cli,nothing]'", "no extra nothing"),
        ("pip install 'khot[cli]'", "by name"),
        ("python -m pip install khot", "by name"),
        ("python examples/no_such_file.py", "no file"),
        ("python -m benchmarks.no_such_module", "no module"),
        ("make test && rm -rf build", "rm is not a command"),
    ],
)
def test_a_wrong_command_is_found(line, message):
    """Negative controls."""
    with pytest.raises(ValueError, match=message):
        [fences.step(command) for command in fences.commands(Block("sh", line + "\n", 1))]


def test_right_commands_are_not_called_wrong():
    lines = [
        "make TORCH=torch run  # words",
        ".venv/bin/pip install .",
        "KEY=1 python -m benchmarks.grid \\",
        "  --quick",
    ]
    text = "\n".join([*lines, "khot bench"])
    assert fences.commands(Block("sh", text, 1))[2] == ["python", "-m", "benchmarks.grid", "--quick"]
    steps = [fences.step(command) for command in fences.commands(Block("sh", text, 1))]
    assert [todo and todo[1:4] for todo in steps] == [
        None,
        None,
        ["-m", "benchmarks.grid", "--help"],
        ["-m", "khot", "bench"],
    ]


def test_a_block_that_is_not_run_says_why():
    found = blocks("<!-- not run: it downloads a model -->\n\n```python\nload()\n```\n\n```python\n1\n```\n")
    assert [block.reason for block in found] == ["it downloads a model", None]


def test_a_wrong_output_is_found():
    assert not prints("1.5\n", "1.4\n")
    assert prints("1  2\n", "1 2\n")
