"""Attend to a few earlier tokens, with a weight of exactly 0 for all the others.

`euclidean_topk` gives weights that sum to k, and most of them are 0. With a causal mask the first queries have fewer
than k keys, so k is a tensor with one value for each query. In the task, each name occurs in two tokens with a value
each, and the last token asks for both values of one name. It takes a few seconds.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import khot

k, names, values = 2, 32, 10
mask = torch.ones(6, 6, dtype=torch.bool).tril()  # (queries, keys): True = may be looked at
for label, count in (("k=2", k), ("k=mask.sum(-1).clamp(max=2)", mask.sum(-1).clamp(max=k))):
    has_nan = khot.euclidean_topk(torch.zeros(6, 6), count, mask=mask).isnan().any(-1)
    print(f"queries that are NaN for {label}: {int(has_nan.sum())} of 6")


def attention(query: Tensor, key: Tensor, value: Tensor, sparse: bool) -> tuple[Tensor, Tensor]:
    """Attend by k keys for each query, or by a softmax over all. All are (batch, length, dim)."""
    scores = query @ key.mT / query.shape[-1] ** 0.5  # (batch, queries, keys)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()  # (queries, keys)
    count = mask.sum(-1).clamp(max=k)  # (queries): 1 for the first, then 2
    if sparse:
        weights = khot.euclidean_topk(scores, count, mask=mask) / count[:, None]  # rows sum to 1
    else:
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return weights @ value, weights


def sequences(rows: int, used: int) -> tuple[Tensor, Tensor]:
    """Return tokens, (rows, 2·used + 1, names + values), and ones at those that hold the answer, (rows, 2·used)."""
    name = torch.rand(rows, names).argsort(-1)[:, :used].repeat(1, 2)  # each name twice
    asked, name = name[:, :1], name.gather(1, torch.rand(rows, 2 * used).argsort(-1))  # in any order
    tokens = torch.cat([one_hot(name, names), one_hot(torch.randint(values, name.shape), values)], -1).float()
    question = torch.cat([one_hot(asked, names), torch.zeros(rows, 1, values)], -1)
    return torch.cat([tokens, question], 1), (name == asked).float()


print("trained with 8 tokens before the question; how many have a weight, and how much of it is on the right two:")
for sparse in (False, True):
    torch.manual_seed(0)
    maps = nn.ModuleList([nn.Linear(42, 42, bias=False) for _ in range(3)])  # to queries, keys and values
    head = nn.Linear(42, values)
    optimizer = torch.optim.Adam([*maps.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(500):
        x, right = sequences(64, 4)
        mixed, _ = attention(*(linear(x) for linear in maps), sparse)
        optimizer.zero_grad()
        answer = (right[..., None] * x[:, :-1, names:]).sum(1) / 2  # (64, values), sums to 1
        cross_entropy(head(mixed[:, -1]), answer).backward()
        optimizer.step()
    for used in (4, 32):
        x, right = sequences(500, used)
        last = attention(*(linear(x) for linear in maps), sparse)[1][:, -1, :-1]  # (500, earlier tokens)
        seen, share = (last > 0).sum(-1).float().mean(), (last * right).sum() / last.sum()
        label = "k keys " if sparse else "softmax"
        print(f"{label}  {2 * used:2d} tokens: {seen:4.1f} have a weight, {share:.0%} of it right")
