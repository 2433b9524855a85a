"""The torch.library ops around the solvers: schemas, fakes, vmap rules, derivatives, and the table of backends.

An op is opaque to compile, export and vmap, and carries its own derivatives of both modes, so that a graph that holds
it can be trained wherever it goes. `topk`, `margin` and `hard_topk` here are what the rest of khot calls: they take the
one short cut around the dispatcher, for ordinary CPU tensors while nothing watches, because the dispatcher takes longer
than a small row does. The kernels given to all devices are eager torch that never reads a value on the host;
`khot.kernels` takes the CPU over.
"""

from ._samplers import brewer as brewer
from ._samplers import natural_parameters as natural_parameters
from ._samplers import order as order
from ._samplers import pivotal as pivotal
from ._samplers import rejective as rejective
from ._samplers import sampford as sampford
from ._samplers import sigmoid_margins as sigmoid_margins
from ._samplers import systematic as systematic
from ._samplers import uniform as uniform
from ._topk import HAS_NATIVE as HAS_NATIVE
from ._topk import constant as constant
from ._topk import hard_topk as hard_topk
from ._topk import is_plain as is_plain
from ._topk import is_watched as is_watched
from ._topk import margin as margin
from ._topk import topk as topk
