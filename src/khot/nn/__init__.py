"""Layers. `routing`, `selectors`, `schedules` and `neighbors` hold the functions that they take as arguments."""

from . import neighbors as neighbors
from . import routing as routing
from . import schedules as schedules
from . import selectors as selectors
from ._layers import KHotGate as KHotGate
from ._layers import SigmoidTopK as SigmoidTopK
from .budgets import global_budget as global_budget
from .moe import MoE as MoE
from .moe import MoEOutput as MoEOutput
from .moe import Router as Router
from .neighbors import Neighbors as Neighbors
from .neighbors import SoftNeighbors as SoftNeighbors
from .neighbors import neighbors_loss as neighbors_loss
from .sae import SparseAutoencoder as SparseAutoencoder
from .sae import SparseAutoencoderConfig as SparseAutoencoderConfig
from .sae import SparseAutoencoderMetrics as SparseAutoencoderMetrics
from .sae import SparseAutoencoderOutput as SparseAutoencoderOutput
from .sae import SparseCode as SparseCode
from .sae import aux_k_loss as aux_k_loss
from .sae import aux_zipf_loss as aux_zipf_loss
from .schedules import Schedule as Schedule
from .schedules import geometric as geometric
from .schedules import linear as linear
