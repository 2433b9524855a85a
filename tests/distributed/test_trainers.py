"""The examples of Lightning and Accelerate, on two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def printed(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_lightning():
    pytest.importorskip("lightning", reason="pip install lightning")
    text = printed(sys.executable, "examples/lightning_ranks.py")
    with_group, without = (float(off) for off in re.findall(r"the group: (\S+) from one process", text))
    assert with_group < 1e-5
    assert without > 1e-3, "the control: without the group it is another training"


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate(ranks):
    pytest.importorskip("accelerate", reason="pip install accelerate")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    text = printed(*(start if ranks > 1 else start[:1]), "examples/accelerate_ranks.py")
    assert "kept 50 of 1000, 1000 of 1000 as on one process" in text
