"""Photograph the explorer for the docs: `python docs/make_explorer.py` writes docs/img/explorer*.png with Chromium.

The pictures depend on the fonts and the browser of the machine, so no test compares them.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OUT = Path(__file__).parent / "img"
EXPLORER = Path(__file__).parent / "explorer.html"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")
WIDTH, HEIGHT, ADDRESS = 1180, 858, "step=3"


def photograph(browser: str, theme: str, picture: Path) -> None:
    """Save a picture of the explorer."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}")
        page = f"{EXPLORER.as_uri()}#{ADDRESS}&theme={theme}"
        subprocess.run([browser, *FLAGS, *options, "--virtual-time-budget=3000", page], check=True)


if __name__ == "__main__":
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        sys.exit("The pictures of the explorer need Chromium: install the package chromium.")
    photograph(found, "light", OUT / "explorer.png")
    photograph(found, "dark", OUT / "explorer-dark.png")
