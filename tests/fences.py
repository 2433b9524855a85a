"""The code blocks of Markdown pages: read them, check their shell commands, run a page as a reader would paste it."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<ticks>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=ticks) *$", re.M | re.S
)
MARKER = re.compile(r"<!-- not run: (?P<reason>.+?) -->\s*\Z")
SHELL = ("sh", "bash", "console")
SHOWN = ("text", "math", "pycon", "diff", "toml", "yaml", "json")  # pycon is run by `make doctest`
END = "\x1e"  # printed after each block, so that outputs can be told apart
TOY = {  # options that make a command quick, added to those of the page; later ones win
    "select": [],  # quick as it is
    "sae": ["--steps", "3", "--latents", "64", "--k", "4"],
    "bench": ["--shape", "8x16", "--k", "2", "--budget", "0.001"],
    "tour": ["--no-open"],
}


@dataclass(frozen=True)
class Block:
    """One code block of a page."""

    language: str
    text: str
    line: int  # of the page, where the text begins
    reason: str | None = None  # why it is not run, if a marker stands before it
    output: str | None = None  # the text block that follows at once, for python


def pages(root: Path = ROOT) -> list[Path]:
    """Return every page that a reader may paste from."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    """Return the code blocks of a page, in order."""
    found, matches = [], list(FENCE.finditer(page))
    for match, following in zip_longest(matches, matches[1:]):
        marker, output = MARKER.search(page[: match.start()]), None
        if following and following["language"].strip() == "text" and not page[match.end() : following.start()].strip():
            output = following["text"]
        indent = match["indent"]
        text = "".join(line.removeprefix(indent) for line in match["text"].splitlines(keepends=True))
        line = page.count("\n", 0, match.start("text")) + 1
        found.append(Block(match["language"].strip(), text, line, marker and marker["reason"], output))
    return found


def commands(block: Block) -> list[list[str]]:
    """Return the commands of a shell block, without comments and settings of the environment."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":  # what has no prompt is output
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found: list[list[str]] = []
    for line in lines:
        words = [[]]
        for word in shlex.split(line, comments=True):
            if word in ("&&", ";", "|", "||"):
                words.append([])
            elif words[-1] or not re.fullmatch(r"[A-Z_]+=\S*", word):
                words[-1].append(word)
        found += [command for command in words if command]
    return found


def step(command: list[str]) -> list[str] | None:
    """Return what to run for a command of a page, or None if there is nothing to run; raise if it cannot be right."""
    name, rest = command[0].removeprefix(".venv/bin/"), command[1:]
    if name == "khot":
        return [sys.executable, "-m", "khot", *rest, *TOY.get(rest[0] if rest else "", [])]
    if name == "torchrun":
        options = TOY.get(rest[rest.index("khot") + 1], []) if "khot" in rest else []
        return [sys.executable, "-m", "torch.distributed.run", *rest, *options]
    if name == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
        unknown = [word for word in rest if "=" not in word and word not in targets]
        if unknown:
            raise ValueError(f"the Makefile has no target {', '.join(unknown)}")
        return None
    if name == "pip" or (name == "python" and rest[:2] == ["-m", "pip"]):
        _check_install(rest)
        return None
    if name in ("python", "python3"):
        return _python(rest)
    if name in ("git", "cd", "source", "."):
        return None
    raise ValueError(f"{name} is not a command that tests/fences.py can check; teach it to, or leave the command out")


def _check_install(words: list[str]) -> None:
    """Raise unless `.[extra]` names extras that there are; khot itself is not on an index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        if match := re.fullmatch(r"(?P<what>\.|khot)(\[(?P<extras>[\w,-]+)\])?(==.*)?", word):
            if match["what"] == "khot":
                raise ValueError(f"{word} cannot be installed by name; say '.' and the extras, from a clone")
            unknown = set((match["extras"] or "").split(",")) - {"", *project["optional-dependencies"]}
            if unknown:
                raise ValueError(f"there is no extra {', '.join(sorted(unknown))}")


def _python(words: list[str]) -> list[str] | None:
    """Return a command that shows that a script or a module is there; code after -c is run as it is."""
    if words[0] == "-c":
        return [sys.executable, *words]
    if words[0] == "-m":
        if find_spec(words[1]) is None:
            raise ValueError(f"there is no module {words[1]}")
        return [sys.executable, "-m", words[1], "--help"]
    path = ROOT / words[0]
    if not path.is_file():
        raise ValueError(f"there is no file {words[0]}")
    if "argparse" not in path.read_text(encoding="utf-8"):  # a small example without options: tests/docs run them all
        return None
    return [sys.executable, str(path), "--help"]


def run(page: Path, folder: Path) -> list[tuple[Block, str]]:
    """Run the python and shell blocks of a page from top to bottom, in one fresh process and an empty folder.

    Blocks share one namespace, in which nothing is imported. Return each python block with what it printed.
    """
    wanted = [b for b in blocks(page.read_text(encoding="utf-8")) if b.reason is None and not is_example(b)]
    steps: list[tuple[int, str | list[str]]] = []
    for block in wanted:
        if block.language == "python":
            steps.append((block.line, block.text))
        elif block.language in SHELL:
            steps += [(block.line, todo) for command in commands(block) if (todo := step(command))]
    if not steps:
        return []
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    driver = [sys.executable, "-c", DRIVER, str(page)]
    done = subprocess.run(driver, input=json.dumps(steps), cwd=folder, env=env, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{page.name}: {done.stderr[-3000:]}")
    return list(zip((b for b in wanted if b.language == "python"), done.stdout.split(END), strict=False))


def is_example(block: Block) -> bool:
    """Return whether a block is one of the files in examples/, word for word: tests/docs run those by themselves."""
    return any(block.text == path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py"))


DRIVER = f"""
import json, subprocess, sys
page, names = sys.argv[1], {{"__name__": "__main__"}}
for line, todo in json.load(sys.stdin):
    if isinstance(todo, str):
        exec(compile("\\n" * (line - 1) + todo, page, "exec"), names)
        print(end={END!r}, flush=True)
    else:
        done = subprocess.run(todo, capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL)
        if done.returncode:
            sys.exit(f"{{page}}, line {{line}}: {{' '.join(todo)}}\\n{{done.stdout}}{{done.stderr}}")
"""
