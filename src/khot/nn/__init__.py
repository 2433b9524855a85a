"""Modules."""

from ._sigmoid_topk import SigmoidTopK as SigmoidTopK
