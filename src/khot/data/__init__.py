"""Samples of data sets with exact inclusion probabilities: for torch's DataLoader, and from a stream."""

from ._reservoir import Reservoir
from ._samplers import DesignBatchSampler, DesignSampler, WeightedDataset

__all__ = ["DesignBatchSampler", "DesignSampler", "Reservoir", "WeightedDataset"]
