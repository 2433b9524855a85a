"""Laws of k-hot vectors with given inclusion probabilities, as torch.distributions."""

from ._design import Design as Design
from ._high_entropy import Brewer as Brewer
from ._high_entropy import ConditionalPoisson as ConditionalPoisson
from ._high_entropy import Sampford as Sampford
from ._horvitz_thompson import horvitz_thompson as horvitz_thompson
from ._horvitz_thompson import horvitz_thompson_variance as horvitz_thompson_variance
from ._order import Pareto as Pareto
from ._order import PlackettLuce as PlackettLuce
from ._pivotal import Pivotal as Pivotal
from ._pivotal import Systematic as Systematic
from ._sample import KHotStraightThrough as KHotStraightThrough
from ._sample import MakesDesign as MakesDesign
from ._sample import RelaxedKHot as RelaxedKHot
from ._sample import sample_khot as sample_khot
from ._sample import sample_relaxed_khot as sample_relaxed_khot

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
