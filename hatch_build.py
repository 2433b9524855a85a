"""Build the native library with the package if there is a C++ compiler (GCC or Clang), and say so if there is none."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off"]
# Files that only some processors run; the library asks before it calls them.
WIDE = {
    "avx2.cpp": ["-mavx2", "-mfma"],
    "avx512.cpp": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"],
}


class NativeBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Make hatch build a platform wheel with the library, or a pure one without."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and record the outcome beside the library for `khot.kernels.status()`."""
        kernels = Path(self.root) / "src" / "khot" / "kernels"
        library, extension = kernels / "libkhot.so", kernels / "_direct.abi3.so"
        library.unlink(missing_ok=True)
        extension.unlink(missing_ok=True)
        outcome = build(kernels / "native", library, extension)
        (kernels / "build.txt").write_text(outcome + "\n")
        print(f"khot: native library {outcome}", file=sys.stderr)
        build_data["artifacts"] += [f"src/khot/kernels/{name}" for name in (library.name, extension.name, "build.txt")]
        if library.exists():
            build_data["pure_python"] = False
            python = "cp311-abi3-" if extension.exists() else "py3-none-"
            build_data["tag"] = python + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def build(sources: Path, library: Path, extension: Path) -> str:
    """Compile the library and the extension that calls it, and return a line that says how it went."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [path for path in (shutil.which(name) for name in ("c++", "g++", "clang++")) if path][:1]
    if not found or not shutil.which(found[0]):
        return (
            "not built: no C++ compiler (looked for $CXX, c++, g++, clang++; GCC or Clang is needed, MSVC will not do)"
        )
    if not is_gnu(found):
        return f"not built: {Path(found[0]).name} is not GCC or Clang, which khot needs"
    # Python computes the same number from the same file, and refuses a library that was built from another one.
    abi = "-DKHOT_ABI=0x" + hashlib.sha256((sources / "khot.h").read_bytes()).hexdigest()[:8]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    version = subprocess.run([*found, "--version"], capture_output=True, text=True, check=False).stdout
    with tempfile.TemporaryDirectory() as folder:
        probe = ["-fopenmp", "-shared", "-fPIC", "-x", "c++", os.devnull, "-o", f"{folder}/probe"]
        openmp = [] if run([*found, *probe]) else ["-fopenmp"]  # Apple's Clang has none
        # The library uses the copy of GNU's OpenMP that torch has loaded (kernels/_native.py). If it named libgomp.so.1
        # itself, it would get a second one, with threads of its own, wherever torch's copy has another name.
        runtime = [] if sys.platform == "linux" and "clang" not in version.lower() else openmp
        chosen = [source for source in sorted(sources.glob("*.cpp")) if x86 or source.name not in WIDE]
        objects = [f"{folder}/{source.stem}.o" for source in chosen]
        common = [*found, *FLAGS, *openmp, abi]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # a few minutes of one core
            parts = zip(chosen, objects, strict=True)
            failures = pool.map(lambda p: run([*common, *WIDE.get(p[0].name, []), "-c", str(p[0]), "-o", p[1]]), parts)
        for source, failure in zip(chosen, failures, strict=True):
            if failure:
                return f"not built: {source.name}: {failure}"
        failure = run([*found, "-shared", *runtime, *objects, "-o", f"{folder}/{library.name}"])
        if failure:
            return f"not built: linking: {failure}"
        shutil.move(f"{folder}/{library.name}", library)
        # The extension has Python's functions from the process that loads it, and the library's by their addresses. It
        # names the C library, of which it calls nothing, because auditwheel wants to know which one it is.
        late = {"darwin": ["-undefined", "dynamic_lookup"], "linux": ["-Wl,--no-as-needed", "-lc"]}.get(
            sys.platform, []
        )
        flags = [*FLAGS, abi, "-I" + sysconfig.get_path("include"), "-shared"]
        lack = run([*found, *flags, str(sources / "direct.cc"), *late, "-o", f"{folder}/{extension.name}"])
        if not lack:
            shutil.move(f"{folder}/{extension.name}", extension)
    name = version.splitlines()[0] if version else Path(found[0]).name
    single = "" if openmp else ", without OpenMP: one thread"
    return f"built by {name}{single}" + (f", without the extension for small calls: {lack}" if lack else "")


def is_gnu(compiler: list[str]) -> bool:
    """Return whether a compiler is GCC or Clang, by the macros that it says it defines; MSVC cannot even say them."""
    try:
        asked = [*compiler, "-dM", "-E", "-x", "c++", os.devnull]
        said = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return False
    return said.returncode == 0 and any(f"#define {name} " in said.stdout for name in ("__GNUC__", "__clang__"))


def run(command: list[str]) -> str | None:
    """Run a compiler and return the first line of its error message, or None if it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["failed"]
    return lines[0]
