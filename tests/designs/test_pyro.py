"""Pyro's samplers and guides on the capped simplex; skipped without pyro-ppl."""

import pytest
import torch
from design_cases import generator

from khot.designs import RelaxedKHot

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Pyro's own, and a value that comes close to 1 on the way
]


def test_nuts_and_a_normal_guide_find_the_shares():
    pyro = pytest.importorskip("pyro")
    from pyro.distributions.torch_distribution import TorchDistributionMixin
    from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal

    class Shares(RelaxedKHot, TorchDistributionMixin):
        pass

    a = torch.randn(30, 4, dtype=torch.float64, generator=generator())
    truth = torch.tensor([0.9, 0.7, 0.3, 0.1], dtype=torch.float64)
    y = a @ truth + 0.1 * torch.randn(30, dtype=torch.float64, generator=generator(1))

    def model():
        s = pyro.sample("s", Shares(1.0, logits=torch.zeros(4, dtype=torch.float64), k=2))
        pyro.sample("y", pyro.distributions.Normal(a @ s, 0.1).to_event(1), obs=y)

    pyro.set_rng_seed(0)
    chain = MCMC(NUTS(model), num_samples=100, warmup_steps=60, disable_progbar=True)
    chain.run()
    s = chain.get_samples()["s"]
    assert ((s.sum(-1) - 2).abs() < 1e-9).all()
    assert (s.mean(0) - truth).abs().max() < 0.06
    pyro.clear_param_store()
    guide = AutoNormal(model)
    inference = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), Trace_ELBO())
    for _ in range(300):
        inference.step()
    assert (guide.median()["s"].detach() - truth).abs().max() < 0.06
