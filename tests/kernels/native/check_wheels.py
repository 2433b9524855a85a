"""Builds the wheel with and without a C++ compiler, and imports each: what `pip install .` gives on either machine."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
LOOK = """
import khot, torch
print(khot.__file__, khot.kernels.status()["cpu"], khot.sigmoid_topk(torch.ones(4), 2).tolist())
"""


def build(source: Path, folder: Path, **environment: str) -> tuple[str, str]:
    """The wheel's name, and what the package in it says of itself."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(pip, check=True, env=os.environ | environment)
    (wheel,) = folder.glob("khot-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    look = [sys.executable, "-c", LOOK]
    place = os.environ | {"PYTHONPATH": str(folder / "unpacked")}
    done = subprocess.run(look, check=True, env=place, cwd=folder, capture_output=True, text=True)
    if str(folder) not in done.stdout:
        raise SystemExit(f"another khot was imported: {done.stdout}")
    return wheel.name, done.stdout.partition(" ")[2].strip()


def main() -> None:
    cases = {
        "with a compiler": ({}, "-py3-none-", "native"),
        "without": (
            {"CXX": "no-such-compiler"},
            "-py3-none-any.whl",
            "eager torch (native library not built: no C++ compiler",
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        # The build writes beside the sources, and the editable install must keep its library.
        source = Path(folder) / "source"
        files = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in files.stdout.splitlines():
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).write_bytes((ROOT / name).read_bytes())
        for case, (environment, tag, kernel) in cases.items():
            place = Path(folder) / case.replace(" ", "-")
            place.mkdir()
            name, said = build(source, place, **environment)
            print(f"{case}: {name}: {said}")
            if tag not in name or kernel not in said or "[0.5, 0.5, 0.5, 0.5]" not in said:
                raise SystemExit(f"expected {tag} and {kernel!r}")
            if tag == "-py3-none-" and "-any" in name:
                raise SystemExit("a wheel with a library must be tagged for its platform")


if __name__ == "__main__":
    main()
