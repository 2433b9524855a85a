"""The shipped checks: what khot's own tests run, for third parties to run on their own functions."""

from ._relaxation import check_relaxation as check_relaxation
