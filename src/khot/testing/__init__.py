"""The shipped checks: what khot's own tests run, for third parties to run on their own functions and designs."""

from ._design import check_design as check_design
from ._estimator import check_estimator as check_estimator
from ._relaxation import check_relaxation as check_relaxation
from ._scores import SCORE_KINDS as SCORE_KINDS
from ._scores import score_vector as score_vector

__all__ = ["SCORE_KINDS", "check_design", "check_estimator", "check_relaxation", "score_vector"]
