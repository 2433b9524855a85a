"""One row on many ranks: what the functions of khot do with `group=` and with a DTensor.

Every function that takes `group=` takes this process's part of each row, of any length, even 0. k and T are the same on
all processes of the group. A DTensor says by itself which of its dimensions are split over which processes.
"""

from .._math.across import Message, messages
from .._math.across import Over as Over
from ._exchange import ON_ALL as ON_ALL
from ._exchange import exchange as exchange
from ._exchange import exchange_counts as exchange_counts
from ._exchange import on_first as on_first
from ._exchange import together as together
from ._layout import names_of as names_of
from ._layout import on_parts as on_parts
from ._relax import hard_topk as hard_topk
from ._relax import margin as margin
from ._relax import of_best_part as of_best_part
from ._relax import smooth_value as smooth_value
from ._relax import spread, total
from ._relax import topk as topk
from ._samples import draw_conditional_poisson as draw_conditional_poisson
from ._samples import draw_pivotal as draw_pivotal
from ._samples import draw_systematic as draw_systematic
from ._samples import layout as layout

__all__ = ["Message", "messages", "spread", "total"]


def __dir__() -> list[str]:
    return __all__
