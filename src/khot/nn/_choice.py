"""A mixed operation, of which k of n branches stay: architecture search as a top-k."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from .. import _check
from .._torch import is_shape_only
from ..relaxations import sigmoid_topk
from . import selectors
from ._precision import KeepsPrecision, shown, wide_dtype
from .selectors import Selector


class Choice(KeepsPrecision):
    """Apply k of n operations: `Σ m_i·operation_i(x)` with m = selector(θ, k), k-hot, soft or sampled.

    Operations with m = 0 are not computed: with `selectors.straight_through`, `sampled` and `hard`, only the k chosen
    are. In evaluation the k largest scores θ choose. To hold one budget of costs over all the Choices of a model, use
    `khot.nn.sparsity.Sparsifier` with `units=khot.nn.sparsity.choices`.

    Args:
        operations: modules from x to outputs of one shape.
        k: how many of them stay.
        costs: what each operation costs, > 0, for a shared budget; 1 each if None.
        selector: how m is chosen in training: a function of `khot.nn.selectors`.
        temperature: of the selector; a buffer, which a `Schedule` may change.

    Attributes:
        scores: θ, one per operation, learned; 0 at first.

    Examples:
        >>> choice = khot.nn.Choice([torch.nn.Identity(), torch.nn.ReLU(), torch.nn.Tanh()], 1)
        >>> choice(torch.tensor([-3.0]))
        tensor([-1.3317], grad_fn=<AddBackward0>)
        >>> choice.scores.data = torch.tensor([0.0, 1.0, 0.0])
        >>> choice.eval()(torch.tensor([-3.0]))
        tensor([0.])
        >>> choice.finalize()
        ReLU()
    """

    temperature: Tensor

    def __init__(
        self,
        operations: Iterable[nn.Module],
        k: int = 1,
        *,
        costs: Sequence[float] | Tensor | None = None,
        selector: Selector = selectors.soft,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        _check.function("selector", selector)
        self.operations = nn.ModuleList(_check.modules("operations", operations))
        n = len(self.operations)
        _check.at_least("len(operations)", n, 1)
        _check.integer_at_most("k", k, n, "operations")
        _check.at_least("k", k, 1)
        _check.positive("temperature", temperature)
        costs = [1.0] * n if costs is None else costs
        if not isinstance(costs, Tensor):
            for cost in costs if isinstance(costs, Sequence) else (costs,):
                _check.number("costs", cost, "numbers")
        prices = torch.as_tensor(costs, dtype=torch.float64, device="cpu")
        if prices.shape != (n,):
            raise ValueError(f"`costs` must have one number per operation, {n}; got the shape {tuple(prices.shape)}.")
        if not is_shape_only(prices) and not bool((prices > 0).all()):
            raise ValueError(f"Every entry of `costs` must be > 0; got {float(prices.min()):g}.")
        self.k, self.selector = int(k), selector
        self.scores = nn.Parameter(torch.zeros(n))
        self.costs = prices
        self.register_buffer("temperature", torch.tensor(float(temperature), dtype=wide_dtype()))
        self.generator: torch.Generator | None = None
        """Where the randomness of the selector comes from; torch's own if None."""
        self.given: Tensor | nn.Module | None = None
        """A mask (n,) from outside that is used instead of the own one; or a module that maps ones to it."""
        self.last: int | None = None
        """The first operation that the last call applied."""

    def mask(self) -> Tensor:
        """Return m (n,): in training that of the selector, drawn anew at each call; in evaluation the hard one."""
        if isinstance(self.given, nn.Module):
            given: Tensor = self.given(torch.ones_like(self.scores))
            return given
        if self.given is not None:
            return self.given
        if not self.training:
            return selectors.hard(self.scores, self.k)
        return self.selector(self.scores, self.k, temperature=self.temperature, generator=self.generator)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the operations that the mask chooses to x; the shape is that of the operations."""
        _check.instance("x", x, Tensor)
        mask = self.mask()
        is_zero = [False] * len(mask) if is_shape_only(mask) else (mask == 0).tolist()
        self.last = is_zero.index(False) if False in is_zero else None
        total: Tensor | None = None
        for operation, weight, skip in zip(self.operations, mask.unbind(), is_zero, strict=True):
            if not skip:
                part = weight.to(x.dtype) * operation(x) if x.is_floating_point() else weight * operation(x)
                total = part if total is None else total + part
        if total is None:
            raise RuntimeError("The mask of a `Choice` must keep at least one operation; it keeps none.")
        return total

    def log_prob(self) -> Tensor:
        """Return the log-probability of the operation that was drawn last, differentiable in θ; for k = 1.

        What is not drawn is not computed, so `selectors.sampled` tells θ of the operation alone that was drawn, and
        not whether others are better. To compare them, draw without a gradient (`selectors.drawn`, or
        `khot.nn.sparsity.drawn` within a budget), and add `(loss.detach() − baseline)·log_prob()` of all Choices to
        the loss.

        Examples:
            >>> choice = khot.nn.Choice([torch.nn.Identity(), torch.nn.ReLU()], selector=khot.nn.selectors.drawn)
            >>> loss = choice(torch.ones(3)).sum()
            >>> choice.log_prob()
            tensor(-0.6931, grad_fn=<SelectBackward0>)
        """
        if self.k != 1 or self.last is None:
            raise ValueError(f"`log_prob` must follow a call of a Choice with k = 1; got k = {self.k}.")
        probs: Tensor = self.given.probs() if isinstance(self.given, nn.Module) else self.soft_mask()  # type: ignore[operator]
        return probs.log()[self.last]

    def chosen(self, scores: Tensor | None = None) -> list[int]:
        """Return which k operations have the largest scores θ, or the largest of other `scores` (n,)."""
        values = self.scores.detach() if scores is None else scores
        _check.last_dim("scores", values, len(self.operations))
        return torch.nonzero(selectors.hard(values, self.k)).flatten().tolist()

    def soft_mask(self, without: int | None = None) -> Tensor:
        """Return σ_k(θ) (n,), with an operation left out if `without` says which."""
        is_in = torch.ones_like(self.scores, dtype=torch.bool)
        if without is not None:
            _check.integer_at_most("without", without, len(self.operations) - 1, "operations")
            is_in[without] = False
        return sigmoid_topk(self.scores, self.k, temperature=self.temperature, mask=is_in)

    def finalize(self, scores: Tensor | None = None) -> nn.Module:
        """Return what stays, by θ or by other scores: the operation, or a `Choice` of k of k."""
        kept = self.chosen(scores)
        if len(kept) == 1:
            return self.operations[kept[0]]
        costs = self.costs[kept]
        rest = Choice([self.operations[i] for i in kept], len(kept), costs=costs, selector=selectors.hard)
        with torch.no_grad():
            rest.scores.copy_(self.scores[kept])
        return rest.train(self.training)

    def extra_repr(self) -> str:
        return f"k={self.k}, temperature={shown(self.temperature)}"


@torch.no_grad()
def perturbation_scores(model: nn.Module, evaluate: Callable[[], float]) -> dict[str, Tensor]:
    """Score each operation of each `Choice` by what the model loses without it, as DARTS-PT does.

    All operations are mixed meanwhile, by σ_k of θ, also in evaluation mode.

    Args:
        model: whose Choices are looked at; each leaves its operations out in turn.
        evaluate: returns how good the model is now, for example its accuracy; larger is better.

    Returns:
        By the name of the Choice, (n,) float64: `evaluate()` with all operations minus without this one. Give them to
        `Choice.finalize`.

    Examples:
        >>> choice = khot.nn.Choice([torch.nn.Identity(), torch.nn.ReLU(), torch.nn.Tanh()])
        >>> khot.nn.perturbation_scores(choice, lambda: float(choice(torch.tensor(-1.0))))[""].argmax()
        tensor(1)

    Reference: Wang et al., "Rethinking architecture selection in differentiable NAS" (2021).
    """
    _check.instance("model", model, nn.Module)
    found = {name: module for name, module in model.named_modules() if isinstance(module, Choice)}
    for name, choice in found.items():
        if len(choice.operations) == choice.k:
            raise ValueError(f"The Choice {name!r} must have more than k = {choice.k} operations, to leave one out.")
    given = {choice: choice.given for choice in found.values()}
    try:
        for choice in found.values():
            choice.given = choice.soft_mask()
        whole = float(evaluate())
        scores = {}
        for name, choice in found.items():
            drops = []
            for i in range(len(choice.operations)):
                choice.given = choice.soft_mask(i)
                drops.append(whole - float(evaluate()))
            choice.given = choice.soft_mask()
            scores[name] = torch.tensor(drops, dtype=torch.float64)
    finally:
        for choice, mask in given.items():
            choice.given = mask
    return scores
