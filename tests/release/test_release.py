"""What a release says of itself: one version everywhere, a changelog that has it, steps that name what exists."""

import re
import tomllib
from pathlib import Path

import pytest

import khot._version

ROOT = Path(__file__).parents[2]
HEADING = re.compile(r"^## (\d+\.\d+\.\d+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", re.MULTILINE)


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def version_problems(version, changelog, citation):
    """Return how the newest heading of the changelog and CITATION.cff disagree with the version."""
    newest, date = HEADING.search(changelog).groups()
    cited = re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1]
    released = re.search(r"^date-released: (\S+)$", citation, re.MULTILINE)
    problems = []
    if newest != version:
        problems.append(f"CHANGELOG.md begins with {newest}, the code is {version}")
    if cited != version:
        problems.append(f"CITATION.cff has {cited}, the code is {version}")
    if (released[1] if released else "unreleased") != date:
        problems.append(f"CITATION.cff was released {released and released[1]}, CHANGELOG.md says {date}")
    return problems


def test_one_version_everywhere():
    version, changelog, citation = khot._version.__version__, read("CHANGELOG.md"), read("CITATION.cff")
    assert version_problems(version, changelog, citation) == []
    assert len(version_problems("9.9.9", changelog, citation)) == 2
    dated = HEADING.sub("## 0.1.0 (2030-01-01)", changelog, count=1)
    assert len(version_problems(version, dated, citation + "\ndate-released: 2030-01-02\n")) == 1


def test_every_heading_of_the_changelog_is_a_version():
    headings = re.findall(r"^## .*$", read("CHANGELOG.md"), re.MULTILINE)
    assert headings
    assert all(HEADING.fullmatch(heading) for heading in headings), headings
    versions = [tuple(map(int, version.split("."))) for version, _ in HEADING.findall(read("CHANGELOG.md"))]
    assert versions == sorted(set(versions), reverse=True)
    dates = [date for _, date in HEADING.findall(read("CHANGELOG.md"))]
    assert "unreleased" not in dates[1:], "only the newest version can be unreleased"


@pytest.mark.parametrize("page", ["RELEASING.md", "CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_the_targets_that_pages_name_exist(page):
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    named = {word for line in re.findall(r"`make ([\w -]+)`", read(page)) for word in line.split()}
    assert named
    assert named <= targets, named - targets


def test_workflows_run_targets_that_exist():
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    text = read(".github/workflows/ci.yml") + read(".github/workflows/wheels.yml")
    named = set(re.findall(r"run: make ([\w-]+)", text))
    assert {"check", "wheels"} <= named <= targets
    assert "run: .ci/run" in text


def test_every_supported_python_is_in_the_matrix():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    declared = {line.rsplit(" ", 1)[1] for line in project["classifiers"] if re.search(r"Python :: 3\.\d", line)}
    matrix = re.search(r"^        python: \[(.*)\]$", read(".github/workflows/ci.yml"), re.MULTILINE)[1]
    assert declared == set(re.findall(r"[\d.]+", matrix))
    floor = next(line for line in project["dependencies"] if line.startswith("torch")).removeprefix("torch>=")
    assert f"torch=={floor}.0" in read(".github/workflows/ci.yml")


def test_actions_are_pinned_by_their_commit():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))
        assert used
        assert all(re.search(r"@[0-9a-f]{40}$", action) for action in used), used
