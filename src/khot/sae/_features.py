"""What the latents of an autoencoder stand for: statistics and examples of each, in one pass over the activations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import _check
from ..nn import SparseAutoencoder
from ._activations import ROWS, Activations
from ._streaming import Source
from ._texts import Tokens

Array = np.ndarray[Any, Any]
OCTAVE, OCTAVES_BELOW, OCTAVES = 4, 10, 16  # bins of the histogram in an octave; octaves below the scale, and in all
BLOCK = 2**24  # largest number of cosines or logits at a time


class Examples(NamedTuple):
    """Positions at which latents are active, a row of them for each latent; `rows` is −1 where there are no more."""

    rows: Tensor
    """Which rows of the activations, (latents, examples)."""
    values: Tensor
    """The activations there, (latents, examples); 0 where there are no more."""
    shades: Tensor
    """The latent's activations around each, (latents, examples, 2·context + 1); −1 outside its document."""


@dataclass(frozen=True, eq=False)
class Ranked:
    """Hold the largest of a list for each latent, falling; equal ones by number."""

    index: Tensor
    """Numbers of latents or of tokens, (latents, n)."""
    values: Tensor
    """Their cosines or effects, (latents, n)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Features:
    """Hold what `features` returns: figures and examples for each latent."""

    positions: int
    """How many rows were read."""
    count: Tensor
    """At how many of them each latent is active, (latents,)."""
    mean: Tensor
    """Its mean activation where it is active, (latents,); 0 if it never is."""
    maximum: Tensor
    """Its largest activation, (latents,)."""
    energy: Tensor
    """The sum of its squared activations, (latents,): what it adds to reconstructions."""
    histogram: Tensor
    """How many activations are between two edges, (latents, 64). The outermost bins have all that is beyond."""
    edges: Tensor
    """The 65 edges of the bins, four in each octave."""
    top: Examples
    """The largest activations, at most one from a document; of equal ones the earliest."""
    sampled: Examples
    """A uniform sample of all activations, by falling activation, so that weaker ones are seen too."""
    neighbors: Ranked
    """The other latents whose directions in W_dec have the largest cosines with this one's."""
    promoted: Ranked | None
    """The tokens whose logits the direction raises most; None without an unembedding."""
    suppressed: Ranked | None
    """The tokens whose logits it lowers most."""
    tokens: Tokens | None
    """The tokens of the rows, as given."""

    @property
    def density(self) -> Tensor:
        """Return the fraction of rows at which each latent is active, (latents,)."""
        return self.count.double() / max(1, self.positions)


