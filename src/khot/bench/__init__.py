"""The benchmark behind `khot bench`: contenders, an interleaved measurement, and reports as strings and tables.

Nothing here prints. `measure(CONTENDERS, Settings(shape=(4096, 64), k=8))` gives a `Report`; `records`, `to_csv`,
`to_json`, `to_markdown` and `to_table` show it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._files import write as write
from .._math import cdfs, threshold
from .._shape import compute_dtype
from ..designs import sample_khot, sample_relaxed_khot
from ..relaxations import cauchy_topk, euclidean_topk, hard_topk, laplace_topk, normal_topk, power_topk, sigmoid_topk
from ._files import markdown_table as markdown_table
from ._measure import measure as measure
from ._report import COLUMNS as COLUMNS
from ._report import environment as environment
from ._report import records as records
from ._report import threads as threads
from ._report import to_csv as to_csv
from ._report import to_json as to_json
from ._report import to_markdown as to_markdown
from ._report import to_table as to_table
from ._results import BASELINE as BASELINE
from ._results import Report as Report
from ._results import Result as Result
from ._results import Settings as Settings
from ._results import Timing as Timing
from .rivals import RIVALS as RIVALS
from .rivals import Rival as Rival


@torch.no_grad()
def eager(x: Tensor, k: float) -> Tensor:
    """σ_k where no native library was built, forward only."""
    one = torch.ones(x.shape[:-1], dtype=torch.float64, device=x.device)
    return threshold.topk(
        x.to(compute_dtype(x.dtype)), k * one, one, None, cdfs.SIGMOID_PLACE, 0.0, early_stop=True
    ).to(x.dtype)


def steps(n: int, k: float) -> float:
    """The longest loop of the eager solver."""
    return threshold.MAX_STEPS


OURS: dict[str, Rival] = {
    BASELINE: Rival(fn=sigmoid_topk, what="khot's σ_k", kind="khot", inner_k=False),
    "eager": Rival(
        fn=eager, what="khot's σ_k without the native library", kind="khot", inner_k=False, python_steps=steps
    ),
    **{
        member.__name__: Rival(fn=member, what=f"khot's {what}", kind="khot", inner_k=False)
        for member, what in (
            (laplace_topk, "Laplace top-k, as LapSum"),
            (normal_topk, "normal top-k"),
            (cauchy_topk, "Cauchy top-k"),
            (euclidean_topk, "Euclidean projection, sparse"),
            (power_topk, "p-norm top-k, sparse"),
        )
    },
    "hard_topk": Rival(fn=hard_topk, what="khot's hard k-hot, no gradient", kind="khot", integer_k=True, inner_k=False),
    "sample_khot": Rival(fn=sample_khot, what="khot's k-hot sample, pivotal", kind="khot", inner_k=False),
    "sample_relaxed_khot": Rival(fn=sample_relaxed_khot, what="khot's relaxed sample", kind="khot", inner_k=False),
}
CONTENDERS: dict[str, Rival] = {**OURS, **RIVALS}
