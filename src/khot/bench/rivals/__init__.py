"""The contenders of `khot bench`: published methods in our re-implementation, torch's operators, installed packages.

Every function takes scores x (…, n) and k, works along the last dim and has a backward. `RIVALS` lists them all.
"""

from __future__ import annotations

from ._direct import dftopk as dftopk
from ._direct import ncpss as ncpss
from ._installed import INSTALLED
from ._iterative import goyal as goyal
from ._iterative import xie_ermon as xie_ermon
from ._lapsum import lapsum as lapsum
from ._logistic import bisection as bisection
from ._logistic import halley as halley
from ._logistic import lml as lml
from ._references import REFERENCES
from ._rival import Limit as Limit
from ._rival import Rival as Rival
from ._sinkhorn import ITERATIONS
from ._sinkhorn import soft as soft
from ._subset import simple as simple

# Each limit keeps a call below about 4 GB in float32 and a few seconds; autograd keeps what grows with rows·n·k.
_PASSES = Limit("rows·n·k", 2e8, "k passes, all kept for the backward")
_TABLE = Limit("rows·n·k", 2e7, "the dynamic programme's table, several times, kept for the backward")
_SWEEPS = Limit("rows·n", 4e6, "200 sweeps take tens of seconds")
_STEPS = Limit("n", 20_000, "n steps of Python")
_TEN_ROWS = Limit("rows·n", 1e8, "ten copies of the scores at once")

RIVALS: dict[str, Rival] = {
    "halley": Rival(fn=halley, what="the sigmoid top-k paper's solver: Halley and bisection, sort, float64"),
    "bisection": Rival(fn=bisection, what="σ_k by 64 halvings", python_steps=lambda n, k: 64),
    "lml": Rival(fn=lml, what="σ_k by tenfold bracketing to 1e-4 (LML)", integer_k=True, limits=(_TEN_ROWS,)),
    "lapsum": Rival(fn=lapsum, what="Laplace cdf in closed form after a sort (LapSum)"),
    "soft": Rival(
        fn=soft,
        what="entropic transport, 200 Sinkhorn sweeps (SOFT)",
        limits=(_SWEEPS,),
        python_steps=lambda n, k: ITERATIONS,
    ),
    "goyal": Rival(
        fn=goyal,
        what="k softmaxes around the k greatest",
        integer_k=True,
        limits=(_PASSES,),
        python_steps=lambda n, k: k,
    ),
    "xie_ermon": Rival(
        fn=xie_ermon,
        what="k successive softmaxes, no noise",
        integer_k=True,
        limits=(_PASSES,),
        python_steps=lambda n, k: k,
    ),
    "ncpss": Rival(fn=ncpss, what="scaled sigmoid, no shift (NCPSS)"),
    "dftopk": Rival(fn=dftopk, what="sigmoid around the k-th score, any sum (DFTopK)", sums_to_k=False, integer_k=True),
    "simple": Rival(
        fn=simple,
        what="conditional Poisson marginals by dynamic programme (SIMPLE)",
        integer_k=True,
        limits=(_STEPS, _TABLE),
        python_steps=lambda n, k: n,
    ),
    **REFERENCES,
    **INSTALLED,
}
