"""What a sparse autoencoder is told, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from .. import _check
from ._sparse_code import SparseCode

KINDS = ("topk", "batch", "feature")


@dataclass(frozen=True, kw_only=True)
class SparseAutoencoderConfig:
    """The sizes and the losses of a `SparseAutoencoder`."""

    d_in: int
    latents: int
    k: float
    """How many latents are active: for each token ("topk", a whole number), or in the mean."""
    kind: Literal["topk", "batch", "feature"] = "topk"
    """The axis of the selection: k for each token (TopK); k·tokens in a batch (BatchTopK, Mutual Choice); or tokens for
    each latent, k·tokens in all (Feature Choice)."""
    zipf: float = 0.0
    """Exponent of the latents' budgets in Feature Choice, rank^−zipf; 0 gives all the same."""
    learn_k: bool = False
    """Make k a Parameter: it needs a selector with a gradient to k (`straight_through`, `soft`, `sampled`), and a cost.
    `normalize_decoder` keeps it possible; in Feature Choice a latent chooses at least one token, however small k is."""
    k_cost: float = 0.0
    """What a learned k adds to the loss, for each unit."""
    temperature: float = 4.0
    """Of the selector at first; scores are of order 1, since inputs are scaled."""
    candidates: float = 4.0
    """Soft selectors share k among the `candidates`·k greatest, which bounds time and memory."""
    layer_norm: bool = False
    """Bring each token to mean 0 and deviation 1 first, and undo it in the reconstruction."""
    aux_weight: float = 1 / 32
    aux_k: int | None = None
    """How many dead latents explain a token's residual; by default half of d_in."""
    dead_after: int = 50_000
    """Tokens without activity after which a latent is dead."""
    underused: float = 0.0
    """If above 0, the auxiliary loss is that of the latents below this fraction of their Zipf density."""
    multi_topk: float = 0.0
    """Weight of the loss with 4k active latents; 1/8 is usual."""

    def __post_init__(self) -> None:
        for name in ("d_in", "latents", "dead_after"):
            _check.at_least(name, getattr(self, name), 1)
        for name in ("k", "temperature"):
            _check.above(name, getattr(self, name), 0)
        for name in ("zipf", "k_cost", "aux_weight", "underused", "multi_topk"):
            _check.not_negative(name, getattr(self, name))
        if self.aux_k is not None:
            _check.at_least("aux_k", self.aux_k, 1)
        _check.one_of("kind", self.kind, KINDS)
        _check.autoencoder(self.k, self.latents, self.kind, self.candidates, self.zipf)


class SparseAutoencoderOutput(NamedTuple):
    """What a `SparseAutoencoder` makes of its input."""

    reconstruction: Tensor
    """Like the input."""
    code: SparseCode
    loss: Tensor
    """`fvu` + aux_weight·`aux_loss` + multi_topk·`multi_fvu`, and + k_cost·k if k is learned."""
    fvu: Tensor
    """The fraction of the batch's variance that is left unexplained."""
    aux_loss: Tensor
    """Of the dead or underused latents; 0 where there is none, and in evaluation."""
    multi_fvu: Tensor
    """With 4k active latents; 0 if it is not asked for, and in evaluation."""
