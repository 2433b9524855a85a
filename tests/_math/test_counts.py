import pytest
import torch

from khot._math import counts


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def others(above, k):
    """P(k − 1 of the others are above), by adding one item after another, without each."""
    result = torch.empty_like(above)
    for i in range(len(above)):
        law = torch.zeros(len(above) + 1, above.shape[1], dtype=torch.float64)
        law[0] = 1
        for q in torch.cat((above[:i], above[i + 1 :])):
            law = (1 - q) * law + q * torch.cat((torch.zeros_like(law[:1]), law[:-1]))
        result[i] = law.gather(0, k.long()[None] - 1)[0]
    return result


@pytest.mark.parametrize(("n", "shift", "spread"), [(3, 0, 1), (17, 1, 2), (150, 0, 0.5), (150, 1, 4), (131, -5, 2)])
def test_the_counts_of_others_by_products_and_by_a_spectrum(n, shift, spread):
    above = torch.sigmoid(spread * normal(n, 6) + shift)
    k = above.sum(0).add(torch.tensor([-2, -1, 0, 0, 1, 2])).round().clamp(1, n)
    expected = others(above, k)
    arguments = above, 1 - above, k
    torch.testing.assert_close(counts.chance_of_others(*arguments), expected, rtol=0, atol=2e-15)
    exact = counts.by_products(*arguments[:2], k - 1, n)
    torch.testing.assert_close(exact, expected, rtol=1e-13, atol=0)  # no digit is lost, however rare
    variance = (above * (1 - above)).sum(0)
    if n == 150:  # modulo 90 instead of cut
        wrapped = counts.by_products(*arguments[:2], k - 1, 90 if k.max() > 90 else 60)
        torch.testing.assert_close(wrapped, expected, rtol=0, atol=1e-15)
        assert (counts.by_products(*arguments[:2], k - 1, 9) - expected).abs().max() > 1e-6  # it would wrap
    terms = counts.terms_of(float(variance.min()), n)
    assert (terms < 40) == (variance.min() > 16)
    if terms < 40:
        given = (*arguments, variance, torch.full_like(k, n))
        torch.testing.assert_close(counts.by_spectrum(*given, terms), expected, rtol=0, atol=2e-15)
        assert (counts.by_spectrum(*given, 4) - expected).abs().max() > 1e-6  # too few terms