@torch.no_grad()
def features(
    sae: SparseAutoencoder,
    activations: Source | Tensor,
    *,
    tokens: Tokens | None = None,
    documents: Array | Tensor | None = None,
    unembedding: Tensor | None = None,
    examples: int = 8,
    context: int = 12,
    neighbors: int = 6,
    limit: int | None = None,
    on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> Features:
    """Find what each latent stands for, in one pass over the activations.

    The result is exact: it does not depend on the parts in which the rows are read. Memory is bounded by latents ×
    examples × context.

    Args:
        sae: the autoencoder; it is evaluated, and its latents must not be divided over processes.
        activations: (tokens, d), or a source of them such as `ModelActivations`; read once from beginning to end.
        tokens: the token of each row. Their documents are taken if `documents` is not given.
        documents: a number for each row, (tokens,). Neighbouring rows with the same number are a document: contexts do
            not leave it, and it gives at most one top example. By default every row is one.
        unembedding: (vocabulary, d), to find the tokens that each direction of W_dec promotes and suppresses.
        examples: how many top positions, and how many sampled ones, for each latent.
        context: how many rows before and after an example are looked at.
        neighbors: how many nearest directions, and how many tokens of each sort.
        limit: read about so many rows only: parts of 16384 neighbouring rows, evenly spaced.
        on_rows: called with the number of rows read so far, and of all of them.

    Examples:
        >>> from khot.sae import Tokens, features
        >>> config = khot.nn.SparseAutoencoderConfig(d_in=3, latents=3, k=1)
        >>> sae = khot.nn.SparseAutoencoder(config).requires_grad_(False)
        >>> for weight in (sae.W_enc, sae.W_dec):
        ...     _ = weight.copy_(torch.eye(3))
        >>> x = torch.tensor([[1.0, 0, 0], [0, 2, 0], [3, 0, 0]])
        >>> found = features(sae, x, tokens=Tokens.of([["to", "be", "too"]]), context=1)
        >>> found.count, found.top.rows[:, 0]
        (tensor([2, 1, 0]), tensor([ 2,  1, -1]))
        >>> found.top.shades[1, 0]
        tensor([0., 2., 0.])
    """
    data = Activations(_rows_of(activations)) if isinstance(activations, Tensor) else activations
    for name, value, least in (("examples", examples, 1), ("context", context, 0), ("neighbors", neighbors, 1)):
        _check.at_least(name, value, least)
    if sae.ranks.latents:
        raise ValueError("`sae` must have all its latents on this process; they are divided: save it and load it.")
    if data.d != sae.config.d_in:
        raise ValueError(f"`activations` must have {sae.config.d_in} columns (`d_in`); got {data.d}.")
    if tokens is not None and len(tokens) != data.tokens:
        raise ValueError(f"`tokens` must be one for each of the {data.tokens} rows of activations; got {len(tokens)}.")
    given = tokens.documents if documents is None and tokens is not None else documents
    at = None if given is None else np.asarray(given)
    if at is not None and at.shape != (data.tokens,):
        raise ValueError(f"`documents` must have the shape ({data.tokens},), a number for each row; got {at.shape}.")
    d_out = sae.W_dec.shape[-1]
    if unembedding is not None and (unembedding.ndim != 2 or unembedding.shape[1] != d_out):
        raise ValueError(f"`unembedding` must have the shape (vocabulary, {d_out}); got {tuple(unembedding.shape)}.")
    if unembedding is not None and not unembedding.isfinite().all():
        raise ValueError("`unembedding` must be finite; got NaN or infinite values.")

    is_training = sae.training
    try:
        found = _read(sae.eval(), data, _numbered(at), examples, context, limit, on_rows)
    finally:
        sae.train(is_training)
    directions = normalize(sae.W_dec.detach().float())
    near = _ranked(directions, directions, neighbors, is_self=True)
    promoted = suppressed = None
    if unembedding is not None:
        logits = unembedding.to(directions)
        promoted, below = _ranked(directions, logits, neighbors), _ranked(directions, -logits, neighbors)
        suppressed = Ranked(below.index, -below.values)
    return Features(**found, neighbors=near, promoted=promoted, suppressed=suppressed, tokens=tokens)


def _read(
    sae: SparseAutoencoder,
    data: Source,
    documents: Array | None,
    examples: int,
    context: int,
    limit: int | None,
    on_rows: Callable[[int, int], None],
) -> dict[str, Any]:
    """Return the first fields of `Features`, from the pass over the rows."""
    n = sae.config.latents
    scale = 2.0 ** round(float(torch.log2(sae.scale)))
    edges = scale * 2 ** ((torch.arange(OCTAVE * OCTAVES + 1).double() / OCTAVE) - OCTAVES_BELOW)
    edges = edges.float()
    count, histogram = torch.zeros(n, dtype=torch.long), torch.zeros(n * OCTAVE * OCTAVES, dtype=torch.long)
    total, energy, maximum = torch.zeros(n).double(), torch.zeros(n).double(), torch.zeros(n)
    top, sampled = _Best(n, examples, context, by_document=True), _Best(n, examples, context, by_document=False)
    parts, done = list(_parts(data.tokens, limit)), 0
    rows_in_all = sum(stop - start for start, stop in parts)
    for start, stop in parts:
        low, high = max(0, start - context), min(data.tokens, stop + context)
        x = data.rows(slice(low, high))
        if not x.isfinite().all():
            row = low + int((~x.isfinite().all(1)).nonzero()[0])
            raise ValueError(f"`activations` must be finite; got NaN or infinite values in row {row}: leave it out.")
        code = sae.encode(x)
        is_active = code.values > 0
        values, latents, rows = (t[is_active].cpu() for t in (code.values.float(), code.latents, code.tokens))
        rows = rows + low
        around = _Around(rows.numpy(), latents.numpy(), values.numpy(), n, (low, high), documents)
        own = (rows >= start) & (rows < stop)
        values, latents, rows = values[own], latents[own], rows[own]
        count += torch.bincount(latents, minlength=n)
        total += torch.bincount(latents, values.double(), minlength=n)
        energy += torch.bincount(latents, values.double().square(), minlength=n)
        maximum.scatter_reduce_(0, latents, values, "amax")
        bins = (torch.bucketize(values, edges, right=True) - 1).clamp(0, OCTAVE * OCTAVES - 1)
        histogram += torch.bincount(latents * OCTAVE * OCTAVES + bins, minlength=len(histogram))
        at, which, strength = rows.numpy(), latents.numpy(), values.numpy()
        top.add(which, at, strength, strength.astype(np.float64), around)
        sampled.add(which, at, strength, -_hash(which, at), around)
        done += stop - start
        on_rows(done, rows_in_all)
    found: dict[str, Any] = {
        "positions": done,
        "count": count,
        "mean": (total / count.clamp(min=1)).float(),
        "maximum": maximum,
    }
    found |= {"energy": energy, "histogram": histogram.view(n, -1), "edges": edges}
    return found | {"top": top.examples(), "sampled": sampled.examples()}


def _rows_of(x: Tensor) -> Array:
    """Return a tensor as an array, which has no bfloat16."""
    if x.ndim != 2:
        raise ValueError(f"`activations` must have the shape (tokens, d); got {tuple(x.shape)}.")
    rows: Array = (x.float() if x.dtype == torch.bfloat16 else x).detach().cpu().numpy()
    return rows


def _parts(tokens: int, limit: int | None) -> Iterator[tuple[int, int]]:
    """Yield the first rows of the parts to read, and where they end."""
    if limit is None or limit >= tokens:
        yield from ((start, min(start + ROWS, tokens)) for start in range(0, tokens, ROWS))
        return
    _check.at_least("limit", limit, 1)
    size = min(ROWS, limit)
    for start in np.linspace(0, tokens - size, -(-limit // size)).astype(np.int64).tolist():
        yield start, start + size


def _numbered(documents: Array | None) -> Array | None:
    """Return documents numbered from 0 in the order of the rows, so that one that comes again is another."""
    if documents is None or not len(documents):
        return None
    return np.concatenate(([0], np.cumsum(documents[1:] != documents[:-1])))


def _hash(latents: Array, rows: Array) -> Array:
    """Return a pseudo-random number below 2⁵² for each entry, a function of the entry alone (SplitMix64)."""
    first, second = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
    z = rows.astype(np.uint64) * first + latents.astype(np.uint64) * second
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    key: Array = (z ^ (z >> np.uint64(31))) >> np.uint64(12)
    return key.astype(np.float64)


class _Around:
    """Look up entries of a part of the rows around a position."""

    def __init__(
        self, rows: Array, latents: Array, values: Array, n: int, span: tuple[int, int], documents: Array | None
    ) -> None:
        keys = rows * n + latents
        order = np.argsort(keys, kind="stable")
        self.keys, self.values, self.n, self.span, self.documents = keys[order], values[order], n, span, documents

    def shades(self, latents: Array, rows: Array, context: int) -> Array:
        """Return the activations around each entry, (entries, 2·context + 1); −1 outside its document."""
        at = rows[:, None] + np.arange(-context, context + 1)
        inside = (at >= self.span[0]) & (at < self.span[1])
        if self.documents is None:
            inside &= at == rows[:, None]
        else:
            place = np.clip(at, 0, len(self.documents) - 1)
            inside &= self.documents[place] == self.documents[rows][:, None]
        keys = at * self.n + latents[:, None]
        place = np.searchsorted(self.keys, keys).clip(max=max(0, len(self.keys) - 1))
        found = np.where(self.keys[place] == keys, self.values[place], 0) if len(self.keys) else np.zeros(keys.shape)
        return np.where(inside, found, -1).astype(np.float32)


class _Best:
    """Keep the entries with the largest scores of each latent so far: equal ones by rising row, one of a document."""

    def __init__(self, n: int, most: int, context: int, *, by_document: bool) -> None:
        self.n, self.most, self.context, self.by_document = n, most, context, by_document
        self.latents, self.rows = np.empty(0, np.int64), np.empty(0, np.int64)
        self.values, self.scores = np.empty(0, np.float32), np.empty(0)
        self.shades = np.empty((0, 2 * context + 1), np.float32)
        self.least = np.full(n, -np.inf)  # what an entry must exceed

    def add(self, latents: Array, rows: Array, values: Array, scores: Array, around: _Around) -> None:
        """Take in entries of later rows."""
        passes = scores > self.least[latents]  # an equal one is of a later row
        latents, rows, values, scores = latents[passes], rows[passes], values[passes], scores[passes]
        is_split = self.by_document and around.documents is not None
        best = _first(latents, rows, scores, around.documents if is_split else None, self.most)
        latents, rows, values, scores = latents[best], rows[best], values[best], scores[best]
        fresh = around.shades(latents, rows, self.context)
        latents, rows = np.concatenate((self.latents, latents)), np.concatenate((self.rows, rows))
        scores = np.concatenate((self.scores, scores))
        kept = _first(latents, rows, scores, around.documents if is_split else None, self.most)
        self.latents, self.rows, self.scores = latents[kept], rows[kept], scores[kept]
        self.values = np.concatenate((self.values, values))[kept]
        self.shades = np.concatenate((self.shades, fresh))[kept]
        is_last = _rank(self.latents) == self.most - 1
        self.least[self.latents[is_last]] = self.scores[is_last]

    def examples(self) -> Examples:
        """Return them by falling activation, and equal ones by row."""
        order = np.lexsort((self.rows, -self.values, self.latents))
        latents, place = self.latents[order], _rank(self.latents[order])
        rows = np.full((self.n, self.most), -1)
        values = np.zeros((self.n, self.most), np.float32)
        shades = np.full((self.n, self.most, 2 * self.context + 1), -1, np.float32)
        rows[latents, place], values[latents, place] = self.rows[order], self.values[order]
        shades[latents, place] = self.shades[order]
        return Examples(*map(torch.from_numpy, (rows, values, shades)))


def _first(latents: Array, rows: Array, scores: Array, documents: Array | None, most: int) -> Array:
    """Return the places of each latent's `most` largest scores, one of a document, by latent and falling score."""
    order = np.lexsort((rows, -scores, latents))
    if documents is not None:
        latent, document = latents[order], documents[rows[order]]
        same = np.lexsort((document, latent))  # stable: the largest of a document comes first
        is_new = np.ones(len(same), bool)
        is_new[1:] = (np.diff(latent[same]) != 0) | (np.diff(document[same]) != 0)
        order = order[np.sort(same[is_new])]
    return order[_rank(latents[order]) < most]


def _rank(groups: Array) -> Array:
    """Return the place of each entry within its group; equal numbers, which stand together, are a group."""
    is_start = np.ones(len(groups), bool)
    is_start[1:] = groups[1:] != groups[:-1]
    starts = np.flatnonzero(is_start)
    return np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))


def _ranked(directions: Tensor, others: Tensor, most: int, *, is_self: bool = False) -> Ranked:
    """Return the largest products of each direction with the rows of `others`; equal ones by number."""
    count = min(most, len(others) - is_self)
    index = torch.zeros(len(directions), max(0, count), dtype=torch.long)
    values = torch.zeros(len(directions), max(0, count))
    if count < 1:
        return Ranked(index, values)
    size = max(1, BLOCK // len(others))
    for start in range(0, len(directions), size):
        product = directions[start : start + size] @ others.t()
        if is_self:
            product[torch.arange(len(product)), torch.arange(start, start + len(product))] = -torch.inf
        bound = product.topk(count).values[:, -1:]
        rows, columns = (product >= bound).nonzero().t().cpu().numpy()
        found = product[rows, columns].cpu().numpy()
        best = _first(rows, columns, found, None, count)
        index[start : start + size] = torch.from_numpy(columns[best]).view(-1, count)
        values[start : start + size] = torch.from_numpy(found[best]).view(-1, count)
    return Ranked(index, values)
