"""The report of `khot select`, as text and in a browser."""

import os
import shutil
import subprocess
import sys

import pytest
from select_tables import khot, rewritten

pytestmark = pytest.mark.slow


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic", "--virtual-time-budget=2000"),
)


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None and not os.environ.get("KHOT_BROWSER"), reason="no Chromium on this machine")
def test_the_report_in_a_browser(table, tmp_path):
    """Its content as a browser sees it, hostile names included, on a phone's width; and no request leaves."""
    assert BROWSER is not None, "KHOT_BROWSER is set, and there is no Chromium"
    hostile = "<script>document.title='owned'</script><img src=https://example.com/x.png>"
    rewritten(table, "alpha", f'"{hostile}"')
    report = tmp_path / "report.html"
    assert khot(table, "--target", "label", "-k", 2, "--report", report).exit_code == 0
    profile, log = f"--user-data-dir={tmp_path / 'profile'}", tmp_path / "net.json"
    options = [BROWSER, *FLAGS, profile, f"--log-net-log={log}", "--window-size=390,800"]
    done = subprocess.run([*options, "--dump-dom", report.as_uri()], capture_output=True, text=True, check=True)
    assert "What was chosen" in done.stdout
    assert "Against other choices" in done.stdout
    assert done.stdout.count("<svg") == 0
    assert done.stdout.count('class="meter') == 6 + 6  # features, methods
    assert "&lt;script&gt;document" in done.stdout
    assert "<title>owned" not in done.stdout
    assert "<img" not in done.stdout
    assert "example.com" not in log.read_text()
    check = tmp_path / "width.html"
    check.write_text(
        report.read_text()
        .replace("default-src 'none'", "script-src 'unsafe-inline'")
        .replace(
            "</html>",
            "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script></html>",
        )
    )
    done = subprocess.run([*options, "--dump-dom", check.as_uri()], capture_output=True, text=True, check=True)
    wide, screen = map(int, done.stdout.split("<title>")[1].split("</title>")[0].split(" of "))
    assert wide <= screen  # nothing hangs over the side


@pytest.mark.long
def test_the_report_is_whole_and_alone(table, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["khot", "select", "my table.csv", "-k", "2"])
    report = tmp_path / "report.html"
    khot(table, "--target", "label", "-k", 2, "--report", report)
    page = report.read_text()
    assert page.endswith("</html>\n")
    assert "http://" not in page
    assert "https://" not in page
    assert "khot select &#x27;my table.csv&#x27; -k 2" in page
    assert "replaced by the median" in page
    assert "torch 2" in page
