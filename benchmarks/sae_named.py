"""Latents of MiniLM that stand for a theme: the table and the pictures of docs/sae.md.

    python -m benchmarks.sae_named [--folder out/minilm]

Runs examples/minilm_sae.py, unless the folder has its results already; finds for each of the example's themes the
latent that fits best; writes docs/tables/sae-named.md. In Chromium, if there is one, it photographs the report at the
best of them: docs/img/sae-browser.png and docs/img/sae-browser-dark.png.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import common
from examples.minilm_sae import LAYER, TEXT, Named, contexts, named, stream
from khot.bench import markdown_table
from khot.nn import SparseAutoencoder
from khot.sae import Features, features

SHOWN, PURE = 8, 0.4  # rows of the table; the least purity of a latent with a name
SIZE = "1100,860"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=3000"),
)


def table(found: list[Named], of: Features, themes: int) -> str:
    """A line for each named latent: how pure it is, its words, and its strongest text."""
    lines = []
    for theme, latent, purity, recall, words in found:
        text = next(contexts(of, latent, 1)).replace("[", "**").replace("]", "**").replace("|", "\\|").replace("#", "")
        lines.append([theme, str(latent), f"{100 * purity:.0f}", f"{100 * recall:.0f}", ", ".join(words), text])
    head = [
        "theme",
        "latent",
        "purity, %",
        "recall, %",
        "words with most of its activation",
        "strongest text",
    ]
    return (
        "<!-- Written by benchmarks/sae_named.py; do not edit. -->\n\n"
        + markdown_table(head, lines)
        + f"\n\n{of.positions} tokens. Of {themes} lists of words, these are the ones with a latent of which at least "
        f"{100 * PURE:.0f} % of the activation is at words of the list (purity). Recall: at how many of these words in "
        "the text the latent is active.\n"
    )


def photograph(report: Path, latent: int, images: Path) -> None:
    """Write the two pictures of the report, with one latent open."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print("There is no Chromium: the pictures are left as they are.", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, scheme in (("sae-browser", 1), ("sae-browser-dark", 0)):
            look = (f"--window-size={SIZE}", f"--blink-settings=preferredColorScheme={scheme}")
            out = (f"--user-data-dir={folder}", f"--screenshot={(images / name).resolve()}.png")
            page = f"{report.resolve().as_uri()}#latent={latent}"
            subprocess.run([browser, *FLAGS, *look, *out, page], capture_output=True, check=True)


def main() -> int:
    parser = common.parser(__doc__, "a few steps")
    parser.add_argument("--folder", type=Path, default=Path("out/minilm"), help="what the example writes to")
    args = parser.parse_args()
    if not (args.folder / "report.html").exists():
        few = ["--steps", "3", "--batch-size", "256"] if args.quick else []
        script = str(common.ROOT / "examples" / "minilm_sae.py")
        subprocess.run([sys.executable, script, "--out", str(args.folder), *few], check=True)
    sae, data = SparseAutoencoder.load(args.folder), stream(TEXT.read_text(encoding="utf-8"), LAYER)
    tokens = data.row_tokens()
    of, found = features(sae, data, tokens=tokens, examples=3), named(sae, data, tokens)
    shown = [each for each in found if each.purity >= PURE][:SHOWN] or found[:1]
    places = common.places(args)
    common.write_table(places.tables / "sae-named.md", table(shown, of, len(found)))
    photograph(args.folder / "report.html", shown[0].latent, places.images)
    common.show(args, found, table(shown, of, len(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
