"""Sparse coding: exactly k atoms of a dictionary, exactly k columns of a matrix."""

from .._sparse import SparseCode as SparseCode
from ._pursuit import SoftCode as SoftCode
from ._pursuit import omp as omp
from ._pursuit import soft_pursuit as soft_pursuit
from ._pursuit import thresholding_pursuit as thresholding_pursuit
