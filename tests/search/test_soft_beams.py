"""Soft beams: gradients, the limit T → 0, and what is mixed."""

from functools import partial

import pytest
import torch
from search_models import Prefixes

import khot
from khot.search import beam_search, embed, soft

START = torch.tensor([0])
COLD = partial(soft, temperature=1e-7)


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


ENDS = {"end": 0, "length_penalty": 0.5, "lengths": torch.tensor([3])}


@pytest.mark.parametrize("options", [{}, ENDS], ids=["", "ends"])
def test_gradients_of_all_that_is_soft(options):
    model, k = Cell(3), [2, 2, 3] if options else [2, 3]
    given = [parameter.detach() for parameter in model.parameters()]

    def run(temperature, first, *parameters):
        names = [name for name, _ in model.named_parameters()]
        twin = dict(zip(names, parameters, strict=True))

        def step(tokens, state):
            state = torch.tanh(embed(tokens, twin["embedding"]) + state @ twin["inner"])
            return (2 * state @ twin["outer"]).log_softmax(-1), state

        select = partial(soft, temperature=temperature)
        beams = beam_search(step, first, k, start=START, length=len(k), select=select, **options)
        return beams.scores, beams.soft_tokens, *beams.soft_back_pointers

    inputs = [torch.tensor(0.5, dtype=torch.float64), state(), *given]
    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in inputs], atol=1e-6)


CASES = {
    "end": {"end": 0},
    "two ends": {"end": [0, 3]},
    "long is better": {"end": 0, "length_penalty": 1.5},
    "short is better": {"end": 2, "length_penalty": -0.5},
    "one beam": {"k": 1, "end": 1},
    "k by step": {"k": [2, 4, 3, 2], "end": 0},
    "lengths": {"lengths": torch.tensor([0, 1, 2, 4])},
    "lengths and ends": {"lengths": torch.tensor([4, 0, 3, 2]), "end": [0, 1], "length_penalty": 0.5},
    "lengths and k by step": {"lengths": torch.tensor([1, 2, 3, 4]), "k": [2, 4, 3, 3]},
    "penalty alone": {"length_penalty": 1.0},
}


@pytest.mark.parametrize("case", CASES)
def test_as_the_temperature_falls_ends_are_those_of_hard_beams(case):
    ended, changed = 0, 0
    for seed in range(8):
        model = Cell(seed=seed)
        call = {"k": 3, "start": START.expand(4), "length": 4, **CASES[case]}
        k = call.pop("k")
        hard = beam_search(model.step, state(4), k, **call)
        beams = beam_search(model.step, state(4), k, select=COLD, **call)
        for name in ("tokens", "back_pointers", "lengths"):
            assert torch.equal(getattr(beams, name), getattr(hard, name)), name
        torch.testing.assert_close(beams.scores, hard.scores, atol=1e-6, rtol=0)
        torch.testing.assert_close(beams.log_probs, hard.log_probs, atol=1e-6, rtol=0)
        there = (hard.tokens >= 0).double()
        torch.testing.assert_close(beams.soft_tokens.sum(-1), there, atol=1e-6, rtol=0)
        ended += int((hard.lengths < 4).sum())
        plain = beam_search(model.step, state(4), k, start=START.expand(4), length=4, select=COLD)
        changed += bool((beams.scores - plain.scores).abs().max() > 0.01)
    assert changed >= 4  # a control: the options matter
    assert (ended > 0) == ("penalty alone" not in case)


def test_a_row_of_its_own_length_is_that_row_alone():
    model, lengths = Cell(), torch.tensor([2, 4, 1])
    for end in (None, 0):
        options = {"end": end, "length_penalty": 0.5, "select": partial(soft, temperature=0.5)}
        together = beam_search(model.step, state(3), 3, start=START.expand(3), length=4, lengths=lengths, **options)
        for row, length in enumerate(lengths.tolist()):
            one = state(3)[row : row + 1]
            alone = beam_search(model.step, one, 3, start=START, length=length, **options)
            torch.testing.assert_close(together.scores[row], alone.scores[0])
            torch.testing.assert_close(together.soft_tokens[row, :, :length], alone.soft_tokens[0])
            assert (together.soft_tokens[row, :, length:] == 0).all()


def test_the_share_of_a_slot_that_has_a_token_never_rises():
    model = Cell()
    for temperature in (0.05, 0.5, 5.0):
        select = partial(soft, temperature=temperature)
        beams = beam_search(model.step, state(3), 3, start=START.expand(3), length=5, end=[0, 2], select=select)
        share = beams.soft_tokens.sum(-1)
        torch.testing.assert_close(share[..., 0], torch.ones(3, 3, dtype=torch.float64))
        assert (share.diff() <= 1e-12).all()
        assert share.min() < 0.9
        assert ((beams.tokens >= 0).sum(-1) == beams.lengths).all()


def test_ends_written_out():
    """Two steps with an end at each: what is set aside, its weight, and the slots at the end."""
    model, T = Cell(3), 0.3
    beams = beam_search(model.step, state(), 1, start=START, length=2, end=0, select=partial(soft, temperature=T))
    first, hidden = model.step(START, state())
    first = first[0]
    share = khot.sigmoid_topk(first, 1, temperature=T)[0]
    goes_on = torch.cat((torch.zeros(1, dtype=torch.float64), khot.sigmoid_topk(first[1:], 1, temperature=T)))
    second, _ = model.step(goes_on[None], hidden)
    total = goes_on @ first + second[0]
    slot = khot.sigmoid_topk(total, 1, temperature=T)
    pool = torch.stack((slot @ total, first[0]))
    weights = khot.sigmoid_topk(pool + torch.stack((torch.zeros_like(share), share.log())), 1, temperature=T)
    torch.testing.assert_close(beams.scores[0, 0], weights @ pool)
    torch.testing.assert_close(beams.soft_tokens[0, 0, 1], weights[0] * slot)
    end = torch.tensor([1.0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(beams.soft_tokens[0, 0, 0], weights[0] * goes_on + weights[1] * end)


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
