"""What holds for every design."""

import pytest
import torch
from design_cases import A6K3, ALL, EVERY, GIVEN, generator, scores

import khot
from khot.designs import Brewer, ConditionalPoisson, Design, Pareto, Pivotal, PlackettLuce, Sampford, Systematic


@EVERY
def test_sizes_are_exact_in_every_row(design):
    k = torch.arange(12)
    x = design(khot.sigmoid_topk(4 * scores(12, 11), k), k).sample((50,), generator=generator())
    assert (x.sum(-1) == k).all()
    assert ((x == 0) | (x == 1)).all()


@EVERY
def test_threads_do_not_change_a_bit(design):
    threads = torch.get_num_threads()
    try:
        samples = []
        for count in (1, 2):
            torch.set_num_threads(count)
            samples.append(design(logits=scores(40, 500), k=30).sample((4,), generator=generator()))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*samples)


@EVERY
def test_shapes_dtypes_and_layouts(design):
    x = scores(2, 3, 5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        d = design(logits=x.to(dtype), k=2)
        assert (d.batch_shape, d.event_shape) == ((2, 3), (5,))
        sample = d.sample((7, 1), generator=generator())
        assert sample.shape == (7, 1, 2, 3, 5)
        assert sample.dtype == dtype
        assert (sample.float().sum(-1) == 2).all()
        assert d.sample_indices((7,), generator=generator()).shape == (7, 2, 3, 2)
        assert d.mean.dtype == dtype
    strided = design(logits=x.transpose(0, 2)[:, :, :2].transpose(-1, -2).contiguous().transpose(-1, -2), k=1)
    assert strided.sample().shape == (5, 3, 2)
    expanded = design(logits=x[0, 0].expand(4, 5), k=2)
    assert (expanded.sample(generator=generator()).sum(-1) == 2).all()
    empty = design(logits=torch.zeros(0, 5), k=2)
    assert empty.sample((3,)).shape == (3, 0, 5)
    alone = design(logits=torch.zeros(1), k=1)
    assert alone.sample().tolist() == [1.0]


@EVERY
def test_rows_have_sizes_of_their_own(design):
    k = torch.tensor([0, 1, 3, 5])
    d = design(logits=scores(4, 5), k=k)
    torch.testing.assert_close(d.mean.sum(-1), k.double())
    assert (d.sample((20,), generator=generator()).sum(-1) == k).all()
    indices = d.sample_indices(generator=generator())
    assert indices.shape == (4, 5)
    assert ((indices >= 0).sum(-1) == k).all()
    with pytest.raises(NotImplementedError, match="same k"):
        d.enumerate_support()


@EVERY
def test_masked_and_certain_items(design):
    x = torch.tensor([torch.inf, 0.3, -torch.inf, 1.0, -0.5], dtype=torch.float64)
    sample = design(logits=x, k=2).sample((300,), generator=generator())
    assert (sample[:, 0] == 1).all()
    assert (sample[:, 2] == 0).all()
    assert (sample.sum(-1) == 2).all()
    full = design(logits=x, k=4)
    assert full.sample().tolist() == [1, 1, 0, 1, 1]
    torch.testing.assert_close(full.mean, torch.tensor([1.0, 1, 0, 1, 1], dtype=torch.float64))


@EVERY
def test_expand(design):
    d = design(logits=scores(5), k=2)
    wide = d.expand((4, 3))
    assert type(wide) is type(d)
    assert wide.batch_shape == (4, 3)
    assert wide.sample((2,), generator=generator()).shape == (2, 4, 3, 5)
    torch.testing.assert_close(wide.mean[1, 2], d.mean)


@EVERY
def test_the_interface_of_torch_distributions(design):
    d = design(logits=scores(5), k=2)
    assert isinstance(d, torch.distributions.Distribution)
    assert isinstance(d, Design)
    assert not d.has_rsample
    assert d.has_enumerate_support
    assert set(d.arg_constraints) == {"probs", "logits"}
    assert d.enumerate_support().shape == (10, 5)
    assert d.expand((3,)).enumerate_support(expand=False).shape == (10, 1, 5)
    assert bool(d.support.check(d.enumerate_support()).all())
    torch.testing.assert_close(d.stddev, d.mean.mul(1 - d.mean).sqrt())
    assert "k=2" in repr(d)
    with pytest.raises(NotImplementedError):
        d.rsample()


@EVERY
def test_bad_values_raise(design):
    with pytest.raises(ValueError, match="one of `probs` and `logits`; got neither"):
        design()
    with pytest.raises(ValueError, match="got both"):
        design(A6K3, logits=A6K3)
    with pytest.raises(ValueError, match="`k` must be given with `logits`"):
        design(logits=A6K3)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]; got values from -0.1 to 1"):
        design(torch.tensor([-0.1, 0.1, 1.0]))
    with pytest.raises(ValueError, match="must lie in"):
        design(torch.tensor([torch.nan, 1.0]))
    with pytest.raises(ValueError, match=r"must sum to k.*got the sum 1.5 where k = 2"):
        design(torch.tensor([0.5, 0.5, 0.5]))
    with pytest.raises(ValueError, match="at least k items; got a row with 1"):
        design(logits=torch.tensor([0.0, -torch.inf, -torch.inf]), k=2)
    with pytest.raises(ValueError, match=r"\+inf for at most k"):
        design(logits=torch.tensor([torch.inf, torch.inf, 0.0]), k=1)
    with pytest.raises(ValueError, match="NaN"):
        design(logits=torch.tensor([0.0, torch.nan, 0.0]), k=1)
    with pytest.raises(ValueError, match=r"0 ≤ k ≤ 3"):
        design(logits=torch.zeros(3), k=4)
    with pytest.raises(ValueError, match=r"0 ≤ k ≤ 3"):
        design(logits=torch.zeros(2, 3), k=torch.tensor([1, 4]))
    with pytest.raises(ValueError, match="broadcast"):
        design(logits=torch.zeros(2, 3), k=torch.tensor([1, 1, 1]))
    with pytest.raises(TypeError, match="float16, bfloat16"):
        design(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="at least one item"):
        design(logits=torch.zeros(3, 0), k=0)
    d = design(logits=torch.zeros(3), k=1)
    if not (isinstance(d, Pivotal) and d.order == "random"):
        with pytest.raises(ValueError, match="support"):
            d.log_prob(torch.tensor([1.0, 1.0, 0.0]))


