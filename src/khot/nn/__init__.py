"""Modules."""

from ._gate import KHotGate as KHotGate
from ._schedule import Schedule as Schedule
from ._schedule import geometric as geometric
from ._schedule import linear as linear
from ._sigmoid_topk import SigmoidTopK as SigmoidTopK
