"""Training of sparse autoencoders: activations of files and models, a trainer, runs that can be resumed, and sweeps.

`train(open_activations("acts.npy"), config, Training(steps=4000), "out")` is what `khot sae` runs. Saving needs
the extra `sae`. The model itself is `khot.nn.SparseAutoencoder`.
"""

from ._activations import Activations, check_activations, open_activations
from ._features import Examples, Features, Ranked, features
from ._formats import load_dictionary_learning, load_sparsify, save_dictionary_learning, save_sparsify
from ._run import Run, measure, sweep, train
from ._streaming import ModelActivations, Pairs, Source
from ._texts import Tokens, open_tokens, open_vocabulary
from ._training import HELD_OUT, RECIPES, Point, Recipe, Trainer, Training

__all__ = ["HELD_OUT", "RECIPES", "Activations", "Point", "Recipe", "Run", "Trainer", "Training", "check_activations"]
__all__ += ["ModelActivations", "Pairs", "Source", "measure", "open_activations", "sweep", "train"]
__all__ += ["Examples", "Features", "Ranked", "Tokens", "features", "open_tokens", "open_vocabulary"]
__all__ += ["load_dictionary_learning", "load_sparsify", "save_dictionary_learning", "save_sparsify"]
