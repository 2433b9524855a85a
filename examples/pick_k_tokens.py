"""Keep k of n tokens, and let a network learn which ones.

Each sequence has 32 tokens. Four of them carry the class, all others are noise. A scorer picks four tokens, and the
classifier sees nothing else. `straight_through` gives a hard choice with the gradient of the soft one.
It takes a few seconds.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import khot

n, dim, classes, k = 32, 16, 5, 4
torch.manual_seed(0)
marker, signal = torch.randn(dim), torch.randn(classes, dim)


def sequences(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens (rows, n, dim), classes (rows) and a k-hot mask of the tokens that matter (rows, n)."""
    matters = khot.hard_topk(torch.rand(rows, n), k)
    label = torch.randint(classes, (rows,))
    tokens = torch.randn(rows, n, dim) + matters[..., None] * (marker + 0.7 * signal[label])[:, None]
    return tokens, label, matters


def pick(x: Tensor, scores: Tensor, how: str) -> Tensor:
    """Keep k tokens: x (rows, n, dim), scores (rows, n) → (rows, k, dim)."""
    hard = khot.hard_topk(scores, k)  # (rows, n): k ones
    index = hard.topk(k).indices  # (rows, k): where they are
    if how == "straight_through":
        gate = khot.straight_through(hard, khot.sigmoid_topk(scores, k))  # (rows, n): hard values, soft gradient
    elif how == "score as a gate":
        gate = scores.sigmoid()  # (rows, n): a common trick; tokens that were not picked get no gradient
    else:
        gate = hard
    kept = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))  # (rows, k, dim)
    return kept * gate.gather(1, index)[..., None]  # (rows, k, 1) multiplies each kept token


print(f"kept {k} of {n} tokens    accuracy (share of the right tokens kept), mean of 5 seeds")
for how in ("random", "score as a gate", "straight_through"):
    results = []  # after 50 and after 300 steps
    for seed in range(5):
        torch.manual_seed(seed)
        scorer, classifier = nn.Linear(dim, 1), nn.Linear(dim, classes)
        optimizer = torch.optim.Adam([*scorer.parameters(), *classifier.parameters()], lr=0.01)
        for step in range(301):
            x, label, matters = sequences(128)
            scores = torch.rand(128, n) if how == "random" else scorer(x).squeeze(-1)  # (128, n)
            logits = classifier(pick(x, scores, how).mean(1))  # (128, classes)
            optimizer.zero_grad()
            cross_entropy(logits, label).backward()
            optimizer.step()
            if step in (50, 300):  # measured on sequences that it was not trained on yet
                kept = (khot.hard_topk(scores, k) * matters).sum(-1).mean() / k
                results.append([(logits.argmax(-1) == label).float().mean(), kept])
    early, late = torch.tensor(results).view(5, 2, 2).mean(0).tolist()
    print(f"{how:17s} 50 steps: {early[0]:4.0%} ({early[1]:3.0%})  300 steps: {late[0]:4.0%} ({late[1]:3.0%})")
