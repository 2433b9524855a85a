"""Build the native library with the package if there is a C++ compiler (GCC or Clang), and say so if there is none."""

from __future__ import annotations

import hashlib
import os
import platform
import re
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


# What is built into khot/kernels: the library, the extensions that call it, and a note: how it went, and of what.
LIBRARY, EXTENSION, NOTE = "libkhot.so", "_direct.abi3.so", "build.txt"
HEADERS = "with the headers of torch"  # in the note, if WITH_TORCH was made
WITH_TORCH = "_direct_torch" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")


class NativeBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Make hatch build a platform wheel with the library, or a pure one without."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and name what was built."""
        kernels = Path(self.root) / "src" / "khot" / "kernels"
        print(f"khot: native library {build(kernels)}", file=sys.stderr)
        names = [name for name in (LIBRARY, EXTENSION, WITH_TORCH, NOTE) if (kernels / name).exists()]
        build_data["artifacts"] += [f"src/khot/kernels/{name}" for name in names]
        if LIBRARY in names:
            build_data["pure_python"] = False
            python = "cp311-abi3-" if EXTENSION in names else "py3-none-"
            build_data["tag"] = python + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def build(kernels: Path) -> str:
    """Compile the library and the extensions into a folder, and return a line that says how it went.

    What was made whole from the same sources by the same compiler for the same torch is left as it is. With
    KHOT_BUILD=portable, which wheels for others need, nothing is made for one torch alone.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    compiler = named or [path for path in (shutil.which(name) for name in ("c++", "g++", "clang++")) if path][:1]
    torch = None if os.environ.get("KHOT_BUILD") == "portable" else installed_torch()
    given = (compiler, said(compiler, "--version"), torch, sysconfig.get_path("include"), platform.machine())
    key = hashlib.sha256(repr(given).encode())
    for source in (Path(__file__), *sorted((kernels / "native").glob("*.*"))):
        key.update(source.read_bytes())
    note = kernels / NOTE
    written = note.read_text().splitlines() if note.exists() else []
    if written[1:] == [key.hexdigest()]:
        names = (LIBRARY, EXTENSION, *([WITH_TORCH] if HEADERS in written[0] else []))
        if all((kernels / name).exists() for name in names):
            return written[0]
    # The note goes first and comes last, so what an interruption leaves is not taken for whole. Extensions of other
    # Pythons go too, because the note names one torch.
    for path in (note, kernels / LIBRARY, kernels / EXTENSION, *kernels.glob("_direct_torch*")):
        path.unlink(missing_ok=True)
    outcome = compile_all(kernels, compiler, torch)
    note.write_text(f"{outcome}\n{key.hexdigest()}\n")
    return outcome


def compile_all(kernels: Path, compiler: list[str], torch: tuple[str, str] | None) -> str:
    """Compile with a compiler, and for a torch, and return the line."""
    if not compiler or not shutil.which(compiler[0]):
        return (
            "not built: no C++ compiler (looked for $CXX, c++, g++, clang++; GCC or Clang is needed, MSVC will not do)"
        )
    if not is_gnu(compiler):
        return f"not built: {Path(compiler[0]).name} is not GCC or Clang, which khot needs"
    sources = kernels / "native"
    # Python computes the same number from the same file, and refuses a library that was built from another one.
    abi = "-DKHOT_ABI=0x" + hashlib.sha256((sources / "khot.h").read_bytes()).hexdigest()[:8]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    version = said(compiler, "--version")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:  # minutes of one core
        probe = ["-fopenmp", "-shared", "-fPIC", "-x", "c++", os.devnull, "-o", f"{folder}/probe"]
        openmp = [] if run([*compiler, *probe]) else ["-fopenmp"]  # Apple's Clang has none
        # The library uses the copy of GNU's OpenMP that torch has loaded (kernels/_native.py). If it named libgomp.so.1
        # itself, it would get a second one, with threads of its own, wherever torch's copy has another name.
        runtime = [] if sys.platform == "linux" and "clang" not in version.lower() else openmp
        chosen = [source for source in sorted(sources.glob("*.cpp")) if x86 or source.name not in WIDE]
        objects = {source: f"{folder}/{source.stem}.o" for source in chosen}
        common = [*compiler, *FLAGS, *openmp, abi]
        parts = {
            source: pool.submit(run, [*common, *WIDE.get(source.name, []), "-c", str(source), "-o", to])
            for source, to in objects.items()
        }
        # The extensions have Python's functions from the process that loads them, and the library's by their addresses.
        # They name the C library, of which they call nothing, because auditwheel wants to know which one it is.
        late = {"darwin": ["-undefined", "dynamic_lookup"], "linux": ["-Wl,--no-as-needed", "-lc"]}.get(
            sys.platform, []
        )
        direct = [*compiler, *FLAGS, abi, "-I" + sysconfig.get_path("include"), "-shared", str(sources / "direct.cc")]
        extension = pool.submit(run, [*direct, *late, "-o", f"{folder}/{EXTENSION}"])
        twin = (
            pool.submit(run, [*direct, *of_torch(torch[1]), *late, "-o", f"{folder}/{WITH_TORCH}"]) if torch else None
        )
        for source, part in parts.items():
            if failure := part.result():
                return f"not built: {source.name}: {failure}"
        if failure := run([*compiler, "-shared", *runtime, *objects.values(), "-o", f"{folder}/{LIBRARY}"]):
            return f"not built: linking: {failure}"
        shutil.move(f"{folder}/{LIBRARY}", kernels / LIBRARY)
        lack = extension.result()
        if not lack:
            shutil.move(f"{folder}/{EXTENSION}", kernels / EXTENSION)
        without = twin.result() if twin else "built for every torch"
        if not without:
            shutil.move(f"{folder}/{WITH_TORCH}", kernels / WITH_TORCH)
    name = version.splitlines()[0] if version else Path(compiler[0]).name
    single = "" if openmp else ", without OpenMP: one thread"
    small = f", without the extension for small calls: {lack}" if lack else ""
    of = f", without a node in C++: {without}" if without else f", {HEADERS} {torch[0] if torch else ''}"
    return f"built by {name}{single}{small}{of}"


def installed_torch() -> tuple[str, str] | None:
    """Return the version and the folder of the torch beside which khot is installed, without importing it.

    pip builds in an environment of its own, which it makes by variables that `-I` ignores.
    """
    code = "import importlib.util as u; s = u.find_spec('torch'); print(*(s.submodule_search_locations if s else ()))"
    folder = said([sys.executable], "-I", "-c", code).strip()
    version = Path(folder, "version.py")
    if not folder or not version.exists() or not Path(folder, "include", "torch").is_dir():
        return None
    found = re.search(r"^__version__ = ['\"](.+)['\"]", version.read_text(encoding="utf-8"), re.MULTILINE)
    return (found[1], folder) if found else None


def of_torch(folder: str) -> list[str]:
    """Return the compiler's options for an extension that has torch's headers. Its libraries are loaded before it."""
    headers = ["-isystem", f"{folder}/include", "-isystem", f"{folder}/include/torch/csrc/api/include"]
    libraries = [f"-L{folder}/lib", "-Wl,--no-as-needed", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    return ["-DKHOT_TORCH", *headers, *(libraries if sys.platform == "linux" else [])]


def is_gnu(compiler: list[str]) -> bool:
    """Return whether a compiler is GCC or Clang, by the macros that it says it defines; MSVC cannot even say them."""
    macros = said(compiler, "-dM", "-E", "-x", "c++", os.devnull)
    return any(f"#define {name} " in macros for name in ("__GNUC__", "__clang__"))


def said(command: list[str], *options: str) -> str:
    """Return what a command prints, or nothing if it fails."""
    try:
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    except (OSError, IndexError):
        return ""
    return done.stdout if done.returncode == 0 else ""


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
