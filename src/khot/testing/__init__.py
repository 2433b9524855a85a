"""The shipped checks: what khot's own tests run, for third parties to run on their own functions and designs."""

from ._design import check_design
from ._estimator import check_estimator
from ._laws import SCORE_KINDS, score_vector
from ._relaxation import check_relaxation

__all__ = ["SCORE_KINDS", "check_design", "check_estimator", "check_relaxation", "score_vector"]
