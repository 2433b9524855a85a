"""Walk through the README as a newcomer does: install it, run its commands, and compare what they print.

There is a clean environment for the core alone, one without a compiler, and one for each extra. `pip install` runs in a
copy of the sources, as in a clone. The walk goes on after a check that fails, and lists the failures at the end.
"""

import json
import os
import re
import shlex
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from clean_venv import ROOT, CleanVenv, copy_sources
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "src/khot/_version.py").read_text())[1]
README = (ROOT / "README.md").read_text()
LEFT_OUT = {"test", "docs", "lint", "release", "study"}  # the Makefile's extras, which CI installs anyway; an old name
INSTALL = re.compile(r"pip install '\.\[([\w,]+)\]'")
NO_COMPILER = {"CXX": "no-such-compiler"}

COMMANDS = {
    "select": ("khot", "select", "table.csv", "--target", "y", "-k", "2", "--out", "chosen"),
    "sae": ("khot", "sae", "acts.npz", "--k", "3", "--latents", "64", "--steps", "12", "--out", "sae"),
    "cli": ("khot", "bench", "--shape", "16x64", "--k", "4", "--budget", "0.05"),
    "sklearn": ("python", "-c", "from khot.sklearn import KHotSelector; print(KHotSelector(2))"),
}
"""What needs an extra: without it, the message names the extra; with it, the command works."""

PRINTED = {"select": ("report.html",), "sae": ("FVU",), "cli": ("sigmoid_topk",), "sklearn": ("KHotSelector",)}
WRITTEN = {"select": ("chosen/report.html", "chosen/selection.json"), "sae": ("sae/sae_weights.safetensors",)}
HF = """
import transformers, khot.hf
small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=2, num_experts_per_tok=2, num_local_experts=4)
print(khot.hf.swap_routers(transformers.MixtralForCausalLM(transformers.MixtralConfig(**small))))
"""

START = time.monotonic()
failures: list[str] = []


def check(condition: object, what: str, shown: str = "") -> bool:
    """Print a line for a check, with what was seen if it failed."""
    print(f"[{time.monotonic() - START:4.0f} s] {'ok    ' if condition else 'FAILED'} {what}", flush=True)
    if not condition:
        failures.append(what)
        print(*(f"         | {line}" for line in shown.strip().splitlines()[-12:]), sep="\n", flush=True)
    return bool(condition)


class Place:
    """A clean environment, a clone to install from, and a folder of data to work in."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.clone, self.work = name, copy_sources(folder / name / "clone"), folder / name / "work"
        self.venv = CleanVenv(folder / name / "venv")
        write_data(self.work)

    def install(self, command: str, **environment: str) -> "Place":
        """Run the command of a message or of the README, as it stands there."""
        words = shlex.split(command, comments=True)
        if words[:2] != ["pip", "install"]:
            raise ValueError(f"a command of pip is wanted; got {command}")
        self.venv.pip(*words[1:], cwd=self.clone, **environment)
        return self

    def says(self, what: str, *command: str, has: tuple[str, ...] = (), code: int = 0) -> str:
        """Check the exit code of a command and the words that it prints; return all that it printed."""
        done = self.venv.run(*command, cwd=self.work)
        text = done.stdout + done.stderr
        missing = [words for words in has if words not in text]
        seen = f"exit code {done.returncode}; not printed: {missing}\n{text}"
        check(bool(done.returncode) == bool(code) and not missing, f"{self.name}: {what}", seen)
        return text


def write_data(folder: Path) -> None:
    """Write a small table whose columns a and c decide y, and a few activations."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 6))
    rows = [",".join(f"{v:.6f}" for v in row) + f",{int(row[0] + 2 * row[2] > 0)}" for row in x]
    (folder / "table.csv").write_text("\n".join(["a,b,c,d,e,f,y", *rows]) + "\n")
    np.savez(folder / "acts.npz", acts=rng.standard_normal((600, 16)).astype("float32"))


def five_lines() -> tuple[str, str]:
    """Return the first Python block of the README and the block after it, which shows what it prints."""
    found = re.search(r"```python\n(.*?)```\s+```text\n(.*?)```", README, re.DOTALL)
    assert found is not None, "the README begins with a Python block and its output"
    return found[1], found[2]


def walk_five_lines(place: Place) -> None:
    """Run the first block of the README, and compare what it prints with what the README shows."""
    code, shown = five_lines()
    printed = place.venv.run("python", "-c", code, cwd=place.work).stdout
    right = printed.split() == shown.split() and shown.count("tensor(") >= 2
    check(right, f"{place.name}: the README's five lines give its numbers", f"{shown}\n{printed}")


