"""Write the code of examples/ and what it prints into the pages of docs/recipes/.

`python docs/make_recipes.py` rewrites the code of every page. With `--run [name …]` it also runs the examples, all of
them or those named, and rewrites the outputs. Tests compare pages, files and outputs.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES, EXAMPLES = ROOT / "docs" / "recipes", ROOT / "examples"
NO_RECIPE = {"minilm_sae", "certified_minilm"}  # they need a language model: see docs/sae.md and docs/attention.md
NO_RECIPE |= {"lightning_ranks", "accelerate_ranks"}  # they start two processes: see docs/distributed.md
TIMEOUT = 600.0  # seconds, for a machine that is busy with other things


def names() -> list[str]:
    """Return the names of the examples that are recipes."""
    return sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in NO_RECIPE)


def output_of(name: str) -> str:
    """Run an example from the root of the clone, as its page says, on one thread; return what it prints."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, f"examples/{name}.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with exit code {done.returncode}:\n{done.stderr}")
    return done.stdout


def part_of(page: str, what: str) -> str:
    """Return the text of the code block between the markers `<!-- what -->` and `<!-- /what -->`."""
    return _block(what).search(page)["text"]


def with_part(page: str, what: str, text: str) -> str:
    """Return the page with another text in that code block."""
    language = {"code": "python", "output": "text"}[what]
    block = f"<!-- {what} -->\n```{language}\n{text.rstrip()}\n```\n<!-- /{what} -->"
    changed, count = _block(what).subn(lambda _: block, page)
    if count != 1:
        raise ValueError(f"a page must have one pair of markers <!-- {what} --> and <!-- /{what} -->; got {count}")
    return changed


def _block(what: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- {what} -->\n(?:```\w+\n)?(?P<text>.*?)(?:```\n)?<!-- /{what} -->", re.DOTALL)


def main() -> None:
    """Rewrite the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", metavar="name", help="run these examples too, or all if none is named")
    chosen = parser.parse_args().run
    for name in names():
        path = PAGES / f"{name}.md"
        page = path.read_text(encoding="utf-8")
        page = with_part(page, "code", (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
        if chosen is not None and name in (chosen or names()):
            page = with_part(page, "output", output_of(name))
            print(f"ran examples/{name}.py")
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
