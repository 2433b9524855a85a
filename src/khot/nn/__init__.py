"""Modules."""

from ._gate import KHotGate as KHotGate
from ._moe import MoE as MoE
from ._moe import MoEOutput as MoEOutput
from ._router import Router as Router
from ._schedule import Schedule as Schedule
from ._schedule import geometric as geometric
from ._schedule import linear as linear
from ._sigmoid_topk import SigmoidTopK as SigmoidTopK
