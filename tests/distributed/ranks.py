"""Start the processes of a distributed test, with a limit of wall-clock time, and collect what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIMIT = 150.0  # seconds for all the cases of one start; a process that hangs is killed, and the tests fail


def start(world, folder, module, names, *, seconds=60.0, limit=LIMIT):
    """Run cases on `world` processes; return (the exit code, the results by name) of each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "rank_main.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder), str(seconds), module, *names],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    results = []
    try:
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=limit)
            path = Path(folder) / f"{rank}.json"
            said = json.loads(path.read_text()) if path.exists() else {}
            results.append((process.returncode, said, errors))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return results
