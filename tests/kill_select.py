"""Kills `khot select` at random moments: `python tests/kill_select.py 20`. Never a half-written output.

SIGINT must leave a whole report and exit code 130 (or 0, had it ended); SIGKILL all files or none of them half.
"""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

FILES = ("report.html", "selection.json", "features.csv")


def start(out: Path, wait_for: str | None = None) -> subprocess.Popen[bytes]:
    """The command on a terminal of its own, once its progress bar says so."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "khot", "select", "-k", "5", "--out", str(out)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment)
    os.close(theirs)
    shown = threading.Event()
    threading.Thread(target=_read, args=(ours, wait_for, shown), daemon=True).start()
    shown.wait(120)
    return process


def _read(terminal: int, wait_for: str | None, shown: threading.Event) -> None:
    """All that comes, or the command would wait for a reader."""
    seen = b""
    try:
        while True:
            if wait_for is None or wait_for.encode() in seen:
                shown.set()
            seen += os.read(terminal, 4096)
    except OSError:  # it has ended
        os.close(terminal)
        shown.set()


def state_of(out: Path) -> str:
    """ "nothing", "whole", or what is wrong."""
    there = [name for name in FILES if (out / name).exists()]
    if not there:
        return "nothing"
    for name in there:
        text = (out / name).read_text(encoding="utf-8")
        if name == "report.html" and not text.endswith("</html>\n"):
            return "half a report"
        if name == "selection.json" and len(json.loads(text)["selected"]) != 5:
            return "half a record"
        if name == "features.csv" and text.count("\n") != 65:
            return "half a list"
    return "whole" if len(there) == len(FILES) else f"only {', '.join(there)}"


def main(times: int) -> int:
    bad = 0
    chance = random.Random(0)
    for i in range(times):
        how = signal.SIGINT if i % 2 else signal.SIGKILL
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            process = start(out, wait_for="choosing" if i % 4 == 1 else None)
            delay = chance.uniform(0, 30)
            time.sleep(delay)
            process.send_signal(how)
            code = process.wait(120)
            state = state_of(out)
        began = delay > 10 or i % 4 == 1  # before that it may still be importing, when Ctrl-C just ends it
        fine = state in ("whole", "nothing") if how == signal.SIGINT else not state.startswith("half")
        fine = fine and (how != signal.SIGINT or not began or (state == "whole" and code in (0, 130)))
        bad += not fine
        print(f"{how.name} after {delay:4.1f} s: exit {code}, {state}{'' if fine else '  <-- WRONG'}", flush=True)
    print(f"{times} runs, {bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
