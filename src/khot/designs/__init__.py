"""Laws of k-hot vectors with given inclusion probabilities, as torch.distributions."""

from ._balanced import Budgeted, Cube, LocalPivotal, spatial_order
from ._design import Design
from ._file import sample_file
from ._high_entropy import Brewer, ConditionalPoisson, Pareto, Sampford
from ._order import PlackettLuce
from ._pivotal import Pivotal, Systematic
from ._rows import SampledRows
from ._rows import inclusion_probs as inclusion_probs
from ._rows import sample_rows as sample_rows
from ._sample import KHotStraightThrough, RelaxedKHot, sample_parts
from ._sample import MakesDesign as MakesDesign
from ._sample import sample_khot as sample_khot
from ._sample import sample_relaxed_khot as sample_relaxed_khot
from ._totals import horvitz_thompson as horvitz_thompson
from ._totals import horvitz_thompson_variance as horvitz_thompson_variance

__all__ = ["Brewer", "ConditionalPoisson", "Design", "Pareto", "Pivotal", "PlackettLuce", "Sampford", "Systematic"]
__all__ += ["Budgeted", "Cube", "LocalPivotal", "spatial_order"]
__all__ += ["KHotStraightThrough", "RelaxedKHot", "SampledRows", "sample_file", "sample_parts"]


def __dir__() -> list[str]:
    return __all__