@EVERY
def test_fractional_sizes(design):
    if design in (Pivotal, GIVEN, Systematic):
        d = design(A6K3[:5], k=2.09)
        x = d.sample((100_000,), generator=generator())
        assert set(x.sum(-1).tolist()) == {2.0, 3.0}
        torch.testing.assert_close(x.mean(0), A6K3[:5], atol=0.008, rtol=0)
        assert d.sample_indices((50,)).shape[-1] == 3
        mixed = design(logits=scores(2, 6), k=torch.tensor([2.5, 3.0]))
        assert (mixed.sample((500,))[:, 1].sum(-1) == 3).all()
        with pytest.raises(ValueError, match="give `k=` too"):
            design(A6K3[:5])
    else:
        with pytest.raises(ValueError, match="must be an integer for"):
            design(A6K3[:5], k=2.09)


def test_modes():
    x = scores(7)
    for design in (ConditionalPoisson, PlackettLuce):
        d = design(logits=x, k=3)
        assert torch.equal(d.mode, khot.hard_topk(x, 3))
        assert d.log_prob(d.mode) == d.log_prob(d.enumerate_support()).max()
    for design in (Pivotal, Sampford, Brewer, Pareto):
        with pytest.raises(NotImplementedError, match="The mode of"):
            _ = design(logits=x, k=3).mode


def test_too_many_subsets():
    with pytest.raises(NotImplementedError, match="At most 100000 subsets"):
        Sampford(logits=torch.zeros(40), k=20).entropy()
    with pytest.raises(NotImplementedError, match="up to k = 12"):
        Brewer(logits=torch.zeros(40), k=20).log_prob(Brewer(logits=torch.zeros(40), k=20).sample())


def test_probabilities_that_do_not_quite_sum_to_k():
    """float32 sums are off by 1e-6; the samples are not."""
    p = khot.sigmoid_topk(torch.randn(20, 3000, generator=generator()), 500)
    for design in (Pivotal, GIVEN, Systematic, ConditionalPoisson, Sampford, Pareto):
        assert (design(p, 500).sample((2,), generator=generator()).sum(-1) == 500).all()
    nearly_hard = torch.tensor([1 - 6e-8, 1e-7, 1.0, 3e-6, 0.0, 1.0])
    for design in ALL.values():
        x = design(nearly_hard, 3).sample((1000,), generator=generator())
        assert (x.sum(-1) == 3).all()
        assert (x[:, 4] == 0).all()


def test_bfloat16_probabilities_with_an_explicit_size():
    p = khot.sigmoid_topk(scores(64), 8).to(torch.bfloat16)
    for design in (Pivotal, Systematic, ConditionalPoisson):
        assert (design(p, 8).sample((100,)).float().sum(-1) == 8).all()


@pytest.mark.parametrize("design", [Pivotal, GIVEN, Systematic])
def test_antithetic_pairs_have_the_law_and_vary_less(design):
    d = design(A6K3)
    x = d.sample((200_000,), generator=generator(), antithetic=True)
    assert (x.sum(-1) == 3).all()
    first, second = x[::2], x[1::2]
    for half in (first, second):
        z = (half.mean(0) - A6K3) / (A6K3 * (1 - A6K3) / 100_000).sqrt()
        assert z.abs().max() < 4.5
    weights = scores(6)
    correlation = torch.corrcoef(torch.stack((first @ weights, second @ weights)))[0, 1]
    assert correlation < -0.1
    with pytest.raises(ValueError, match="must be even; got 3"):
        d.sample((3,), antithetic=True)


def test_designs_without_antithetic_samples_say_so():
    with pytest.raises(NotImplementedError, match="`Pivotal` and `Systematic` have"):
        Sampford(A6K3).sample((2,), antithetic=True)


def test_common_random_numbers():
    """The same seed and nearly the same π: nearly the same samples."""
    p = khot.sigmoid_topk(scores(200), 20)
    near = khot.sigmoid_topk(scores(200) + 1e-3 * scores(200, seed=1), 20)
    for design in (Pivotal, Systematic):
        same = design(p).sample((500,), generator=generator())
        moved, other = (
            design(near).sample((500,), generator=generator()),
            design(near).sample((500,), generator=generator(1)),
        )
        assert (same != moved).double().mean() < 0.1 * (same != other).double().mean()
