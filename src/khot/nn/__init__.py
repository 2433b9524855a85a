"""Modules."""

from . import selectors as selectors
from ._gate import KHotGate as KHotGate
from ._moe import MoE as MoE
from ._moe import MoEOutput as MoEOutput
from ._router import Router as Router
from ._sae_config import SparseAutoencoderConfig as SparseAutoencoderConfig
from ._sae_config import SparseAutoencoderOutput as SparseAutoencoderOutput
from ._sae_losses import aux_k_loss as aux_k_loss
from ._sae_losses import aux_zipf_loss as aux_zipf_loss
from ._sae_metrics import SparseAutoencoderMetrics as SparseAutoencoderMetrics
from ._schedule import Schedule as Schedule
from ._schedule import geometric as geometric
from ._schedule import linear as linear
from ._sigmoid_topk import SigmoidTopK as SigmoidTopK
from ._sparse_autoencoder import SparseAutoencoder as SparseAutoencoder
from ._sparse_code import SparseCode as SparseCode
