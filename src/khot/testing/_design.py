"""`check_design`: whether a design draws what it says, and says what it draws."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..designs import Design
from ..relaxations import sigmoid_topk
from ._laws import broken_laws, close, must

T = TypeVar("T")
ALPHA = 1e-3  # the chance, over seeds, that a right design fails, over all that is counted in one call
AT_ONCE = 250_000
LAGS = 4
EXACT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
VECTORS = {
    "spread": [0.07, 0.17, 0.41, 0.61, 0.83, 0.91],
    "equal": [0.25] * 8,
    "certain": [1.0, 0.0, 0.3, 0.7, 0.5, 0.5, 0.0],
    "nearly certain": [1e-12, 1 - 1e-12, 0.4, 0.6, 1e-6, 1 - 1e-6, 0.5, 0.5],
    "one": [0.05, 0.1, 0.15, 0.7],
    "all but one": [0.95, 0.9, 0.85, 0.3],
}


def check_design(
    design: Design | Callable[[Tensor], Design], *, exact: bool = True, draws: int = 2_000_000, seed: int = 0
) -> None:
    """Raise AssertionError, naming each broken law, unless samples, moments and probabilities of a design agree.

    What can be enumerated is, and compared to 1e-12; samples are compared with it by Bernstein's bound and a χ² test,
    and must be independent: over rows of a batch, and over draws that are one to four apart. A design that does not
    offer `log_prob` or `joint_probs` (NotImplementedError) is checked for the rest. A right design fails with
    probability below 0.001 over the choice of seeds; inclusion probabilities that are off by 0.002 are found with a
    probability of 0.7 at π = ½ and 0.98 where π(1 − π) < 0.15, at the default number of draws.

    Args:
        design: a design of at most 12 items and no batch; or a class of them, or any function from `probs` (…, n) to
            one, which is checked on six vectors, and with a k for each of two rows.
        exact: whether `mean` is `probs`; False for designs that approximate.
        draws: how many samples.
        seed: of the samples.

    Examples:
        >>> check_design(khot.designs.Systematic, draws=10_000)
        >>> class Shifted(khot.designs.Pivotal):
        ...     probs = property(lambda self: super().probs.flip(-1))
        >>> check_design(Shifted(torch.tensor([0.2, 0.5, 0.5, 0.8])), draws=10_000)
        Traceback (most recent call last):
        AssertionError: not a right design:
        - rows: an inclusion probability of a row is ...
        - frequencies: ...
    """
    if isinstance(design, Design):
        designs = {"": design}
    else:
        vectors = {name: torch.tensor(probs, dtype=torch.float64) for name, probs in VECTORS.items()}
        designs = {f" on {name} probabilities": design(probs) for name, probs in vectors.items()}
    make = None if isinstance(design, Design) else design
    for where, each in designs.items():
        if broken := broken_laws(Laws(each, exact, draws, seed, make)):
            raise AssertionError(f"not a right design{where}:" + broken)
        make = None  # once is enough


@dataclass(frozen=True)
class Laws:
    """Hold a design, what it promises, and the laws of designs."""

    design: Design
    exact: bool
    draws: int
    seed: int
    make: Callable[[Tensor], Design] | None = None

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.design.probs.device).manual_seed(self.seed)

    def _sample(self, *shape: int) -> Tensor:
        return self.design.sample(shape, generator=self._generator())

    def _enumerated(self) -> tuple[Tensor, Tensor]:
        x = self.design.enumerate_support()
        return self.design.log_prob(x).exp(), x

    def sizes(self) -> None:
        """Samples have the right shape and size, and are 0 or 1."""
        dtype = self.design.probs.dtype
        for shape in ((), (7,), (3, 0), (50, 20)):
            x = self._sample(*shape)
            must(x.shape == shape + self.design.event_shape, f"sample({shape}) has the shape {tuple(x.shape)}")
            must(x.dtype == dtype, f"samples are {x.dtype}, the parameters {dtype}")
            must(self.design.support.check(x), "a sample is not k-hot")

    def seeds(self) -> None:
        """The same seed gives the same bits, another one others."""
        first, again = self._sample(200), self._sample(200)
        other = self.design.sample((200,), generator=self._generator().manual_seed(self.seed + 1))
        must(torch.equal(first, again), "the same seed gives other samples")
        must((self.design.variance < 1e-3) | (not torch.equal(first, other)), "the seed does not matter")

    def indices(self) -> None:
        """`sample_indices` names the ones of `sample`."""
        x, chosen = self._sample(50), self.design.sample_indices((50,), generator=self._generator())
        hot = torch.zeros(50, x.shape[-1] + 1, dtype=x.dtype).scatter_(1, chosen % (x.shape[-1] + 1), 1.0)
        must(torch.equal(hot[:, :-1], x), "indices and samples differ")

    def moments(self) -> None:
        """The mean is what was asked for, and sums to k; the variance is π(1 − π)."""
        mean, tolerance = self.design.mean, EXACT[self.design.mean.dtype]
        if self.exact:
            close(mean, self.design.probs, "mean and probs", tolerance)
        close(mean.sum(-1), torch.as_tensor(self.design.k, dtype=mean.dtype), "the sum of the mean", 1e2 * tolerance)
        close(self.design.variance, mean * (1 - mean), "variance", tolerance)

    def subsets(self) -> None:
        """Probabilities of all subsets sum to 1, and have the mean, joint probabilities and entropy that are said."""
        if (listed := _if_offered(self._enumerated)) is None:
            return
        (p, x), tolerance = listed, EXACT[listed[1].dtype]
        close(p.sum(), 1.0, "the sum of all probabilities", tolerance)
        close(x.mT @ p, self.design.mean, "mean", tolerance)
        close(self.design.entropy(), torch.special.entr(p).sum(), "entropy", tolerance)
        close(self.design.joint_probs(), x.mT @ (p[:, None] * x), "joint probabilities", tolerance)

    def pairs(self) -> None:
        """Joint probabilities, covariances and variances of sums fit together; at a fixed size, Cov 1 = 0."""
        joint = _if_offered(self.design.joint_probs)
        covariance = _if_offered(lambda: self.design.covariance_matrix)
        if joint is None or covariance is None:
            return
        mean, tolerance = self.design.mean, EXACT[joint.dtype]
        close(joint.diagonal(), mean, "the diagonal of the joint probabilities", tolerance)
        close(covariance, joint - mean[:, None] * mean, "covariance", tolerance)
        weights = torch.linspace(-1, 2, len(mean), dtype=mean.dtype)
        close(self.design.variance_of_sum(weights), weights @ covariance @ weights, "variance of a sum", 10 * tolerance)
        if float(self.design.k).is_integer():
            close(covariance.sum(-1), 0.0, "the sums of the covariance's rows", 10 * tolerance)

    def batches(self) -> None:
        """`expand` gives rows of the same law."""
        wide = self.design.expand((2, 3))
        must(wide.batch_shape == (2, 3), f"expand((2, 3)) has the batch shape {tuple(wide.batch_shape)}")
        shape = wide.sample((4,), generator=self._generator()).shape
        must(shape == (4, 2, 3, *self.design.event_shape), "samples of it")
        close(wide.mean, self.design.mean.expand(2, 3, -1), "its mean")

    def rows(self) -> None:
        """Two rows that differ have their own law each, and are independent."""
        one = self.design.parameter.detach()
        wide = self.design.expand((2,)).with_parameter(torch.stack((one, one.flip(-1))))
        self._compare_rows(wide, self.design, self.design.with_parameter(one.flip(-1)))

    def sizes_of_rows(self) -> None:
        """A batch with a k for each row has the law of each."""
        if self.make is not None:
            pair = [torch.tensor(VECTORS[name], dtype=torch.float64) for name in ("equal", "nearly certain")]
            self._compare_rows(self.make(torch.stack(pair)), *(self.make(probs) for probs in pair))

    def _compare_rows(self, wide: Design, *each: Design) -> None:
        """Compare samples of two rows, (draws, 2, n), with the means of two designs, and with their products."""
        mean = torch.stack([design.mean for design in each])
        close(wide.mean, mean, "the mean of a row", EXACT[mean.dtype])
        mean, generator, draws = mean.to(torch.float64), self._generator(), min(self.draws, AT_ONCE)
        x = wide.sample((draws,), generator=generator).to(torch.float64)
        cells = 4 * (mean.numel() + mean.shape[-1] ** 2)  # a quarter of the errors
        _compare(x.sum(0).flatten(), draws, mean.flatten(), cells, "an inclusion probability of a row")
        both, product = x[:, 0].mT @ x[:, 1], mean[0][:, None] * mean[1]
        _compare(both.flatten(), draws, product.flatten(), cells, "the probability of an item in each of two rows")

    def gradients(self) -> None:
        """log_prob has the derivatives in `logits` that differences say."""
        design, x = self.design, self._sample(5)
        logits = design.logits.detach().to(torch.float64)
        is_certain = not bool(logits.isfinite().all()) or float(design.variance.min()) < 1e-3
        if is_certain or _if_offered(lambda: design.log_prob(x)) is None:
            return
        is_probs = design.parameter is design.probs  # their sum must stay k, so it is their scores that are moved

        def log_prob(theta: Tensor) -> Tensor:
            return design.with_parameter(sigmoid_topk(theta, design.k) if is_probs else theta).log_prob(x)

        torch.autograd.gradcheck(log_prob, (logits.requires_grad_(),))

    def frequencies(self) -> None:
        """Samples have the probabilities of items, pairs and subsets that are said, and are independent."""
        subsets, couples, trials_of = self._counted()
        n, mean = couples.shape[-1], self.design.mean.to(torch.float64)
        items = (torch.arange(2**n)[:, None] >> torch.arange(n) & 1).double()  # of each subset
        pairs = items.mT @ (subsets[:, None] * items)
        cells = 2 * (n + LAGS * n + n * (n - 1) // 2 + 1)  # a half of the errors is for rows
        _compare(pairs.diagonal(), self.draws, mean, cells, "an inclusion probability")
        if (joint := _if_offered(self.design.joint_probs)) is not None:
            upper = torch.triu_indices(n, n, 1).unbind()
            _compare(pairs[upper], self.draws, joint.to(torch.float64)[upper], cells, "a joint probability")
        for lag, (count, trials) in enumerate(zip(couples, trials_of, strict=True), 1):
            what = "two successive draws" if lag == 1 else f"two draws, {lag} apart"
            _compare(count, trials, mean.square(), cells, f"the probability of an item in {what}")
        if (listed := _if_offered(self._enumerated)) is None:
            return
        p, x = listed
        code = (x @ 2.0 ** torch.arange(n, dtype=x.dtype)).long()
        expected = torch.zeros(2**n, dtype=torch.float64).index_add_(0, code, p.to(torch.float64)) * self.draws
        stray = int(subsets[expected <= 1e-9].sum())
        must(stray == 0, f"{stray} samples of subsets that have probability 0")
        is_rare = expected < 5  # such subsets count together
        observed, wanted = (torch.cat((t[~is_rare], t[is_rare].sum()[None])) for t in (subsets, expected))
        is_counted = wanted >= 5
        statistic = float(((observed - wanted).square() / wanted)[is_counted].sum())
        if (freedom := int(is_counted.sum()) - 1) > 0:
            chance = torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2))
            must(chance > ALPHA / cells, f"χ² of subsets is {statistic:.4g} at {freedom} degrees of freedom")

    def _counted(self) -> tuple[Tensor, Tensor, list[int]]:
        """Count draws of subsets (2ⁿ, in binary), of items in both draws of a couple (lags, n), and couples (lags)."""
        generator, n = self._generator(), self.design.event_shape[0]
        subsets, both = torch.zeros(2**n, dtype=torch.float64), torch.zeros(LAGS, n, dtype=torch.float64)
        couples = [0] * LAGS
        for start in range(0, self.draws, AT_ONCE):
            x = self.design.sample((min(AT_ONCE, self.draws - start),), generator=generator).to(torch.float64)
            subsets += torch.bincount((x @ 2.0 ** torch.arange(n, dtype=x.dtype)).long(), minlength=2**n)
            for lag in range(1, LAGS + 1):  # couples that have no draw in common
                first, second = x[: len(x) // (2 * lag) * 2 * lag].unflatten(0, (-1, 2, lag)).unbind(1)
                both[lag - 1] += (first * second).sum((0, 1))
                couples[lag - 1] += first.shape[:2].numel()
        return subsets, both, couples


def _if_offered(call: Callable[[], T]) -> T | None:
    """Return what a design says, or None if it does not offer that."""
    try:
        return call()
    except NotImplementedError:
        return None


def _compare(count: Tensor, trials: int, p: Tensor, cells: int, what: str) -> None:
    """Raise if a count is further from its mean than Bernstein's bound allows, over so many cells."""
    rarity = math.log(2 * cells / ALPHA)
    allowed = rarity / 3 + (rarity**2 / 9 + 2 * rarity * trials * p * (1 - p)).sqrt()
    excess = (count - trials * p).abs() / allowed
    worst = int(excess.argmax())
    got = f"{what} is {float(count[worst]) / trials:.6f} in {trials} draws, said to be {float(p[worst]):.6f}"
    must(excess[worst] <= 1, got)
