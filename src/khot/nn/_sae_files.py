"""Sparse autoencoders as files: cfg.json and sae_weights.safetensors, in the form that SAELens loads."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _check
from .._files import write
from .._version import __version__
from ._sae_config import SparseAutoencoderConfig

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
FORM = "6.0.0"
"""The version of SAELens since which files have this form."""


def save(
    folder: str | os.PathLike[str], config: SparseAutoencoderConfig, weights: dict[str, Tensor], selector: str
) -> None:
    """Write both files, each in one step; weights in the units of the inputs."""
    folder = Path(folder)
    write_tensors(folder / WEIGHTS, weights)
    description = _description(config, weights["W_dec"].dtype, selector)
    write(folder / CONFIG, json.dumps(description, indent=2) + "\n")


def read(folder: str | os.PathLike[str]) -> tuple[SparseAutoencoderConfig, dict[str, Tensor]]:
    """The config and the weights of a folder that `save` wrote, checked."""
    path = Path(folder) / CONFIG
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))["khot"]["config"]
        config = SparseAutoencoderConfig(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a config that khot wrote; got {type(error).__name__}: {error}.") from None
    return config, read_tensors(Path(folder) / WEIGHTS, _shapes(config))


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, in one step."""
    save_bytes = _safetensors().save
    write(path, save_bytes({name: t.detach().contiguous() for name, t in tensors.items()}, metadata))


def read_tensors(path: Path, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, checked to have these names and shapes."""
    _check.is_file(path)
    try:
        tensors: dict[str, Tensor] = _safetensors().load_file(path)
    except Exception as error:  # safetensors' own class, which is not to be imported here
        if type(error).__name__ != "SafetensorError":
            raise
        raise ValueError(f"{path} must be a whole safetensors file; got: {error}.") from None
    if shapes is not None:
        _check.tensors(path, {name: tuple(t.shape) for name, t in tensors.items()}, shapes)
    return tensors


def _shapes(config: SparseAutoencoderConfig) -> dict[str, tuple[int, ...]]:
    n, d = config.latents, config.d_in
    shapes: dict[str, tuple[int, ...]] = {"W_enc": (d, n), "b_enc": (n,), "W_dec": (n, d), "b_dec": (d,)}
    return shapes if config.kind == "topk" else {**shapes, "threshold": (n,)}


def _description(c: SparseAutoencoderConfig, dtype: torch.dtype, selector: str) -> dict[str, Any]:
    return {
        "architecture": "topk" if c.kind == "topk" else "jumprelu",
        "d_in": c.d_in,
        "d_sae": c.latents,
        **({"k": int(c.k)} if c.kind == "topk" else {}),
        "dtype": str(dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "layer_norm" if c.layer_norm else "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": FORM, "sae_lens_training_version": None},
        "khot": {"version": __version__, "config": asdict(c), "selector": selector},
    }


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Weights are kept in safetensors files: pip install 'khot[sae]'.", name="safetensors"
        ) from None
    return safetensors.torch