def walk_core(place: Place) -> list[tuple[str, str]]:
    """Walk through what the core can do alone; return the extras that messages name, and their commands."""
    place.says("khot --version", "khot", "--version", has=(f"khot {VERSION}",))
    place.says("python -m khot --version", "python", "-m", "khot", "--version", has=(f"khot {VERSION}",))
    place.says("khot info names the native kernel", "khot", "info", has=(f"khot {VERSION}", "torch", "cpu: native"))
    commands = ("select", "sae", "bench", "info", "tour")
    place.says("khot --help lists the commands", "khot", "--help", has=commands)
    script = str(place.venv.bin / "khot")
    done = place.venv.run("python", "-X", "importtime", script, "--help", cwd=place.work)
    imports = re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE)
    check("re" in imports and "torch" not in imports, "core: khot --help does not import torch", done.stderr)
    walk_five_lines(place)
    named = [walk_missing(place, extra) for extra in COMMANDS]
    return [pair for pair in named if pair]


def name_of(extra: str) -> str:
    """Return what a reader calls the command that needs an extra."""
    command = COMMANDS[extra]
    return " ".join(command[:2]) if command[0] == "khot" else f"khot.{extra}"


def walk_missing(place: Place, extra: str) -> tuple[str, str] | None:
    """Check that a command without its extra says at once how to get it."""
    begin = time.monotonic()
    command = [word for word in COMMANDS[extra] if word not in ("--steps", "12", "60")]  # would train for minutes
    done = place.venv.run(*command, cwd=place.work)
    text, took = done.stdout + done.stderr, time.monotonic() - begin
    found = INSTALL.search(" ".join(text.split()))
    name = name_of(extra)
    check(done.returncode and found and found[1] == extra, f"{place.name}: {name} says pip install '.[{extra}]'", text)
    if command[0] == "khot":
        check(text.count("\n") <= 2 and "Traceback" not in text, f"{place.name}: {name} says it in a line or two", text)
    check(took < 60, f"{place.name}: {name} says it before any work", f"{took:.0f} s")
    check(not (place.work / "sae").exists(), f"{place.name}: {name} leaves nothing behind")
    return (extra, found[0]) if found else None


def walk_extra(place: Place, extra: str) -> None:
    """Check what an extra is for."""
    place.says("khot info", "khot", "info", has=(f"khot {VERSION}",))
    names = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    wanted = [each.name for each in names if each.name != "khot" and (not each.marker or each.marker.evaluate())]
    code = f"from importlib.metadata import version; print([version(name) for name in {wanted}])"
    place.says(f"the packages of {extra} are there", "python", "-c", code)
    if extra in COMMANDS:
        place.says(name_of(extra), *COMMANDS[extra], has=PRINTED[extra])
        for file in WRITTEN.get(extra, ()):
            check((place.work / file).is_file(), f"{place.name}: {file} is there")
        if extra == "select":
            chosen = [row["name"] for row in json.loads((place.work / "chosen/selection.json").read_text())["selected"]]
            check(sorted(chosen) == ["a", "c"], f"{place.name}: it chose the columns that matter", str(chosen))
    if extra == "cli":
        walk_missing(place, "select")
        walk_missing(place, "sae")
    if extra == "select":
        code = "import polars; polars.read_csv('table.csv').write_parquet('table.parquet')"
        place.says("a Parquet file", "python", "-c", code)
        command = ["table.parquet" if word == "table.csv" else word for word in COMMANDS["select"]]
        place.says("khot select on a Parquet file", *command, has=PRINTED["select"])
    if extra == "hf":
        place.says("khot.hf on a small Mixtral", "python", "-c", HF, has=("model.layers.0.mlp.gate",))


def main() -> None:
    """Walk, and exit with 1 if a check failed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = re.findall(r"^pip install \.(?:\s.*)?$", README, re.MULTILINE)
    check(lines, "the README says pip install .")
    told = {
        name for names in INSTALL.findall(README) + re.findall(r"'\.\[([\w,]+)\]'", README) for name in names.split(",")
    }
    extras = PROJECT["optional-dependencies"]
    check(told <= set(extras), f"the README's extras exist: {', '.join(sorted(told))}", str(told - set(extras)))

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        core = pool.submit(lambda: Place(folder, "core").install("pip install ."))
        bare = pool.submit(lambda: Place(folder, "no compiler").install("pip install .", **NO_COMPILER))
        walks = {}
        for extra in sorted(set(extras) - LEFT_OUT):
            # The kernel is compiled where a command computes for long; elsewhere that would only take time.
            environment = {} if extra in ("select", "sae") else NO_COMPILER
            command = f"pip install '.[{extra}]'"
            walks[extra] = pool.submit(
                lambda extra=extra, command=command, environment=environment: Place(folder, extra).install(
                    command, **environment
                )
            )
        named = walk_core(core.result())
        check(all(extra in walks for extra, _ in named), "the messages name extras that exist", str(named))
        bare.result().says(
            "khot info says why it is eager",
            "khot",
            "info",
            has=("eager torch (native library not built: no C++ compiler",),
        )
        walk_five_lines(bare.result())
        for extra, place in walks.items():
            walk_extra(place.result(), extra)
    print(f"walk: {len(failures)} failures in {time.monotonic() - START:.0f} s", *failures, sep="\n  ")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
