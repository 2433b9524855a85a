"""The feature browser of a report: what `khot.sae.features` found, as JSON, and the script that shows it."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..sae import Examples, Features, Ranked
from ._page import Html, dim, section, tag

MOST_LATENTS = 4096  # of which a page has the examples
LEVELS = 9  # of the shade of a token
STYLE, SCRIPT = ((files(__package__) / f"browser.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
ORDERS = {
    "maximum": "largest activation",
    "frequent": "most frequent",
    "rare": "rarest",
    "mean": "mean activation",
    "number": "number",
}


def browser(found: Features) -> Html:
    """Make the section of the page; its script and its style are `SCRIPT` and `STYLE`."""
    data = contents(found)
    options = [tag("option", what, value=name) for name, what in ORDERS.items()]
    search = Html('<input id="query" type="search" placeholder="token, text or number" aria-label="search">')
    alive = tag("label", Html('<input type="checkbox" id="alive" checked>'), "hide dead", class_="check")
    row = tag("div", tag("select", *options, id="order", title="order"), alive, class_="row")
    status = tag("p", id="status", class_="status", role="status")
    left = tag("div", tag("div", search, row, status, class_="controls"), tag("ol", id="list"))
    panes = tag("div", left, tag("article", id="detail"), class_="panes")
    keys = Html("<kbd>/</kbd> searches, <kbd>j</kbd> and <kbd>k</kbd> or the arrows go through the list.")
    body = section("The latents", _said(found, data), panes, tag("p", keys, class_="dim keys"))
    raw = tag("script", Html(_script_json(data)), type="application/json", id="features")
    without = Html("<noscript>The list of latents needs JavaScript.</noscript>")
    return Html(body.replace("<section", '<section id="browser"', 1) + without + raw)


def contents(found: Features) -> dict[str, Any]:
    """Return what the script reads: latents that were active, dead ones as numbers, texts and the words they have."""
    alive = found.count > 0
    chosen = alive.nonzero().squeeze(1)
    if len(chosen) > MOST_LATENTS:
        best = found.energy[chosen].sort(descending=True, stable=True).indices[:MOST_LATENTS]
        chosen = chosen[best].sort().values
    text = _Text(found, chosen)
    latents = []
    for i in chosen.tolist():
        counts = found.histogram[i]
        full = counts.nonzero().squeeze(1)
        first, last = int(full[0]), int(full[-1])
        largest = float(found.maximum[i])
        latents.append(
            [
                *(i, int(found.count[i]), _short(float(found.mean[i])), _short(largest)),
                *(first, counts[first : last + 1].tolist()),
                *(text.examples(part, i, largest) for part in (found.top, found.sampled)),
                found.neighbors.index[i].tolist(),
                [round(100 * cosine) for cosine in found.neighbors.values[i].tolist()],
                *(text.effects(part, i) for part in (found.promoted, found.suppressed)),
            ]
        )
    dead = (~alive).nonzero().squeeze(1)[:MOST_LATENTS]
    return {
        "n": len(alive),
        "positions": found.positions,
        "edges": [_short(edge) for edge in found.edges.tolist()],
        "words": text.words,
        "text": text.stream,
        "latents": latents,
        "dead": dead.tolist(),
    }


class _Text:
    """Keep the rows around the examples in one stream of words, so that each row stands in the page once."""

    def __init__(self, found: Features, chosen: Tensor) -> None:
        self.words: list[str] = []
        self.stream: list[int] = []
        self._numbers: dict[int, int] = {}
        self.tokens = found.tokens
        if self.tokens is None:
            return
        self.spelled = _spelling(self.tokens.vocabulary)
        is_needed = np.zeros(len(self.tokens), bool)
        for part in (found.top, found.sampled):
            rows, shades = part.rows[chosen].numpy(), part.shades[chosen].numpy()
            at = rows[:, :, None] + np.arange(shades.shape[2]) - shades.shape[2] // 2
            is_needed[at[(shades >= 0) & (rows[:, :, None] >= 0)]] = True
        self.places = np.cumsum(is_needed) - 1
        self.stream = [self.word(number) for number in self.tokens.ids[is_needed].tolist()]

    def word(self, number: int) -> int:
        """Return the place in `words` of a token of the vocabulary."""
        if number not in self._numbers:
            self._numbers[number] = len(self.words)
            known = self.tokens is not None and number < len(self.tokens.vocabulary)
            self.words.append(self.spelled(number) if known else f"<{number}>")
        return self._numbers[number]

    def examples(self, part: Examples, latent: int, largest: float) -> list[list[Any]]:
        """Return [row, activation, where its text begins, its place there, the shades of its tokens] for each."""
        result: list[list[Any]] = []
        rows, values = part.rows[latent].tolist(), part.values[latent].tolist()
        for row, value, shades in zip(rows, values, part.shades[latent], strict=True):
            if row < 0:
                break
            if self.tokens is None:
                result.append([row, _short(value), -1, 0, ""])
                continue
            inside = (shades >= 0).nonzero().squeeze(1)
            first, last = int(inside[0]), int(inside[-1])
            before = len(shades) // 2 - first
            levels = torch.ceil(LEVELS * shades[first : last + 1] / largest).clamp(0, LEVELS).int().tolist()
            start = int(self.places[row - before])
            result.append([row, _short(value), start, before, "".join(map(str, levels))])
        return result

    def effects(self, part: Ranked | None, latent: int) -> list[list[Any]]:
        """Return [word, effect] for each token; none without an unembedding or a vocabulary."""
        if part is None or self.tokens is None:
            return []
        pairs = zip(part.index[latent].tolist(), part.values[latent].tolist(), strict=True)
        return [[self.word(number), _short(value)] for number, value in pairs]


def _spelling(vocabulary: Sequence[str]) -> Any:
    """Return a function from a token's number to its text with the space before it, for the usual tokenizers."""
    marks = ("Ġ", "▁")
    is_marked = any(token.startswith(marks) for token in vocabulary)
    has_spaces = any(token.startswith(" ") and token.strip() for token in vocabulary)

    def spelled(number: int) -> str:
        token = vocabulary[number]
        if is_marked:
            token = " " + token[1:] if token.startswith(marks) else token
        elif not has_spaces:
            token = token.removeprefix("##") if token.startswith("##") and token != "##" else " " + token
        return token.replace("Ċ", "⏎").replace("\n", "⏎").replace("\r", "␍").replace("\t", "⇥")

    return spelled


def _said(found: Features, data: dict[str, Any]) -> Html:
    """Say what the list has, and what it leaves out."""
    alive = int((found.count > 0).sum())
    said = f"{alive} of {data['n']} latents are active at some of {found.positions} positions. "
    if alive > len(data["latents"]):
        which = "that add most to reconstructions (the largest sums of squared activations)"
        said += f"The {len(data['latents'])} {which} are here. "
    if found.tokens is None:
        said += "No tokens were given, so positions are named by the number of their row. "
    return dim(said + "An address that ends in #latent=12 leads to latent 12.")


def _script_json(data: dict[str, Any]) -> str:
    """Return JSON that cannot end the element it is in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})


def _short(value: float) -> float:
    """Round to four digits."""
    return float(f"{value:.4g}")
