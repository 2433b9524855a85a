"""The torch.library ops around the solvers: schemas, fakes, vmap rules, derivatives, and the table of backends.

An op is opaque to compile, export and vmap, and has its own derivatives in both modes, so a graph that holds it can be
trained anywhere. The rest of khot calls `topk`, `margin` and `hard_topk`. They take the one short cut around the
dispatcher, for ordinary CPU tensors while nothing watches, because the dispatcher takes longer than a small row does.
The kernels of all devices are eager torch that never reads a value on the host; on the CPU, `khot.kernels` replaces
them where it can.
"""

from . import _costs as costs
from . import _logs as logs
from ._samplers import (
    WHOLE,
    brewer,
    cube,
    local_pivotal,
    natural_parameters,
    order,
    pivotal,
    prices,
    rejective,
    sampford,
    systematic,
    uniform,
)
from ._statistical import quick_cutoff, statistical_cutoff, statistical_topk
from ._topk import (
    HAS_NATIVE,
    constant,
    direct_topk,
    hard_topk,
    is_plain,
    is_watched,
    margin,
    sigmoid_margins,
    sums_at,
    takes_halves,
    topk,
    topk_into,
    value_at,
)

__all__ = [
    "HAS_NATIVE",
    "constant",
    "hard_topk",
    "is_plain",
    "is_watched",
    "margin",
    "sigmoid_margins",
    "topk",
]
__all__ += [
    "WHOLE",
    "brewer",
    "natural_parameters",
    "order",
    "pivotal",
    "rejective",
    "sampford",
    "systematic",
    "uniform",
]
__all__ += ["quick_cutoff", "statistical_cutoff", "statistical_topk"]
__all__ += ["costs", "cube", "direct_topk", "local_pivotal", "logs", "prices"]
__all__ += ["sums_at", "takes_halves", "topk_into", "value_at"]
