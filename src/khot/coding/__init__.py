"""Sparse coding: exactly k atoms of a dictionary, exactly k columns of a matrix."""

from .._sparse import SparseCode as SparseCode
from ._pursuit import SoftCode as SoftCode
from ._pursuit import omp as omp
from ._pursuit import soft_pursuit as soft_pursuit
from ._pursuit import thresholding_pursuit as thresholding_pursuit
from ._splice import Criterion as Criterion
from ._splice import Splice as Splice
from ._splice import SplicePath as SplicePath
from ._splice import aicc as aicc
from ._splice import bic as bic
from ._splice import ebic as ebic
from ._splice import gcv as gcv
from ._splice import splice as splice
from ._splice import splice_path as splice_path
from ._updates import gradient_update as gradient_update
from ._updates import least_squares_update as least_squares_update
from ._updates import power_update as power_update
from ._updates import svd_update as svd_update
