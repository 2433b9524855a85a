"""Choose k of all parameters on two processes of Accelerate, of which each holds a part of the scores.

`pip install accelerate` first. Accelerate starts torch.distributed; khot takes the group. Each process has a part of
one row of scores, of another length, and learns which k of the whole row to keep: the mask is that of one process.
Run it as `torchrun --nproc-per-node 2 examples/accelerate_ranks.py`; with python alone it is one process.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator

import khot

n, k = 1000, 50
accelerator = Accelerator(cpu=True)
ranks, rank = accelerator.num_processes, accelerator.process_index
group = dist.group.WORLD if dist.is_initialized() else None


def trained(scores: torch.Tensor, worth: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return scores that were trained until the k entries that are worth most are on top."""
    scores = scores.clone().requires_grad_()
    optimizer = torch.optim.Adam([scores], lr=0.1)
    optimizer = optimizer if group is None else accelerator.prepare(optimizer)
    for _ in range(100):
        optimizer.zero_grad()
        loss = -(khot.sigmoid_topk(scores, k, temperature=0.2, group=group) * worth).sum()
        accelerator.backward(loss)  # each process has the gradient of its own part; nothing is gathered
        optimizer.step()
    return scores.detach()


draw = torch.Generator().manual_seed(0)
scores, worth = 0.1 * torch.randn(2, n, generator=draw)
part = slice(n * rank**2 // ranks**2, n * (rank + 1) ** 2 // ranks**2)  # of different lengths
found = trained(scores[part], worth[part], group)
mask = khot.hard_topk(found, k, group=group)
whole = khot.hard_topk(trained(scores, worth, None), k)[part]
same = int(accelerator.reduce((mask == whole).sum()))
kept = int(accelerator.reduce(mask.sum()))
best = float(accelerator.reduce((mask * worth[part]).sum()))
accelerator.print(f"kept {kept} of {n}, {same} of {n} as on one process")
accelerator.print(f"worth {best:.2f}; the best {k} are worth {float(worth.topk(k).values.sum()):.2f}")
if dist.is_initialized():
    dist.destroy_process_group()
