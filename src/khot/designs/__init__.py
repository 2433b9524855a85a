"""Laws of k-hot vectors with given inclusion probabilities, as torch.distributions."""

from ._brewer import Brewer as Brewer
from ._conditional_poisson import ConditionalPoisson as ConditionalPoisson
from ._design import Design as Design
from ._pareto import Pareto as Pareto
from ._pivotal import Pivotal as Pivotal
from ._plackett_luce import PlackettLuce as PlackettLuce
from ._relaxed import KHotStraightThrough as KHotStraightThrough
from ._relaxed import RelaxedKHot as RelaxedKHot
from ._sampford import Sampford as Sampford
from ._systematic import Systematic as Systematic

__all__ = [
    "Brewer",
    "ConditionalPoisson",
    "Design",
    "KHotStraightThrough",
    "Pareto",
    "Pivotal",
    "PlackettLuce",
    "RelaxedKHot",
    "Sampford",
    "Systematic",
]
