"""Training of sparse autoencoders on files of activations: readers, a trainer, and runs that can be resumed.

`train(open_activations("acts.npy"), config, Training(steps=4000), "out")` is what `khot sae` runs. Saving needs
the extra `sae`. The model itself is `khot.nn.SparseAutoencoder`.
"""

from ._activations import Activations as Activations
from ._activations import check_activations as check_activations
from ._activations import open_activations as open_activations
from ._run import Run as Run
from ._run import measure as measure
from ._run import train as train
from ._training import HELD_OUT as HELD_OUT
from ._training import RECIPES as RECIPES
from ._training import Point as Point
from ._training import Recipe as Recipe
from ._training import Trainer as Trainer
from ._training import Training as Training
