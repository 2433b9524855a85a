"""Files of other libraries: EleutherAI's sparsify, and `dictionary_learning`.

Weights are in the units of the inputs in all of them, so a model has the same code and reconstruction after a round
trip.
"""

import io
import json
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from .._process import write
from ..nn import SparseAutoencoder, SparseAutoencoderConfig
from ..nn.sae import CONFIG, check_shapes, read_tensors, write_tensors

Folder = str | os.PathLike[str]
SPARSIFY = "sae.safetensors"
LEARNED, LEARNED_CONFIG = "ae.pt", "config.json"
CLASSES = {"AutoEncoderTopK": "topk", "BatchTopKSAE": "batch", "JumpReluAutoEncoder": "jumprelu"}
NAMES = {"W_enc": "encoder.weight", "b_enc": "encoder.bias", "b_dec": "b_dec"}
THEIRS = {"encoder.weight": "W_enc", "encoder.bias": "b_enc", "decoder.weight": "W_dec"}
TRANSPOSED = ("encoder.weight", "decoder.weight")


def save_sparsify(sae: SparseAutoencoder, folder: Folder) -> None:
    """Write cfg.json and sae.safetensors, which sparsify's `SparseCoder.load_from_disk` reads; needs the extra `sae`.

    Raises ValueError for what sparsify lacks: kinds other than "topk", `layer_norm`, and a `d_out` other than d_in.
    """
    config, weights = sae.weights()
    if config.kind != "topk" or config.layer_norm or config.width != config.d_in:
        raise ValueError("sparsify has TopK alone, without `layer_norm` and with d_out = d_in; got another model.")
    tensors = {NAMES.get(name, name): t.t() if name == "W_enc" else t for name, t in weights.items()}
    write_tensors(Path(folder) / SPARSIFY, tensors)
    description = {
        "activation": "topk",
        "expansion_factor": max(1, config.latents // config.d_in),
        "normalize_decoder": True,
        "num_latents": config.latents,
        "k": int(config.k),
        "multi_topk": config.multi_topk > 0,
        "skip_connection": False,
        "transcode": config.d_out is not None,
        "d_in": config.d_in,
    }
    write(Path(folder) / CONFIG, json.dumps(description, indent=2) + "\n")


def load_sparsify(folder: Folder) -> SparseAutoencoder:
    """Read a folder of sparsify, as a model in evaluation mode.

    Raises ValueError for a skip connection, a lookup of n-grams, or an activation other than TopK.
    """
    about = _json(Path(folder) / CONFIG, ("d_in", "k"))
    odd = [name for name in ("skip_connection", "embed_skip", "gram_lookup") if about.get(name)]
    if about.get("activation", "topk") != "topk" or odd:
        got = ", ".join(odd) or f"the activation {about['activation']}"
        raise ValueError(f"{folder} must hold a plain TopK coder; got one with {got}.")
    tensors = read_tensors(Path(folder) / SPARSIFY)
    return _model(folder, "topk", about["k"], tensors, is_transcoder=bool(about.get("transcode")))


def save_dictionary_learning(sae: SparseAutoencoder, folder: Folder) -> None:
    """Write ae.pt and config.json, which `load_dictionary` of `dictionary_learning` reads.

    "topk" becomes an AutoEncoderTopK, "batch" a BatchTopKSAE with its threshold, and the kinds with a threshold for
    each latent a JumpReluAutoEncoder, whose bias takes up what b_dec does to the inputs. Raises ValueError for a
    transcoder and for `layer_norm`.
    """
    config, weights = sae.weights()
    if config.d_out is not None or config.layer_norm:
        raise ValueError("`dictionary_learning` has no transcoders and no `layer_norm` here; got one of them.")
    name = {"topk": "AutoEncoderTopK", "batch": "BatchTopKSAE"}.get(config.kind, "JumpReluAutoEncoder")
    if name == "JumpReluAutoEncoder":
        tensors = {**weights, "b_enc": weights["b_enc"] - weights["b_dec"] @ weights["W_enc"]}
    else:
        tensors = {NAMES[of]: t.t() if of == "W_enc" else t for of, t in weights.items() if of in NAMES}
        tensors["decoder.weight"] = weights["W_dec"].t()
        tensors["k"] = torch.tensor(round(config.k), dtype=torch.int32)
        tensors["threshold"] = weights["threshold"][0].float() if config.kind == "batch" else torch.tensor(-1.0)
    file = io.BytesIO()
    torch.save({of: t.detach().cpu().clone(memory_format=torch.contiguous_format) for of, t in tensors.items()}, file)
    write(Path(folder) / LEARNED, file.getvalue())
    sizes: dict[str, float] = {"activation_dim": config.d_in, "dict_size": config.latents}
    sizes["k"] = config.k if name == "JumpReluAutoEncoder" else round(config.k)
    about = {"trainer": {"dict_class": name, **sizes, "layer": None, "lm_name": None, "submodule_name": None}}
    write(Path(folder) / LEARNED_CONFIG, json.dumps(about, indent=2) + "\n")


def load_dictionary_learning(folder: Folder) -> SparseAutoencoder:
    """Read a folder of `dictionary_learning`, as a model in evaluation mode; nothing in it is executed.

    AutoEncoderTopK, BatchTopKSAE and JumpReluAutoEncoder are read, others raise ValueError. So does a BatchTopKSAE
    whose threshold was never set, since its codes would depend on the batch. The k of a JumpReluAutoEncoder is the
    `k` or `target_l0` of config.json, or 1 without them; codes do not depend on it, further training does.
    """
    about = _json(Path(folder) / LEARNED_CONFIG, ("trainer",))["trainer"]
    name = about.get("dict_class") if isinstance(about, dict) else None
    kind = CLASSES.get(str(name))
    if kind is None:
        raise ValueError(f"{folder} must hold one of {', '.join(CLASSES)}; got {name}.")
    tensors = _learned(Path(folder) / LEARNED)
    if kind == "jumprelu":
        k = next((about[name] for name in ("k", "target_l0") if about.get(name) is not None), 1)
        return _model(folder, kind, k, tensors)
    k = int(_needed(folder, tensors, ("k",))["k"])
    if kind == "batch" and (threshold := float(_needed(folder, tensors, ("threshold",))["threshold"])) < 0:
        raise ValueError(f"{folder} must hold a threshold ≥ 0, which is set in training; got {threshold:g}.")
    return _model(folder, kind, k, tensors)


def _model(
    folder: Folder, kind: str, k: float, found: dict[str, Tensor], is_transcoder: bool = False
) -> SparseAutoencoder:
    """Make a model of weights under their foreign names; raise ValueError if one is missing or of another shape."""
    ours = {THEIRS.get(name, name): t.transpose(0, -1) if name in TRANSPOSED else t for name, t in found.items()}
    weights = _needed(folder, ours, ("W_enc", "b_enc", "W_dec", "b_dec"))
    if weights["W_enc"].ndim != 2 or weights["W_dec"].ndim != 2:
        got = ", ".join(f"{name} {tuple(weights[name].shape)}" for name in ("W_enc", "W_dec"))
        raise ValueError(f"{folder} must hold an encoder and a decoder that are matrices; got {got}.")
    latents, width = weights["W_dec"].shape
    shape: dict[str, Any] = {"d_in": len(weights["W_enc"]), "latents": latents, "k": k, "kind": kind}
    config = SparseAutoencoderConfig(**shape, d_out=width if is_transcoder else None)
    if config.axis.has_threshold:
        threshold = _needed(folder, ours, ("threshold",))["threshold"]
        weights["threshold"] = threshold.expand(latents) if threshold.ndim == 0 else threshold
    check_shapes(str(folder), config, weights)
    if kind == "jumprelu":  # its encoder sees x, not x − b_dec
        weights["b_enc"] = weights["b_enc"] + weights["b_dec"] @ weights["W_enc"]
    return SparseAutoencoder.from_weights(config, weights)


def _learned(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of torch; nothing in it is executed."""
    try:
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        got = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} must be a whole file of tensors; got: {got}") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{path} must hold tensors by name; got {type(tensors).__name__}.")
    return tensors


def _needed(folder: Folder, found: dict[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of these names; raise ValueError if one is missing."""
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{folder} must hold {', '.join(missing)}; got {', '.join(map(str, found)) or 'nothing'}.")
    return {name: found[name] for name in names}


def _json(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    try:
        about: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a JSON file; got {type(error).__name__}: {error}.") from None
    known: dict[str, Any] = about if isinstance(about, dict) else {}
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"{path} must have {', '.join(missing)}; got {', '.join(known) or 'nothing'}.")
    return known
