"""Sparse autoencoders: the model, its config, codes, losses, metrics and files."""

from ..._sparse import SparseCode
from ._code import SparseAutoencoderMetrics, SparseAutoencoderOutput, aux_k_loss, aux_zipf_loss
from ._files import CONFIG, WEIGHTS, SparseAutoencoderConfig, check_shapes, read_tensors, write_tensors
from ._model import SparseAutoencoder

__all__ = ["CONFIG", "WEIGHTS", "SparseAutoencoder", "SparseAutoencoderConfig", "SparseAutoencoderMetrics"]
__all__ += [
    "SparseAutoencoderOutput",
    "SparseCode",
    "aux_k_loss",
    "aux_zipf_loss",
    "check_shapes",
    "read_tensors",
    "write_tensors",
]
