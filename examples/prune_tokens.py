"""Let a vision transformer drop the patches that it does not need: by a schedule, and with counts that it learns.

A small ViT of transformers reads 8 × 8 digits as 16 patches. First, the tokens with little attention are dropped after
its first layer, without any training. Then the model is trained further with a budget, under which it learns how many
tokens each layer keeps. It needs '.[hf,sklearn]', and takes about half a minute.
"""

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import khot.hf

torch.manual_seed(0)
pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
pixels = pixels.float().view(-1, 1, 8, 8) / 16
order = torch.randperm(len(pixels))
train, test = order[:1300], order[1300:]
sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))


def learn(steps: int, *more: torch.nn.Parameter) -> None:
    """Train the model, and perhaps the numbers of a budget."""
    optimizer = torch.optim.Adam([{"params": model.parameters(), "lr": 3e-3}, {"params": more, "lr": 0.05}])
    model.train()
    for _ in range(steps):
        rows = train[torch.randint(len(train), (64,))]
        optimizer.zero_grad()
        model(pixels[rows], labels=labels[rows]).loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy() -> float:
    """Return the accuracy on the digits that are left."""
    logits = model.eval()(pixels[test]).logits
    return float((logits.argmax(-1) == labels[test]).float().mean())


learn(400)
print(f"all 17 tokens in every layer:                 accuracy {accuracy():.2f}")
pruning = khot.hf.prune_tokens(model, {0: 3})  # or by a `score` of your own
print(f"the most attended 3 after layer 0, untrained: accuracy {accuracy():.2f}")
pruning.remove()

pruning = khot.hf.prune_tokens(model, budget=0.35)  # of the tokens, the mean over the layers after the first
learn(400, *pruning.budget.parameters())
print(f"35 % of the tokens, trained with a budget:    accuracy {accuracy():.2f}")
print("tokens that the layers see:", pruning.kept[:, 0].sum(-1).tolist())
