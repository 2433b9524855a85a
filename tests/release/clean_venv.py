"""Clean virtual environments, made in a second each: torch and numpy are linked from the environment that runs this."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CORE = ("torch", "numpy")  # what khot itself needs


def tracked_files() -> list[str]:
    """Return what git tracks, and what it would track if it were added."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(name for name in set(files) if (ROOT / name).is_file())


def copy_sources(folder: Path) -> Path:
    """Copy the sources: a build writes its library beside them, and that of the editable install must stay."""
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
        (folder / name).chmod((ROOT / name).stat().st_mode)
    return folder


def closure(names: tuple[str, ...]) -> dict[str, Distribution]:
    """Return the installed distributions of these names and all that they depend on."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # for another platform
            continue
        for line in found[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


class CleanVenv:
    """A virtual environment that has the distributions of `links` and nothing else.

    Linked distributions are pinned by a constraint, so that pip never writes through a link.
    """

    def __init__(self, folder: Path, links: tuple[str, ...] = CORE) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True, with_pip=False)
        self.bin = folder / "bin"
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        pins = []
        for name, linked in closure(links).items():
            pins.append(f"{name}=={linked.version}")
            for top in {Path(file).parts[0] for file in linked.files or ()} - {"..", "__pycache__"}:
                if not (self.site / top).exists():
                    (self.site / top).symlink_to(Path(str(linked.locate_file(top))).resolve())
        self.pins = folder / "pins.txt"
        self.pins.write_text("\n".join(pins) + "\n")

    def pip(self, *arguments: str, cwd: Path = ROOT, **environment: str) -> None:
        """Run pip on this environment, and show what it printed only if it failed."""
        command = [sys.executable, "-m", "pip", "--quiet", "--python", str(self.bin / "python"), *arguments]
        command += ["--no-compile", "--constraint", str(self.pins)]
        done = subprocess.run(
            command, cwd=cwd, env=_environment(environment), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"pip {' '.join(arguments)}: {done.stdout}{done.stderr}")

    def run(self, *command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment, and return what it printed."""
        program = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(
            program, cwd=cwd, env=_environment(environment), capture_output=True, text=True, check=False
        )


def _environment(more: dict[str, str]) -> dict[str, str]:
    """Return the environment without what would let another khot or another terminal in."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return plain | {"COLUMNS": "100", "NO_COLOR": "1", "OMP_WAIT_POLICY": "passive"} | more
