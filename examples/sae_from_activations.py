"""Train a sparse autoencoder on the activations of a model, and read what a latent stands for.

A forward hook records the activations of a small model of characters, which is trained here. They go to an .npz file,
and `khot.sae.train` does what the command `khot sae` does. Run it from the root of the clone; it needs '.[sae]'.
"""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from khot.nn import SparseAutoencoder, SparseAutoencoderConfig
from khot.sae import Training, open_activations, train

text = Path("examples/shakespeare.txt").read_text(encoding="utf-8")
letters = sorted(set(text))
ids = torch.tensor([letters.index(letter) for letter in text])
torch.manual_seed(0)
width = 8  # the model sees eight characters and predicts the next one
model = nn.Sequential(nn.Embedding(len(letters), 16), nn.Flatten(), nn.Linear(16 * width, 128), nn.ReLU())
head = nn.Linear(128, len(letters))
windows, following = ids.unfold(0, width, 1)[:-1], ids[width:]
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=3e-3)
for _ in range(1500):
    rows = torch.randint(len(windows), (256,))
    loss = nn.functional.cross_entropy(head(model(windows[rows])), following[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"the model's loss: {loss:.1f} (a guess: {torch.tensor(len(letters)).log():.1f})")

recorded: list[Tensor] = []
hook = model[-1].register_forward_hook(lambda module, inputs, output: recorded.append(output.detach()))
with torch.no_grad():
    for part in windows[:60_000].split(4096):
        model(part)  # the hook keeps what leaves the ReLU, (4096, 128)
hook.remove()
neurons = torch.cat(recorded)  # (60000, 128)

with tempfile.TemporaryDirectory() as folder:
    file, results = Path(folder) / "acts.npz", Path(folder) / "sae"
    np.savez(file, neurons.numpy())
    config = SparseAutoencoderConfig(d_in=128, latents=512, k=8)
    run = train(open_activations(file), config, Training(steps=500), results)
    sae = SparseAutoencoder.load(results)
variances = torch.linalg.svdvals(neurons - neurons.mean(0)).square()
left, left_by_pca = run.metrics["held_out"]["fvu"], variances[8:].sum() / variances.sum()
print(f"variance left: {left:.0%} with 8 of 512 latents (held out), {left_by_pca:.0%} with 8 principal components")

latents = sae.encode(neurons).dense()  # (60000, 512), eight of each row are active
for name, features in (("neurons", neurons), ("latents", latents)):
    top = features[:, (features > 0).sum(0) >= 10].topk(10, dim=0).indices.T.tolist()  # ten best tokens of each
    ends = [Counter(text[i + width - 2 : i + width] for i in tokens) for tokens in top]
    same = sum(count.most_common(1)[0][1] for count in ends) / len(ends)
    print(f"{name}: of the ten tokens where one is most active, {same:.1f} end in the same two characters")
for latent in (latents > 0).sum(0).argsort(descending=True)[20:100:20].tolist():
    print(f"latent {latent}:", [text[i : i + width] for i in latents[:, latent].topk(6).indices.tolist()])
