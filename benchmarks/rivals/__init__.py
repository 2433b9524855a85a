"""Published methods in our re-implementation.

Every function takes scores x (…, n) and k, works along the last dim and has a backward. `RIVALS` lists them, and `ALL`
adds the contenders of `khot bench`. `khot bench --also benchmarks.rivals:RIVALS` times them at your shape.
"""

from __future__ import annotations

from khot.bench import CONTENDERS, Contender, Limit

from .direct import dftopk as dftopk
from .direct import ncpss as ncpss
from .iterative import goyal as goyal
from .iterative import xie_ermon as xie_ermon
from .logistic import bisection as bisection
from .logistic import lml as lml
from .published import halley as halley
from .published import lapsum as lapsum
from .sinkhorn import ITERATIONS
from .sinkhorn import soft as soft
from .subset import simple as simple

# Each limit keeps a call below about 4 GB in float32 and a few seconds; autograd keeps what grows with rows·n·k.
_PASSES = Limit("rows·n·k", 2e8, "k passes, all kept for the backward")
_TABLE = Limit("rows·n·k", 2e7, "the dynamic programme's table, several times, kept for the backward")
_SWEEPS = Limit("rows·n", 4e6, "200 sweeps take tens of seconds")
_STEPS = Limit("n", 20_000, "n steps of Python")
_TEN_ROWS = Limit("rows·n", 1e8, "ten copies of the scores at once")

RIVALS: dict[str, Contender] = {
    "halley": Contender(fn=halley, what="the sigmoid top-k paper's solver: Halley and bisection, sort, float64"),
    "bisection": Contender(fn=bisection, what="σ_k by 64 halvings", python_steps=lambda n, k: 64),
    "lml": Contender(fn=lml, what="σ_k by tenfold bracketing to 1e-4 (LML)", integer_k=True, limits=(_TEN_ROWS,)),
    "lapsum": Contender(fn=lapsum, what="Laplace cdf in closed form after a sort (LapSum)"),
    "soft": Contender(
        fn=soft,
        what="entropic transport, 200 Sinkhorn sweeps (SOFT)",
        limits=(_SWEEPS,),
        python_steps=lambda n, k: ITERATIONS,
    ),
    "goyal": Contender(
        fn=goyal,
        what="k softmaxes around the k largest",
        integer_k=True,
        limits=(_PASSES,),
        python_steps=lambda n, k: k,
    ),
    "xie_ermon": Contender(
        fn=xie_ermon,
        what="k successive softmaxes, no noise",
        integer_k=True,
        limits=(_PASSES,),
        python_steps=lambda n, k: k,
    ),
    "ncpss": Contender(fn=ncpss, what="scaled sigmoid, no shift (NCPSS)"),
    "dftopk": Contender(
        fn=dftopk, what="sigmoid around the k-th score, any sum (DFTopK)", sums_to_k=False, integer_k=True
    ),
    "simple": Contender(
        fn=simple,
        what="conditional Poisson marginals by dynamic programme (SIMPLE)",
        integer_k=True,
        limits=(_STEPS, _TABLE),
        python_steps=lambda n, k: n,
    ),
}

_FIRST = [name for name, contender in CONTENDERS.items() if contender.kind == "khot"]
ALL: dict[str, Contender] = {name: CONTENDERS[name] for name in _FIRST} | RIVALS | CONTENDERS
"""khot's own first, in the order of the tables."""
