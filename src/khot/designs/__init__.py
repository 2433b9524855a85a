"""Laws of k-hot vectors with given inclusion probabilities, as torch.distributions."""

from ._brewer import Brewer as Brewer
from ._conditional_poisson import ConditionalPoisson as ConditionalPoisson
from ._design import Design as Design
from ._pivotal import Pivotal as Pivotal
from ._sampford import Sampford as Sampford
from ._systematic import Systematic as Systematic
