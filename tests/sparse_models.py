"""Models for the tests of sparse networks, and a counter of their weights that shares no code with the library."""

import torch
from torch import nn
from torch.nn import functional as F

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)


def mlp():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


class Mixed(nn.Module):
    """An embedding tied with the output, grouped and depthwise convolutions, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.wide = nn.Conv1d(8, 12, 3, padding=1)
        self.grouped = nn.Conv1d(12, 12, 3, padding=1, groups=3)
        self.depthwise = nn.Conv1d(12, 12, 3, padding=1, groups=12)
        self.shared = nn.Linear(12, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens).mT
        x = torch.relu(self.depthwise(torch.relu(self.grouped(self.wide(x))))).mT
        return self.head(self.down(torch.tanh(self.shared(torch.relu(self.shared(x))))))


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.last = nn.BatchNorm2d(outputs)
        self.short = nn.Identity()
        if inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return torch.relu(self.last(self.second(torch.relu(self.norm(self.first(x))))) + self.short(x))


class ResNet(nn.Module):
    """Residual blocks, a depthwise convolution, and a head on flattened maps."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.one, self.two = Block(8, 8, 1), Block(8, 16, 2)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.pool, self.head = nn.AdaptiveAvgPool2d(2), nn.Linear(64, 10)

    def forward(self, x):
        x = self.depthwise(self.two(self.one(torch.relu(self.norm(self.stem(x))))))
        return self.head(torch.flatten(self.pool(x), 1))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        split = [f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value)]
        return self.output(F.scaled_dot_product_attention(*split).transpose(1, 2).reshape(batch, length, -1))


class Transformer(nn.Module):
    """One block: attention and a feed-forward network."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.between, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x))))


MODELS = {
    "mlp": (mlp, lambda: torch.randn(6, 12)),
    "mixed": (Mixed, lambda: torch.randint(11, (6, 5))),
    "resnet": (ResNet, lambda: torch.randn(6, 1, 8, 8)),
    "transformer": (Transformer, lambda: torch.randn(6, 5, 16)),
}


def nonzero(model):
    """The weights of layers that are not 0; a tensor that layers share counts once."""
    return sum(int((w != 0).sum()) for w in {id(w): w for w in weights(model)}.values())


def size(model):
    """The weights of layers; a tensor that layers share counts once."""
    return sum(w.numel() for w in {id(w): w for w in weights(model)}.values())


def weights(model):
    packed = [m.in_proj_weight for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    return packed + [m.weight for m in model.modules() if isinstance(m, LAYERS)]


def flops(model, x):
    """Two for each product of a weight and an input that a run of the model takes, by example."""
    total = 0

    def count(module, inputs, output):
        nonlocal total
        if isinstance(module, nn.Embedding):
            return
        per_output = 2 * module.weight[0].numel()
        total += per_output * output[0].numel()

    handles = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, LAYERS)]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return total


def train(model, sparsifier, x, *, steps=12, after=lambda: None):
    """Train towards noise, with a look at the sparsifier after each step."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with torch.no_grad():
        target = torch.randn_like(model(x))
    for _ in range(steps):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparsifier.step()
        after()
