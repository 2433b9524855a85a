"""A training run in a folder: checkpoints, interruptions, results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._files import check_writable, write
from ..nn import SparseAutoencoder, SparseAutoencoderConfig, SparseAutoencoderMetrics
from ..nn.sae import CONFIG, WEIGHTS, read_tensors, write_tensors
from ._activations import ROWS, Activations
from ._interrupts import interruptible
from ._sae import HELD_OUT, Point, Trainer, Training
from ._sae_report import REPORT

CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.json"
MOST = 2**17
"""Tokens that the metrics are measured on, at most."""


class Result(NamedTuple):
    """What there is at the end of a run, or of a part of it."""

    metrics: dict[str, Any]
    curve: list[Point]
    is_complete: bool


def run(
    data: Activations,
    config: SparseAutoencoderConfig,
    training: Training,
    folder: Path,
    *,
    resume: bool = False,
    every: int = 500,
    on_step: Callable[[Point, int], None] = lambda point, steps: None,
) -> Result:
    """Train in a folder, and write cfg.json, sae_weights.safetensors and metrics.json there.

    Args:
        data: the activations.
        config: of the model.
        training: how.
        folder: of a new run, or of the same one to be resumed.
        resume: go on from the checkpoint, if there is one.
        every: how many steps there are between checkpoints.
        on_step: called after each step. If it raises KeyboardInterrupt, or on Ctrl-C, the run stops between two steps:
            it leaves a checkpoint, and the results so far.

    Raises:
        FileExistsError: the folder holds another run, or one that is not to be resumed; nothing is written.
        FloatingPointError: the run diverged; the last checkpoint stays.
    """
    trainer = Trainer(data, config, training)
    if _prepare(folder, trainer, resume):
        metrics = json.loads((folder / METRICS).read_text(encoding="utf-8"))
        return Result(metrics, [Point(*point) for point in metrics["curve"]], True)
    for name in (METRICS, REPORT):
        check_writable(folder / name)
    with interruptible() as interrupted:
        try:
            while trainer.step < training.steps and not interrupted():
                point = trainer.advance()
                if trainer.step % every == 0:
                    _checkpoint(folder, trainer)
                on_step(point, training.steps)
        except KeyboardInterrupt:
            pass
        _checkpoint(folder, trainer)
        return _finish(folder, trainer)


def _finish(folder: Path, trainer: Trainer) -> Result:
    """The results; then, if the run is complete, the checkpoint is not needed."""
    is_complete = trainer.step == trainer.training.steps
    sae = trainer.sae.eval()
    sae.save(folder)
    metrics = {
        **_known(measure(sae, trainer.data, 0, 1)),
        "held_out": (
            _known(measure(sae, trainer.data, HELD_OUT - 1, HELD_OUT)) if trainer.data.tokens >= HELD_OUT else None
        ),
        "steps": trainer.step,
        "complete": is_complete,
        "run": trainer.run(),
        "curve": trainer.curve,
    }
    sae.train()
    write(folder / METRICS, json.dumps(metrics, indent=1, allow_nan=False) + "\n")
    if is_complete:
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return Result(metrics, trainer.curve, is_complete)


def _known(metrics: dict[str, Any]) -> dict[str, Any]:
    """None for what is not finite: the FVU of one held-out row, say. JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


def measure(sae: SparseAutoencoder, data: Activations, first: int, step: int) -> dict[str, Any]:
    """The metrics over every step-th row, thinned out to `MOST`."""
    rows = np.arange(first, data.tokens, step)
    rows = rows[:: -(-len(rows) // MOST)]
    metrics = SparseAutoencoderMetrics()
    for part in np.array_split(rows, -(-len(rows) // ROWS)):
        metrics.update(sae, data.rows(part))
    return metrics.result()


def _prepare(folder: Path, trainer: Trainer, resume: bool) -> bool:
    """Restore the checkpoint, if there is one; True if the run is complete. Raise if the folder is not this run's."""
    checkpoint, new = folder / CHECKPOINT, trainer.run()
    if checkpoint.exists():
        tensors, about = read_tensors(checkpoint), _metadata(checkpoint)
        _check_same(folder, about["run"], new, resume)
        trainer.restore(int(about["step"]), tensors)
        return False
    if not any((folder / name).exists() for name in (CONFIG, WEIGHTS, METRICS)):
        return False
    try:
        metrics = json.loads((folder / METRICS).read_text(encoding="utf-8"))
        old, is_complete = metrics["run"], metrics["complete"]
    except (OSError, ValueError, KeyError, TypeError):
        raise FileExistsError(
            f"{folder} holds an autoencoder that is not of `khot sae`: choose another --out"
        ) from None
    _check_same(folder, old, new, resume)
    return bool(is_complete)


def _check_same(folder: Path, old: dict[str, Any], new: dict[str, Any], resume: bool) -> None:
    differences = [
        f"{key} {old.get(key)}, not {new.get(key)}" for key in {**new, **old} if old.get(key) != new.get(key)
    ]
    if differences:
        raise FileExistsError(f"{folder} holds a run with {'; '.join(differences[:4])}: choose another --out")
    if not resume:
        raise FileExistsError(f"{folder} holds this run already: continue it with --resume, or choose another --out")


def _checkpoint(folder: Path, trainer: Trainer) -> None:
    if not all(bool(p.isfinite().all()) for p in trainer.sae.parameters()):
        raise trainer.diverged()
    about = {"step": str(trainer.step), "run": json.dumps(trainer.run())}
    write_tensors(folder / CHECKPOINT, trainer.state(), about)


def _metadata(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
    if not {"step", "run"} <= set(about):
        raise ValueError(f"{path} must be a checkpoint of `khot sae`; got another safetensors file")
    return {"step": about["step"], "run": json.loads(about["run"])}
