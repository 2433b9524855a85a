"""Photograph the report of `khot select` on scikit-learn's digits for docs/feature-selection.md.

`python docs/make_screenshot.py` runs `khot select -k 10 --out DIR`, which takes about a minute, and opens the report in
Chromium: docs/img/select-report.png and docs/img/select-report-dark.png show its beginning. With `--report FILE` it
photographs a report that there is.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OUT = Path(__file__).parent / "img"
WIDTH, TALLEST = 760, 1100
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
MEASURE = """<script>
const ends = [...document.querySelectorAll("section > *")].map(part => part.getBoundingClientRect().bottom);
document.title = "bottom " + Math.ceil(Math.max(...ends.filter(end => end <= %d)) + 12);
</script></html>"""
"""Finds the last paragraph, figure or table that ends in time, so that nothing is cut through."""


def photograph(browser: str, report: Path, folder: Path) -> None:
    """Write the two pictures."""
    copy = folder / "measured.html"
    text = report.read_text(encoding="utf-8").replace("default-src 'none'", "script-src 'unsafe-inline'")
    copy.write_text(text.replace("</html>", MEASURE % TALLEST), encoding="utf-8")
    options = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}"]
    dom = subprocess.run(
        [*options, f"--window-size={WIDTH},900", "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    height = int(re.search(r"<title>bottom (\d+)", dom)[1])
    for name, scheme in (("select-report", 1), ("select-report-dark", 0)):
        size = f"--window-size={WIDTH},{height}"
        look = f"--blink-settings=preferredColorScheme={scheme}"
        command = [*options, size, look, f"--screenshot={OUT / name}.png", report.as_uri()]
        subprocess.run(command, capture_output=True, check=True)


def main() -> None:
    """Make a report, or take one, and photograph it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="a report that there is; default: make one")
    report = parser.parse_args().report
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("This needs Chromium; there is none on the path.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if report is None:
            subprocess.run([sys.executable, "-m", "khot", "select", "-k", "10", "--out", folder], check=True)
        photograph(browser, (report or folder / "report.html").resolve(), folder)


if __name__ == "__main__":
    main()
