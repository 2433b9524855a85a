"""A training that is killed and resumed gives the bits of one that was not."""

import os
import signal
import subprocess
import sys

import pytest
import torch

TRAIN = """
import os, sys, time, torch
from khot.nn import sparsity
file, pause = sys.argv[1], float(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
settings = {}
if sys.argv[3] == "sampled":
    settings = {"score": sparsity.magnitude_times_learned, "mask": sparsity.sampled}
sparsifier = sparsity.Sparsifier(model, 0.2, steps=40, generator=torch.Generator().manual_seed(1), **settings)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
parts = model, optimizer, sparsifier
if os.path.exists(file):
    for part, state in zip(parts, torch.load(file), strict=True):
        part.load_state_dict(state)
while sparsifier.done < 40:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(sparsifier.done))
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()
    sparsifier.step()
    torch.save([part.state_dict() for part in parts], file + ".new")
    os.replace(file + ".new", file)
    print(sparsifier.done, flush=True)
    time.sleep(pause)
torch.save(sparsifier.finalize().state_dict(), file + ".done")
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
@pytest.mark.parametrize("way", ["default", "sampled"])
def test_killed_before_and_after_the_freeze(tmp_path, way):
    def start(name, pause):
        return subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(tmp_path / name), str(pause), way], stdout=subprocess.PIPE, text=True
        )

    with start("whole", 0.0) as whole:
        whole.communicate(timeout=120)
    for last in (9, 35):  # the masks are frozen from step 32 on
        with start("killed", 0.05) as process:
            for line in process.stdout:
                if int(line) >= last:
                    os.kill(process.pid, signal.SIGKILL)
                    break
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "killed.done").exists()
    with start("killed", 0.0) as rest:
        said = rest.communicate(timeout=120)[0]
    assert 36 <= int(said.split()[0]) <= 39, "it went on, and did not begin again"
    one, other = (torch.load(tmp_path / f"{name}.done") for name in ("whole", "killed"))
    assert all(torch.equal(one[key], other[key]) for key in one)
