"""Laws of k-hot vectors with given inclusion probabilities, as torch.distributions."""

from ._design import Design as Design
from ._pivotal import Pivotal as Pivotal
from ._systematic import Systematic as Systematic
