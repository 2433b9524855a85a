"""Train a tagger through beam search, so that its beams keep open what later observations decide.

All tags of a sequence are the same; each observation shows the tag with probability 0.5, or else any. Taught one tag at
a time, after the right one, the tagger learns to copy the last tag, and no beam can repair a wrong first guess. Soft
beams are differentiable: a loss of what the search finds teaches scores that can be compared between beams.
It takes a few seconds.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

import khot

tags, length, k = 5, 6, 3
draw = torch.Generator().manual_seed(0)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Return one-hot observations (rows, length, tags) and the tag of each sequence (rows)."""
    tag = torch.randint(tags, (rows,), generator=draw)
    x = torch.randint(tags, (rows, length), generator=draw)
    is_shown = torch.rand(rows, length, generator=draw) < 0.5
    return one_hot(torch.where(is_shown, tag[:, None], x), tags).float(), tag


def step(weights: tuple[Tensor, Tensor], normal: bool, last: Tensor, ahead: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores (rows, tags) of the next tag, and the state: the observations to come (rows, t, tags)."""
    before, seen = weights  # (tags + 1, tags), the last row for the start; (tags, tags)
    scores = khot.search.embed(last, before[:tags] if last.is_floating_point() else before) + ahead[:, 0] @ seen
    return scores.log_softmax(-1) if normal else scores, ahead[:, 1:]


def search(weights: tuple[Tensor, Tensor], normal: bool, x: Tensor, k: int, select: object) -> khot.search.Beams:
    """Search for the tags of observations."""
    start = torch.full((len(x),), tags)
    return khot.search.beam_search(partial(step, weights, normal), x, k, start=start, length=length, select=select)


weights = torch.zeros(tags + 1, tags, requires_grad=True), torch.zeros(tags, tags, requires_grad=True)
for how, steps, lr in (("one tag at a time", 60, 0.1), ("through soft beams", 200, 0.05)):
    normal, optimizer = how == "one tag at a time", torch.optim.Adam(weights, lr=lr)
    for i in range(steps):
        x, tag = batch(128)
        if normal:  # after the start, and after the right tag
            lasts = [torch.full_like(tag, tags)] + [tag] * (length - 1)
            loss = sum(cross_entropy(step(weights, True, last, x[:, t:])[0], tag) for t, last in enumerate(lasts))
        else:
            soft = partial(khot.search.soft, temperature=0.3 ** (i / steps))  # from 1 to 0.3
            found = search(weights, False, x, k, soft).soft_tokens[:, 0]  # (128, length, tags): the best beam
            loss = -(found.gather(-1, tag[:, None, None].expand(-1, length, 1)) + 1e-3).log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, tag = batch(4000)
    for beams in (1, k, 5):
        right = (search(weights, normal, x, beams, khot.search.hard).tokens[:, 0] == tag[:, None]).float().mean()
        print(f"trained {how:18s}, hard beams at test: {beams}, right tags: {right:.0%}")
