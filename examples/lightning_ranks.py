"""Route tokens on two processes of Lightning, so that experts are balanced over the tokens of both.

`pip install lightning` first. Lightning starts the processes and torch.distributed; khot takes the group. The training
is that of one process with the whole batch; without the group, each process balances its own tokens, which is another.
Run it as `python examples/lightning_ranks.py`. It takes some seconds.
"""

import logging
import warnings

import lightning
import torch
import torch.distributed as dist

from khot.nn import routing

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
TOKENS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
WANTED = TOKENS[:, :3].prod(1, keepdim=True)


class Experts(lightning.LightningModule):
    """Four linear experts, of which each token is sent to two."""

    def __init__(self, with_group: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.with_group = with_group
        self.router, self.experts = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

    def training_step(self, batch: list[torch.Tensor], index: int = 0) -> torch.Tensor:
        """Return the mean square error of one process's tokens."""
        x, y = batch
        group = dist.group.WORLD if self.with_group else None
        routed = routing.balanced_sigma_topk(self.router(x), 2, group=group)
        return ((routed.probs * self.experts(x)).sum(-1, keepdim=True) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


if __name__ == "__main__":
    alone = Experts(with_group=False)
    optimizer = alone.configure_optimizers()
    for _ in range(20):
        optimizer.zero_grad()
        alone.training_step([TOKENS, WANTED]).backward()
        optimizer.step()
    for with_group in (True, False):
        data = torch.utils.data.TensorDataset(TOKENS, WANTED)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet["enable_model_summary"] = False
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=20, **quiet)
        model = Experts(with_group)
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=32))  # half of the tokens for each process
        off = max((a - b).abs().max() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
        if trainer.is_global_zero:
            print(f"{'with' if with_group else 'without'} the group: {float(off):.0e} from one process")
