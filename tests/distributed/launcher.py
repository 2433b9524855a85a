"""Run the jobs of the distributed tests: one import of torch and khot, then a fork for each process of each job.

A job has a limit of wall-clock time: a process that hangs is killed, and its cases count as not passed.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import khot  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
IN_STEP = "in step"  # the last thing of a job's process: all its cases ended, and the processes could still talk


def work(rank, world, folder, job):
    """Run the cases of a job as one of its processes, and write what came of each."""
    warnings.simplefilter("error", UserWarning)
    os.chdir(folder)  # what processes share, they write here
    module = importlib.import_module(job["module"])
    results = {}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=job["seconds"]),
    )
    dist.barrier()
    for name in job["cases"]:
        try:
            getattr(module, name)()
            results[name] = "passed"
        except Exception:
            results[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results))
        if job["is_fault"]:
            os._exit(0)  # the others are gone, or out of step
        flag = torch.tensor(float(results[name] == "passed"))
        dist.all_reduce(flag)
        if flag.item() < world:
            break
    dist.destroy_process_group()


def run(folder, job):
    """Fork the processes of a job, and wait for them."""
    folder.mkdir()
    children = []
    for rank in range(job["world"]):
        if (child := os.fork()) == 0:
            try:
                faulthandler.disable()
                work(rank, job["world"], folder, job)
            except BaseException:
                (folder / f"{rank}.error").write_text(traceback.format_exc())
            finally:
                os._exit(0)
        children.append(child)
    end = time.monotonic() + job["limit"]
    left = set(children)
    while left and time.monotonic() < end:
        left = {child for child in left if os.waitpid(child, os.WNOHANG) == (0, 0)}
        time.sleep(0.02)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, job in jobs.items():
        started = time.monotonic()
        run(root / name, job)
        (root / name / "seconds").write_text(f"{time.monotonic() - started:.2f}")
