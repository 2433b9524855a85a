"""Soft beams: gradients, the limit T → 0, and what is mixed."""

from functools import partial

import pytest
import torch
from search_models import Prefixes

import khot
from khot.search import beam_search, embed, soft

START = torch.tensor([0])


class Cell(torch.nn.Module):
    """A small recurrent model that takes tokens or distributions over them."""

    def __init__(self, size=5, width=4, seed=0):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        shapes = {"embedding": (size, width), "inner": (width, width), "outer": (width, size)}
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64)))

    def step(self, tokens, state):
        state = torch.tanh(embed(tokens, self.embedding) + state @ self.inner)
        return (2 * state @ self.outer).log_softmax(-1), state


def state(rows=1):
    return torch.linspace(-1, 1, 4 * rows, dtype=torch.float64).view(rows, 4)


@pytest.mark.parametrize("relaxation", [khot.sigmoid_topk, khot.laplace_topk])
def test_as_the_temperature_falls_soft_beams_are_hard_beams(relaxation):
    model = Cell()
    hard = beam_search(model.step, state(3), 3, start=START.expand(3), length=4)
    errors = []
    for temperature in (1.0, 0.1, 1e-3, 1e-6):
        select = partial(soft, temperature=temperature, relaxation=relaxation)
        beams = beam_search(model.step, state(3), 3, start=START.expand(3), length=4, select=select)
        errors.append((beams.scores - hard.scores).abs().max().item())
        mass = beams.soft_tokens.sum(-1)
        torch.testing.assert_close(mass, torch.ones_like(mass))
    assert errors[0] > 0.05
    assert errors[-1] < 1e-6
    assert torch.equal(beams.tokens, hard.tokens)
    assert torch.equal(beams.back_pointers, hard.back_pointers)
    one_hot = torch.nn.functional.one_hot(hard.tokens, 5).double()
    torch.testing.assert_close(beams.soft_tokens, one_hot, atol=1e-6, rtol=0)


def test_gradients_of_all_that_is_soft():
    model = Cell(3)
    given = [parameter.detach() for parameter in model.parameters()]

    def run(temperature, first, *parameters):
        names = [name for name, _ in model.named_parameters()]
        twin = dict(zip(names, parameters, strict=True))

        def step(tokens, state):
            state = torch.tanh(embed(tokens, twin["embedding"]) + state @ twin["inner"])
            return (2 * state @ twin["outer"]).log_softmax(-1), state

        select = partial(soft, temperature=temperature)
        beams = beam_search(step, first, [2, 3], start=START, length=2, select=select)
        return beams.scores, beams.soft_tokens, *beams.soft_back_pointers

    inputs = [torch.tensor(0.5, dtype=torch.float64), state(), *given]
    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in inputs], atol=1e-6)


def test_states_tokens_and_scores_are_mixed_by_the_same_weights():
    """Two steps, written out."""
    model, T = Cell(3), 0.3
    beams = beam_search(model.step, state(), 2, start=START, length=2, select=partial(soft, temperature=T))
    first, hidden = model.step(START, state())
    slots = khot.ordered_topk(first, 2, temperature=T)[0]  # (2, 3)
    scores = slots @ first[0]
    log_probs, _ = model.step(slots, hidden.expand(2, -1))
    total = (scores[:, None] + log_probs).flatten()
    both = khot.ordered_topk(total, 2, temperature=T).view(2, 2, 3)
    torch.testing.assert_close(beams.scores[0], both.flatten(1) @ total)
    torch.testing.assert_close(beams.soft_back_pointers[1][0], both.sum(-1))
    torch.testing.assert_close(beams.soft_tokens[0, :, 1], both.sum(1))
    torch.testing.assert_close(beams.soft_tokens[0, :, 0], both.sum(-1) @ slots)


def test_impossible_continuations_weigh_nothing():
    model = Prefixes(4, 1)

    def step(tokens, state):
        log_probs = model.table[:1].expand(len(tokens), 4).clone()
        log_probs[:, 2] = -torch.inf
        return log_probs, state

    beams = beam_search(step, None, 3, start=START, length=2, select=soft)
    assert (beams.soft_tokens[..., 2] == 0).all()
    assert beams.scores.isfinite().all()


def test_training_through_the_search_reaches_what_was_not_chosen():
    model = Cell(5)
    for select, reaches in ((khot.search.hard, False), (partial(soft, temperature=1.0), True)):
        model.zero_grad()
        beam_search(model.step, state(), 1, start=START, length=2, select=select).scores.sum().backward()
        chosen = beam_search(model.step, state(), 1, start=START, length=2).tokens[0, 0, 0]
        others = [i for i in range(1, 5) if i != int(chosen)]
        assert bool((model.embedding.grad[others] != 0).all()) == reaches
