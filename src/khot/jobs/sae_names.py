"""What the list of latents in the report of `khot sae` is made from: the files with tokens, and the pass over rows."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from .._process import threads_for
from ..nn import SparseAutoencoder
from ..sae import Activations, Features, Source, Tokens, features, open_activations, open_tokens, open_vocabulary

ROWS, EXAMPLES = 2**17, 6  # largest number of rows that are read; examples of each sort for a latent


class Names(NamedTuple):
    """Hold the texts of the rows, and what gives logits; None for what is not known."""

    tokens: Tokens | None = None
    unembedding: Tensor | None = None


def read_names(
    data: Activations, d_out: int, tokens: Path | None, vocabulary: Path | None, unembedding: Path | None
) -> Names:
    """Read the files, before the long work; raise ValueError if they do not fit the activations."""
    words = open_vocabulary(vocabulary) if vocabulary else None
    texts = open_tokens(tokens, words) if tokens else None
    if texts is not None and len(texts) != data.tokens:
        raise ValueError(f"{tokens} must have a token for each of the {data.tokens} rows; got {len(texts)}")
    if vocabulary and (texts is None or texts.vocabulary is not words):
        raise ValueError(f"{vocabulary} needs --tokens, a .npy file of numbers, whose texts it has; got {tokens}")
    if unembedding is None:
        return Names(texts)
    if texts is None or texts.vocabulary is not words:
        raise ValueError(
            f"{unembedding} needs --tokens, a .npy file of numbers, and --vocabulary, which has their texts"
        )
    matrix = open_activations(unembedding)
    if (matrix.tokens, matrix.d) != (len(texts.vocabulary), d_out):
        got = f"({matrix.tokens}, {matrix.d})"
        raise ValueError(f"{unembedding} must have the shape ({len(texts.vocabulary)}, {d_out}); got {got}")
    return Names(texts, matrix.rows(slice(None)))


def look(
    folder: Path, data: Source, names: Names, on_rows: Callable[[int, int], None] = lambda done, total: None
) -> Features:
    """Load the autoencoder of a folder and look at its latents, on at most 131072 rows."""
    sae = SparseAutoencoder.load(folder)
    with threads_for(2**14 * data.d * sae.config.latents):
        return features(sae, data, **names._asdict(), examples=EXAMPLES, limit=ROWS, on_rows=on_rows)
