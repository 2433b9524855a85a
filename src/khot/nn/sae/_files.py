"""The config of a sparse autoencoder, and its files: cfg.json and sae_weights.safetensors, in the form of SAELens."""

import json
import os
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Literal

from torch import Tensor

from ... import _check
from ..._extras import require
from ..._process import write
from ..._version import __version__
from ._axes import AXES, Axis

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
Folder = str | os.PathLike[str]
FORM = "6.0.0"  # the version of SAELens since which files have this form


@dataclass(frozen=True, kw_only=True)
class SparseAutoencoderConfig:
    """Hold the sizes and the losses of a `SparseAutoencoder`.

    Args:
        d_in: the size of the inputs.
        latents: the size of the code.
        k: how many latents are active: for each token ("topk", an integer), or on average.
        kind: the axis of the selection: "topk", k for each token (TopK); "batch", k·tokens in a batch (BatchTopK,
            Mutual Choice); "feature", tokens for each latent, k·tokens in all (Feature Choice); "jumprelu", what
            exceeds a learned threshold of each latent, k a token as the target (JumpReLU).
        d_out: the size of the targets, for a transcoder, which predicts other activations than its inputs; None for an
            autoencoder.
        prefixes: numbers of latents, rising, below `latents` (Matryoshka): the first so many latents reconstruct by
            themselves too, and the loss is the mean over these prefixes and the whole.
        zipf: exponent of the latents' budgets in Feature Choice, rank^−zipf; 0 gives all the same.
        learn_k: make k a Parameter: it needs a selector with a gradient to k (`straight_through`, `soft`, `sampled`),
            and a cost. `normalize_decoder` keeps it possible; in Feature Choice a latent chooses at least one token.
        k_cost: what a learned k adds to the loss, for each unit.
        temperature: of the selector at the start; scores are of order 1, since inputs are scaled.
        candidates: selectors with a gradient share k among the `candidates`·k largest, which bounds time and memory;
            None: as many as the selector says, 2 for `straight_through` and 4 for others.
        layer_norm: bring each token to mean 0 and deviation 1 first, and undo it in the reconstruction.
        aux_weight: weight of the auxiliary loss of dead latents.
        aux_k: how many dead latents explain a token's residual; by default half of d_in.
        dead_after: tokens without activity after which a latent is dead.
        underused: if above 0, the auxiliary loss is that of the latents below this fraction of their Zipf density.
        multi_topk: weight of the loss with 4k active latents; 1/8 is usual.
        bandwidth: of the kernel that estimates the gradient of a learned threshold ("jumprelu"); scores are of order 1.
        l0_weight: what the target k weighs for "jumprelu": the loss has l0_weight·(L0/k − 1)².

    Examples:
        >>> khot.nn.SparseAutoencoderConfig(d_in=8, latents=32, k=2.5, kind="batch").aux_weight
        0.03125
    """

    d_in: int
    latents: int
    k: float
    kind: Literal["topk", "batch", "feature", "jumprelu"] = "topk"
    d_out: int | None = None
    prefixes: tuple[int, ...] = ()
    zipf: float = 0.0
    learn_k: bool = False
    k_cost: float = 0.0
    temperature: float = 4.0
    candidates: float | None = None
    layer_norm: bool = False
    aux_weight: float = 1 / 32
    aux_k: int | None = None
    dead_after: int = 50_000
    underused: float = 0.0
    multi_topk: float = 0.0
    bandwidth: float = 0.1
    l0_weight: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):  # numpy's numbers become Python's, which JSON takes
            value = getattr(self, field.name)
            if isinstance(value, Real) and not isinstance(value, bool):
                object.__setattr__(self, field.name, int(value) if isinstance(value, Integral) else float(value))
        for name in ("d_in", "latents", "dead_after"):
            _check.at_least(name, getattr(self, name), 1)
        for name in ("k", "temperature", "bandwidth"):
            _check.above(name, getattr(self, name), 0)
        for name in ("zipf", "k_cost", "aux_weight", "underused", "multi_topk", "l0_weight"):
            _check.not_negative(name, getattr(self, name))
        if self.aux_k is not None:
            _check.at_least("aux_k", self.aux_k, 1)
        _check.one_of("kind", self.kind, tuple(AXES))
        if self.k > self.latents:
            raise ValueError(f"`k` must satisfy 0 < k ≤ {self.latents} (the number of latents); got {self.k:g}.")
        if self.candidates is not None:
            _check.number("candidates", self.candidates, "a number or None")
        if self.candidates is not None and not self.candidates >= 1:
            raise ValueError(f"`candidates` must be ≥ 1; got {self.candidates}.")
        self.axis.check(self.k, self.zipf)
        for prefix in self.prefixes if isinstance(self.prefixes, (list, tuple)) else (self.prefixes,):
            _check.integer("prefixes", prefix)
        object.__setattr__(self, "prefixes", tuple(map(int, self.prefixes)))
        ends = (0, *self.prefixes, self.latents)
        if any(low >= high for low, high in pairwise(ends)):
            raise ValueError(f"`prefixes` must rise, between 0 and {self.latents} latents; got {self.prefixes}.")
        if self.layer_norm and self.d_in < 2:
            raise ValueError("`layer_norm` needs `d_in` ≥ 2, since one number has no deviation; got 1.")
        if self.d_out is not None:
            _check.at_least("d_out", self.d_out, 1)
            if self.layer_norm:
                raise ValueError("`layer_norm` must be False with `d_out`: targets cannot be undone by inputs.")
        if self.axis.learns_threshold and (self.learn_k or self.multi_topk):
            raise ValueError(f'`learn_k` and `multi_topk` choose by counts: they must be off for "{self.kind}".')

    @property
    def axis(self) -> Axis:
        """Return the axis that `kind` names."""
        return AXES[self.kind]

    @property
    def width(self) -> int:
        """Return the size of a reconstruction: `d_out` of a transcoder, else `d_in`."""
        return self.d_in if self.d_out is None else self.d_out

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the inputs and, for a transcoder, the targets that stand beside them in rows (…, d_in + d_out)."""
        return (rows, None) if self.d_out is None else (rows[..., : self.d_in], rows[..., self.d_in :])


def save(folder: Folder, config: SparseAutoencoderConfig, weights: dict[str, Tensor], selector: str) -> None:
    """Write both files, each atomically; weights in the units of the inputs."""
    write_tensors(Path(folder) / WEIGHTS, weights)
    description = {
        "architecture": config.axis.architecture + ("" if config.d_out is None else "_transcoder"),
        **({} if config.axis.has_threshold else {"k": int(config.k)}),
        "d_in": config.d_in,
        "d_sae": config.latents,
        **({} if config.d_out is None else {"d_out": config.d_out}),
        "dtype": str(weights["W_dec"].dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": config.d_out is None,
        "normalize_activations": "layer_norm" if config.layer_norm else "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": FORM, "sae_lens_training_version": None},
        "khot": {"version": __version__, "config": asdict(config), "selector": selector},
    }
    write(Path(folder) / CONFIG, json.dumps(description, indent=2) + "\n")


def read(folder: Folder) -> tuple[SparseAutoencoderConfig, dict[str, Tensor]]:
    """Return the config and the weights of a folder that `save` wrote, checked."""
    path = Path(folder) / CONFIG
    try:
        config = SparseAutoencoderConfig(**json.loads(path.read_text(encoding="utf-8"))["khot"]["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a config that khot wrote; got {type(error).__name__}: {error}.") from None
    tensors = read_tensors(Path(folder) / WEIGHTS)
    check_shapes(str(Path(folder) / WEIGHTS), config, tensors)
    return config, tensors


def shapes(config: SparseAutoencoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a saved model."""
    n, d, width = config.latents, config.d_in, config.width
    found: dict[str, tuple[int, ...]] = {"W_enc": (d, n), "b_enc": (n,), "W_dec": (n, width), "b_dec": (width,)}
    return found | {"threshold": (n,)} if config.axis.has_threshold else found


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, atomically."""
    safetensors = require("safetensors.torch", extra="sae")
    write(path, safetensors.save({name: t.detach().contiguous() for name, t in tensors.items()}, metadata))


def check_shapes(what: str, config: SparseAutoencoderConfig, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError unless `what`, tensors by name, are floats with the names and shapes of the config."""
    wanted, got = shapes(config), {name: tuple(t.shape) for name, t in tensors.items()}
    if got != wanted:
        names = [name for name in {**wanted, **got} if got.get(name) != wanted.get(name)]
        said = "; ".join(f"{name} {got.get(name, 'missing')}, not {wanted.get(name, 'known')}" for name in names[:4])
        raise ValueError(f"{what} must have the tensors of its config; got {said}.")
    if odd := [f"{name} of {t.dtype}" for name, t in tensors.items() if not t.is_floating_point()]:
        raise ValueError(f"{what} must have floating tensors; got {', '.join(odd)}.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a file; there is none.")
    try:
        tensors: dict[str, Tensor] = require("safetensors.torch", extra="sae").load_file(path)
    except Exception as error:  # safetensors' own class, which is not to be imported here
        if type(error).__name__ != "SafetensorError":
            raise
        raise ValueError(f"{path} must be a whole safetensors file; got: {error}.") from None
    return tensors
