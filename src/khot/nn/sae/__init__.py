"""Sparse autoencoders: the model, its config, codes, losses, metrics and files."""

from ..._sparse import SparseCode as SparseCode
from ._code import SparseAutoencoderMetrics as SparseAutoencoderMetrics
from ._code import SparseAutoencoderOutput as SparseAutoencoderOutput
from ._code import aux_k_loss as aux_k_loss
from ._code import aux_zipf_loss as aux_zipf_loss
from ._files import CONFIG as CONFIG
from ._files import WEIGHTS as WEIGHTS
from ._files import SparseAutoencoderConfig as SparseAutoencoderConfig
from ._files import read_tensors as read_tensors
from ._files import write_tensors as write_tensors
from ._model import SparseAutoencoder as SparseAutoencoder
