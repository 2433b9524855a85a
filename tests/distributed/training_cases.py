"""`khot.sae.train` on several processes: the weights of one process, resumed runs, and processes that fail."""

import json
import os
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fault_cases import is_victim
from safetensors.torch import load_file

from khot.nn import SparseAutoencoderConfig
from khot.nn.sae._ranks import Ranks
from khot.sae import Trainer, Training, open_activations, train

warnings.filterwarnings("ignore", message=".*tokens alone")  # of the references, which are one process each
D, N, STEPS = 12, 64, 50
CHECKPOINT = Path("run/checkpoint.safetensors")


def activations():
    """A file of sums of few directions, by the first process."""
    if dist.get_rank() == 0 and not Path("acts.npy").exists():
        rng = np.random.default_rng(0)
        code = np.maximum(rng.standard_normal((2000, 32)) - 1.2, 0)
        np.save("acts.npy", (code @ rng.standard_normal((32, D))).astype(np.float32))
    dist.barrier()


def run(folder, group, *, kind="topk", selector="straight-through", k=3, steps=STEPS, **options):
    config = SparseAutoencoderConfig(d_in=D, latents=N, k=k, kind=kind, dead_after=1000)
    training = Training(steps=steps, batch_size=128, selector=selector)
    return train(open_activations("acts.npy"), config, training, folder, group=group, **options)


def alone(folder, **options):
    """The run of one process, by the first one, while the others wait."""
    if dist.get_rank() == 0:
        run(folder, None, **options)
    dist.barrier()
    return json.loads((Path(folder) / "metrics.json").read_text())


def difference(one, other):
    a, b = (load_file(Path(folder) / "sae_weights.safetensors") for folder in (one, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def weights_of_one_process():
    activations()
    cases = [("topk", "straight-through"), ("batch", "straight-through"), ("feature", "soft")]
    for kind, selector in cases if dist.get_world_size() == 2 else cases[1:2]:
        one = alone(kind, kind=kind, selector=selector)
        many = run(f"{kind}-many", dist.group.WORLD, kind=kind, selector=selector)
        assert difference(kind, f"{kind}-many") <= 1e-5
        for name in ("fvu", "l0", "cosine"):
            assert many.metrics[name] == pytest.approx(one[name], abs=1e-5)
            assert many.metrics["held_out"][name] == pytest.approx(one["held_out"][name], abs=1e-5)
        np.testing.assert_allclose(many.curve, one["curve"], rtol=0, atol=1e-4)
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, many.metrics)
        assert all(each == many.metrics for each in every), "the result is the same on all processes"
        assert json.loads(Path(f"{kind}-many/metrics.json").read_text())["fvu"] == many.metrics["fvu"]


def one_process_differs():
    """A negative control: gradients that are not averaged."""
    activations()
    average, Ranks.average = Ranks.average, lambda self, parameters: None
    try:
        run("wrong", dist.group.WORLD)
    finally:
        Ranks.average = average
    alone("right")
    assert difference("wrong", "right") > 1e-4


def resumed_at_other_numbers_of_processes():
    activations()
    groups = [dist.group.WORLD, dist.new_group([0, 1]), None]
    stops = [17, 34, STEPS]
    for group, stop in zip(groups, stops, strict=True):
        if dist.get_rank() < (1 if group is None else dist.get_world_size(group)):
            is_mine = dist.get_rank() == 0  # one of them asks for an end

            def on_step(point, steps, stop=stop, is_mine=is_mine):
                return is_mine and point.step == stop < STEPS

            found = run("run", group, resume=True, on_step=on_step)
            assert found.is_complete == (stop == STEPS)
        dist.barrier()
    alone("whole")
    assert difference("whole", "run") <= 1e-5
    assert not CHECKPOINT.exists()


def nobody_goes_on_alone():
    """What one process finds, all see: another k, values that are not finite, a folder with another run."""
    activations()
    world, is_last = dist.group.WORLD, dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(ValueError, match="must be the same on all processes"):
        run("k", world, k=4 if is_last else 3)
    run("other", world)
    with pytest.raises(FileExistsError, match="holds this run already"):
        run("other", world)
    batch = Trainer._batch
    Trainer._batch = lambda self: batch(self) * (float("nan") if is_last and self.step == 20 else 1.0)
    try:
        with pytest.raises(FloatingPointError, match="must stay finite"):
            run("nan", world, checkpoint_every=5)
    finally:
        Trainer._batch = batch
    if dist.get_rank() == 0:
        Path("file").touch()
    dist.barrier()
    with pytest.raises(ValueError, match="not a directory"):
        run("file/below", world)
    dist.barrier()
    left = load_file("nan/checkpoint.safetensors")
    assert all(torch.isfinite(t).all() for t in left.values())


def _fails(at_step, fault):
    """Run until one process fails at a step; the other one sees an error, and the last checkpoint is whole.

    The limit of the job says in what time.
    """

    def on_step(point, steps):
        if is_victim() and point.step == at_step:
            fault()

    activations()
    with pytest.raises(KeyError if is_victim() else RuntimeError):
        run("run", dist.group.WORLD, steps=20, checkpoint_every=5, on_step=on_step)
    if is_victim():
        return
    tensors = load_file(CHECKPOINT)
    assert all(torch.isfinite(t).all() for t in tensors.values())
    assert [path.name for path in CHECKPOINT.parent.iterdir()] == [CHECKPOINT.name]
    assert run("run", None, steps=20, resume=True).is_complete
    run("whole", None, steps=20)
    assert difference("run", "whole") <= 1e-5


def a_run_whose_process_is_killed():
    _fails(7, lambda: os.kill(os.getpid(), signal.SIGKILL))


def a_run_whose_process_is_killed_after_the_last_step():
    _fails(20, lambda: os.kill(os.getpid(), signal.SIGKILL))


def a_run_whose_process_is_killed_before():
    activations()
    if is_victim():
        time.sleep(1)  # until the other one is past the meeting too
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        run("run", dist.group.WORLD)
    assert not Path("run").exists()


def a_run_whose_process_raises():
    def fault():
        raise KeyError("something else went wrong")

    _fails(7, fault)


def a_run_whose_writer_is_killed():
    """The first process is killed while it writes a checkpoint: the old one stays."""
    activations()
    if dist.get_rank() == 0:
        # The victim writes half of its third checkpoint.
        replace, count = os.replace, []

        def half(source, target):
            count.append(1)
            if len(count) == 3:
                os.truncate(source, os.path.getsize(source) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        os.replace = half
        run("run", dist.group.WORLD, steps=20, checkpoint_every=2)
    with pytest.raises(RuntimeError):
        run("run", dist.group.WORLD, steps=20, checkpoint_every=2)
    assert all(torch.isfinite(t).all() for t in load_file(CHECKPOINT).values())
