"""The shipped check of designs, and wrong designs that it must find."""

import pytest
import torch
from design_cases import A6K3, EVERY_EXACT, GIVEN, scores
from torch import Tensor

from khot._math import noise, pivotal
from khot.designs import ConditionalPoisson, Pareto, Pivotal, PlackettLuce, Sampford, Systematic
from khot.testing import check_design

pytestmark = pytest.mark.slow


@EVERY_EXACT
def test_exact_designs_pass_the_check(design):
    check_design(design, draws=50_000)


@pytest.mark.slow
@pytest.mark.parametrize("design", [Pivotal, GIVEN, Systematic], ids=["pivotal", "given order", "systematic"])
def test_exact_designs_pass_the_check_with_two_million_draws(design):
    check_design(design)


@pytest.mark.parametrize("design", [Pareto, PlackettLuce])
def test_other_designs_pass_it_but_for_their_mean(design):
    check_design(design(A6K3), exact=False, draws=100_000)
    with pytest.raises(AssertionError, match="moments: mean and probs"):
        check_design(design(A6K3), draws=1000)


def test_the_check_takes_fractional_sizes_and_float32():
    check_design(GIVEN(A6K3[:5], k=2.09), draws=100_000)
    check_design(Systematic(A6K3[:5], k=2.09), draws=200_000)
    check_design(Pivotal(A6K3.float()), draws=200_000)
    check_design(ConditionalPoisson(logits=scores(6).float(), k=2), draws=20_000)


class GumbelAsPivotal(Pivotal):
    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        return PlackettLuce(self.probs)._draw(draws, seed)


class Shifted(Pivotal):
    """Says π, draws π ± .002."""

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        shift = torch.zeros_like(self.probs)
        shift[0], shift[1] = 0.002, -0.002
        return Pivotal(self.probs + shift)._draw(draws, seed)


class Swapped(Pivotal):
    """The duel's odds the wrong way round."""

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        uniforms = 1 - noise.uniform(seed, 0, draws * sum(pivotal.sizes(len(self.probs))[1:])).view(draws, -1)
        levels, root = pivotal.plan(self.probs)
        value = (root >= 0.5).expand(draws)[:, None]
        end = uniforms.shape[-1]
        for level in reversed(levels):
            start = end - level.odds.shape[-1]
            goes_on = uniforms[:, start:end] * level.total >= level.odds
            end = start
            pair = torch.where(goes_on, value, level.is_won), torch.where(goes_on, level.is_won, value)
            value = torch.stack(pair, -1).flatten(-2)[:, : level.size]
        return value.to(self.probs.dtype)[:, None]


class Sticky(Pivotal):
    """Every draw twice."""

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        return super()._draw((draws + 1) // 2, seed).view(-1, len(self.probs)).repeat_interleave(2, 0)[:draws]


class OneTooMany(Pivotal):
    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        sample = super()._draw(draws, seed).view(draws, -1).clone()
        sample[0] = 1
        return sample


class WrongLogProb(ConditionalPoisson):
    """The law of other parameters: what is drawn with one and scored with the other."""

    def _log_prob(self, value: Tensor) -> Tensor:
        return Sampford(self.probs)._log_prob(value)


class WrongGradient(ConditionalPoisson):
    """The right value, with twice its gradient."""

    def _log_prob(self, value: Tensor) -> Tensor:
        log = super()._log_prob(value)
        return log + (log - log.detach())


class SharedByRows(Pivotal):
    """One draw for all rows: the same order and coins."""

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        rows = self.probs.reshape(-1, self.probs.shape[-1])
        return torch.stack([Pivotal(row)._draw(draws, seed).view(draws, -1) for row in rows], 1)


class Transposed(Pivotal):
    """Draws and rows in the wrong order."""

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        return super()._draw(draws, seed).view(draws, -1, self.probs.shape[-1]).transpose(0, 1).contiguous()


class FirstRowForAll(Pivotal):
    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        rows = self.probs.reshape(-1, self.probs.shape[-1])
        return Pivotal(rows[:1].expand_as(rows))._draw(draws, seed)


class EverySecondAgain(Pivotal):
    """Draw 4j + 2 is draw 4j."""

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        sample = super()._draw(draws, seed).view(draws, -1).clone()
        sample[2::4] = sample[: len(sample) - 2 : 4]
        return sample


class FirstSizeForAll(Pivotal):
    """All rows have the size of the first."""

    @property
    def _drawn(self) -> Tensor:
        sizes = self._sizes.reshape(-1)[:1]
        return super()._drawn * (sizes / self._sizes)[..., None]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (SharedByRows, "rows: the probability of an item in each of two rows"),
        (Transposed, "rows: an inclusion probability of a row"),
        (FirstRowForAll, "rows: an inclusion probability of a row"),
        (EverySecondAgain, "frequencies: the probability of an item in two draws, 2 apart"),
    ],
)
def test_the_check_looked_at_one_row_and_one_lag(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_design(wrong(A6K3), draws=100_000)


def test_the_check_finds_sizes_of_another_row():
    with pytest.raises(AssertionError, match="sizes of rows: an inclusion probability of a row"):
        check_design(FirstSizeForAll, draws=20_000)


@pytest.mark.parametrize(
    ("wrong", "says", "draws"),
    [
        (GumbelAsPivotal, "frequencies: an inclusion probability", 100_000),
        pytest.param(Shifted, "frequencies: an inclusion probability", 2_000_000, marks=pytest.mark.slow),
        (Swapped, "frequencies: an inclusion probability|sizes", 100_000),
        (Sticky, "frequencies: the probability of an item in two successive draws", 100_000),
        (OneTooMany, "sizes: a sample is not k-hot", 1000),
        (WrongLogProb, "subsets: entropy", 1000),
        (WrongGradient, "gradients: ", 1000),
    ],
)
def test_the_check_fails(wrong, says, draws):
    with pytest.raises(AssertionError, match=says):
        check_design(wrong(A6K3), draws=draws)


def test_the_check_finds_wrong_gradients_in_logits_too():
    check_design(ConditionalPoisson(logits=scores(5), k=2), draws=1000)
    with pytest.raises(AssertionError, match="gradients: "):
        check_design(WrongGradient(logits=scores(5), k=2), draws=1000)
