"""A training run in a folder: checkpoints, interruptions, results."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from .. import _check
from .._extras import require
from .._process import check_writable, interruptible, threads_for, write
from .._shape import Group
from ..nn import SparseAutoencoder, SparseAutoencoderConfig, SparseAutoencoderMetrics
from ..nn.sae import CONFIG, WEIGHTS, read_tensors, write_tensors
from ._activations import ROWS
from ._streaming import Source
from ._training import HELD_OUT, Point, Trainer, Training

CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.json"
MOST = 2**17  # largest number of tokens that the metrics are measured on


class Run(NamedTuple):
    """Hold the results of a run so far."""

    metrics: dict[str, Any]
    """The contents of metrics.json: the metrics on all tokens, on those held out, and what the run depends on."""
    curve: list[Point]
    """The training curve."""
    is_complete: bool
    """Whether all steps were taken; False after an interruption."""


def train(
    data: Source,
    config: SparseAutoencoderConfig,
    training: Training,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    checkpoint_every: int = 500,
    on_step: Callable[[Point, int], bool | None] = lambda point, steps: None,
    group: Group = None,
) -> Run:
    """Train in a folder, and write cfg.json, sae_weights.safetensors and metrics.json there; needs the extra `sae`.

    The two files of the model load in SAELens and with `SparseAutoencoder.load`. A resumed run ends with the same bits
    as one that was never interrupted.

    Args:
        data: the activations: a file's (`open_activations`), a model's (`ModelActivations`), or `Pairs` of inputs and
            targets for a transcoder.
        config: of the model.
        training: the settings.
        folder: where to write. It may hold the same run, to be resumed, and no other.
        resume: continue from the checkpoint, if there is one.
        checkpoint_every: steps between checkpoints, ≥ 1.
        on_step: called after each step with its figures and the number of steps in all; returning True stops the run
            there, as Ctrl-C does, with a checkpoint and the results so far. A second Ctrl-C stops at once and leaves
            the last checkpoint.
        group: the process group whose processes train one model, each on its part of every batch. The first process
            alone reads and writes the folder. A run may be resumed at another number of processes.

    Raises:
        FileExistsError: the folder holds another run, or this one and `resume` is False; nothing is written.
        FloatingPointError: the run diverged; the last checkpoint stays.
        ModuleNotFoundError: safetensors is missing.
    """
    if checkpoint_every < 1:
        raise ValueError(f"`checkpoint_every` must be ≥ 1; got {checkpoint_every}.")
    require("safetensors.torch", extra="sae")  # before the long work
    folder = Path(folder)
    _check.instance("config", config, SparseAutoencoderConfig)
    _check.instance("training", training, Training)
    with threads_for(training.batch_size * config.d_in * config.latents):
        trainer = Trainer(data, config, training, group=group)
        ranks, own = trainer.ranks, trainer.settings()
        if ranks.any(ranks.on_first(lambda: own) != own):
            raise ValueError("`data`, `config` and `training` must be the same on all processes; they differ")
        step, tensors, metrics = ranks.on_first(lambda: _found(folder, trainer, resume))
        if metrics is not None:
            return Run(metrics, metrics["curve"], True)
        if tensors is not None:
            try:
                trainer.restore(step, tensors)
            except ValueError as error:
                raise ValueError(f"{folder / CHECKPOINT} must be a checkpoint of this run; got: {error}") from None
        stopped = False
        with interruptible() as interrupted:
            while trainer.step < training.steps and not stopped:
                point = trainer.advance()
                if trainer.step % checkpoint_every == 0:
                    _checkpoint(folder, trainer)
                stopped = ranks.any(bool(on_step(point, training.steps)) or interrupted())
            _checkpoint(folder, trainer)
            return _finish(folder, trainer)


def sweep(
    data: Source,
    configs: Mapping[str, SparseAutoencoderConfig],
    training: Training,
    folder: str | os.PathLike[str],
    *,
    on_run: Callable[[str, Run], None] = lambda name, run: None,
    **how: Any,
) -> dict[str, Run]:
    """Train several configs on the same data, each in a subfolder of its name; return the runs by name.

    An interruption (Ctrl-C, or `on_step` that returns True) stops the run it hits and the sweep. What was trained
    stays, and `resume=True` continues.

    Args:
        data, training: as for `train`.
        configs: by names, which are those of the subfolders, such as {"k16": …, "k32": …}.
        folder: where to write.
        on_run: called with the name and the results of each run, the last one perhaps incomplete.
        how: `resume`, `checkpoint_every`, `on_step` and `group`, as for `train`.
    """
    runs: dict[str, Run] = {}
    for name, config in configs.items():
        runs[name] = train(data, config, training, Path(folder) / name, **how)
        on_run(name, runs[name])
        if not runs[name].is_complete:
            break
    return runs


def measure(
    sae: SparseAutoencoder, data: Source, first: int = 0, step: int = 1, *, group: Group = None
) -> dict[str, Any]:
    """Return the metrics of a model over the rows first, first + step, …, thinned out to 131072 rows.

    `measure(sae, data, HELD_OUT - 1, HELD_OUT)` takes the rows that training leaves out. Processes of a group take a
    part of the rows each, and all get the result.
    """
    rows = data.spread(np.arange(first, data.tokens, step), MOST)
    metrics = SparseAutoencoderMetrics(group=group)
    if group is not None:
        rows = rows[sae.ranks.rows(len(rows))]
    for part in np.array_split(rows, max(1, -(-len(rows) // ROWS))):
        metrics.update(sae, *sae.config.split(data.rows(part).to(sae.b_dec.device)))
    return metrics.result()


def _finish(folder: Path, trainer: Trainer) -> Run:
    """Write the results; if the run is complete, delete the checkpoint."""
    is_complete = trainer.step == trainer.training.steps
    sae, ranks = trainer.sae.eval(), trainer.ranks
    group = ranks.tokens or None
    ranks.on_first(lambda: sae.save(folder))
    has_held_out = trainer.data.tokens >= HELD_OUT
    metrics = {
        **_finite(measure(sae, trainer.data, group=group)),
        "held_out": _finite(measure(sae, trainer.data, HELD_OUT - 1, HELD_OUT, group=group)) if has_held_out else None,
        "steps": trainer.step,
        "complete": is_complete,
        "run": ranks.on_first(trainer.description),
        "curve": trainer.curve,
    }
    sae.train()

    def finish() -> None:
        write(folder / METRICS, json.dumps(metrics, indent=1, allow_nan=False) + "\n")
        if is_complete:
            (folder / CHECKPOINT).unlink(missing_ok=True)

    ranks.on_first(finish)
    return Run(metrics, trainer.curve, is_complete)


def _finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace what is not finite, such as the FVU of one held-out row, by None: JSON has no NaN."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in metrics.items()}


def _found(folder: Path, trainer: Trainer, resume: bool) -> tuple[int, dict[str, Tensor] | None, Any]:
    """Return the step and the tensors of the checkpoint, if there is one, and the metrics of a complete run.

    Raises FileExistsError if the folder holds another run, and ValueError if it cannot be written.
    """
    checkpoint, new = folder / CHECKPOINT, trainer.description()
    step, tensors, metrics, is_complete = 0, None, None, False
    if checkpoint.exists():
        tensors = read_tensors(checkpoint)
        with require("safetensors", extra="sae").safe_open(checkpoint, "pt") as file:
            about = file.metadata() or {}
        try:
            step, old = int(about["step"]), dict(json.loads(about["run"]))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{checkpoint} must be a checkpoint of `khot sae`; got another safetensors file") from None
    elif any((folder / name).exists() for name in (CONFIG, WEIGHTS, METRICS)):
        try:
            metrics = json.loads((folder / METRICS).read_text(encoding="utf-8"))
            old, is_complete = dict(metrics["run"]), bool(metrics["complete"])
            metrics["curve"] = [Point(*point) for point in metrics["curve"]]
        except (OSError, ValueError, KeyError, TypeError):
            what = "an autoencoder that is not of `khot sae`"
            raise FileExistsError(f"{folder} holds {what}: choose another folder") from None
    else:
        check_writable(folder / METRICS)
        return 0, None, None
    if changed := [key for key in {**new, **old} if old.get(key) != new.get(key)]:
        said = "; ".join(f"{key} {old.get(key)}, not {new.get(key)}" for key in changed[:4])
        raise FileExistsError(f"{folder} holds a run with {said}: choose another folder")
    if not resume:
        raise FileExistsError(f"{folder} holds this run already: resume it, or choose another folder")
    if not is_complete:
        check_writable(folder / METRICS)
    return step, tensors, metrics if is_complete else None


def _checkpoint(folder: Path, trainer: Trainer) -> None:
    if not all(bool(p.isfinite().all()) for p in trainer.sae.parameters()):
        raise trainer.diverged()

    def save() -> None:
        about = {"step": str(trainer.step), "run": json.dumps(trainer.description())}
        write_tensors(folder / CHECKPOINT, trainer.state(), about)

    trainer.ranks.on_first(save)
