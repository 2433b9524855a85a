"""Training of sparse autoencoders on files of activations: readers, a trainer, and runs that can be resumed.

`train(open_activations("acts.npy"), config, Training(steps=4000), "out")` is what `khot sae` runs. Saving needs
the extra `sae`. The model itself is `khot.nn.SparseAutoencoder`.
"""

from ._activations import Activations, check_activations, open_activations
from ._run import Run, measure, train
from ._training import HELD_OUT, RECIPES, Point, Recipe, Trainer, Training

__all__ = ["HELD_OUT", "RECIPES", "Activations", "Point", "Recipe", "Run", "Trainer", "Training", "check_activations"]
__all__ += ["measure", "open_activations", "train"]
