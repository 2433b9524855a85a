"""Hard beams against exhaustive search, Viterbi and greedy decoding; and what bad input gives."""

import itertools
from collections import namedtuple
from functools import partial

import pytest
import torch
from search_models import Prefixes, listed

import khot
from khot.search import beam_search


def start(batch=1):
    return torch.zeros(batch, dtype=torch.int64)


@pytest.mark.parametrize("end", [None, 0])
@pytest.mark.parametrize("penalty", [0.0, 0.7, -0.5])
def test_a_beam_that_holds_everything_is_exhaustive_search(end, penalty):
    model = Prefixes(3, 4)
    every = model.sequences(end)
    beams = beam_search(model.step, None, 81, start=start(), length=4, end=end, length_penalty=penalty)
    best = sorted(every, key=lambda y: -every[y] / len(y) ** penalty)
    found = listed(beams.tokens[0])
    assert found[: len(every)] == best
    assert set(found[len(every) :]) <= {()}
    want = torch.stack([every[y] / len(y) ** penalty for y in best])
    torch.testing.assert_close(beams.scores[0, : len(best)], want)
    torch.testing.assert_close(beams.log_probs[0, : len(best)], torch.stack([every[y] for y in best]))
    assert (beams.scores[0, len(best) :] == -torch.inf).all()
    assert beams.lengths[0, : len(best)].tolist() == [len(y) for y in best]
    assert beams.inclusion_probs is None


def test_one_beam_is_greedy_and_rows_of_a_batch_are_independent():
    models = [Prefixes(5, 6, seed=s) for s in range(4)]
    tables = torch.stack([m.table for m in models])

    def step(tokens, state):
        row, place = state
        place = torch.where(place < 0, 0, place * 5 + tokens + 1)
        return tables[row, place], (row, place)

    for k in (1, 3):
        together = beam_search(step, (torch.arange(4), torch.full((4,), -1)), k, start=start(4), length=6)
        for row, model in enumerate(models):
            alone = beam_search(model.step, None, k, start=start(), length=6)
            assert torch.equal(together.tokens[row], alone.tokens[0])
            torch.testing.assert_close(together.scores[row], alone.scores[0])
    tokens = []
    for _ in range(6):
        prefix = 0
        for token in tokens:
            prefix = prefix * 5 + token + 1
        tokens.append(int(models[0].table[prefix].argmax()))
    assert listed(beam_search(models[0].step, None, 1, start=start(), length=6).tokens[0]) == [tuple(tokens)]


def test_back_pointers_lead_back_along_the_path():
    model = Prefixes(4, 5)
    beams = beam_search(model.step, None, 3, start=start(), length=5)
    steps = [beam_search(model.step, None, 3, start=start(), length=t + 1) for t in range(5)]
    for tokens, back in zip(beams.tokens[0], beams.back_pointers[0], strict=True):
        assert back[0] == 0
        for t in range(1, 5):
            assert torch.equal(steps[t - 1].tokens[0, back[t]], tokens[:t])


def viterbi(initial, transition, emission):
    """The best path of a hidden Markov model and its log-probability, by dynamic programming."""
    score, back = initial + emission[0], []
    for row in emission[1:]:
        total = score[:, None] + transition
        score, best = total.max(0)
        score = score + row
        back.append(best)
    path = [int(score.argmax())]
    for best in reversed(back):
        path.append(int(best[path[-1]]))
    return path[::-1], score.max()


@pytest.mark.parametrize("seed", range(5))
def test_viterbi_on_hidden_markov_models(seed):
    """A beam of all states, in which paths to the same state merge, is Viterbi; and so is one that holds all paths."""
    draw = torch.Generator().manual_seed(seed)
    n, length = 6, 8
    initial = torch.randn(n, generator=draw, dtype=torch.float64).log_softmax(-1)
    transition = torch.randn(n, n, generator=draw, dtype=torch.float64).log_softmax(-1)
    emission = torch.randn(length, n, generator=draw, dtype=torch.float64) * 2

    def step(tokens, state):
        t = state[:1] if state is not None else torch.zeros(1, dtype=torch.int64)
        scores = (initial.expand(len(tokens), n) if t == 0 else transition[tokens]) + emission[t]
        return scores, (t + 1).expand(len(tokens))

    def merged(log_probs, log_weights, k, *, generator=None):
        """Of all paths to a state, keep the best."""
        paths = log_probs.view(len(log_probs), -1, n)
        slots = paths.argmax(1) * n + torch.arange(n)
        order = log_probs.gather(-1, slots).argsort(-1, descending=True)
        return khot.search.Choice(slots.gather(-1, order))

    path, score = viterbi(initial, transition, emission)
    by_merging = beam_search(step, None, n, start=start(), length=length, select=merged)
    assert by_merging.tokens[0, 0].tolist() == path
    torch.testing.assert_close(by_merging.scores[0, 0], score)
    path, score = viterbi(initial, transition, emission[:5])
    wide = beam_search(step, None, n**4, start=start(), length=5)
    assert wide.tokens[0, 0].tolist() == path
    torch.testing.assert_close(wide.scores[0, 0], score)


def test_lengths_of_rows_and_numbers_of_beams_of_steps():
    model = Prefixes(4, 4)
    state = None
    lengths = torch.tensor([0, 1, 3, 4])
    beams = beam_search(model.step, state, 2, start=start(4), length=4, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            assert listed(beams.tokens[row]) == [(), ()]
            assert beams.scores[row].tolist() == [0, -torch.inf]
            continue
        alone = beam_search(model.step, None, 2, start=start(), length=length)
        assert torch.equal(beams.tokens[row, :, :length], alone.tokens[0])
        torch.testing.assert_close(beams.scores[row], alone.scores[0])
    wide_first = beam_search(model.step, None, [4, 16, 64, 1], start=start(), length=4)
    every = model.sequences()
    assert listed(wide_first.tokens[0]) == [max(every, key=every.get)]
    assert wide_first.tokens.shape == (1, 1, 4)


def plain_search(model, k, length, end, penalty):
    """The same in plain Python, without an early end: k go on, and the best k that have ended are kept."""
    running, ended = [((), 0.0)], []
    for _ in range(length):
        ranked = [
            ((*y, v), s + float(model.log_prob((*y, v)) - model.log_prob(y))) for y, s in running for v in range(3)
        ]
        ranked.sort(key=lambda each: -each[1])
        ended += [each for each in ranked[:k] if each[0][-1] == end or len(each[0]) == length]
        running = [each for each in ranked if each[0][-1] != end][:k]
    return sorted(ended, key=lambda each: -each[1] / len(each[0]) ** penalty)[:k]


def test_a_search_ends_early_without_a_loss():
    calls = 0
    for seed, end, penalty, k in itertools.product(range(3), (0, 1), (0.0, 0.3, 1.0, -1.0), (1, 2, 3)):
        model = Prefixes(3, 6, sharpness=3.0, seed=seed)

        def step(tokens, state, model=model):
            nonlocal calls
            calls += 1
            return model.step(tokens, state)

        beams = beam_search(step, None, k, start=start(), length=6, end=end, length_penalty=penalty)
        want = plain_search(model, k, 6, end, penalty)
        assert listed(beams.tokens[0])[: len(want)] == [y for y, _ in want]
        scores = torch.tensor([s / len(y) ** penalty for y, s in want], dtype=torch.float64)
        torch.testing.assert_close(beams.scores[0, : len(want)], scores)
    assert calls < 0.8 * 6 * 72


def test_scores_have_gradients():
    model = Prefixes(3, 3)
    model.table.requires_grad_()
    beams = beam_search(model.step, None, 2, start=start(), length=3)
    beams.scores[0, 0].backward()
    path, place = beams.tokens[0, 0].tolist(), 0
    for token in path:
        assert model.table.grad[place, token] == 1
        place = place * 3 + token + 1
    assert model.table.grad.sum() == 3


def test_states_are_any_tree_of_tensors():
    Both = namedtuple("Both", "place rest")
    model = Prefixes(4, 3)

    def step(tokens, state):
        place = state.place * 4 + tokens + 1 if state.rest["begun"][0] else torch.zeros_like(tokens)
        copy = [place.clone(), (place.float()[:, None],)]
        return model.table[place], Both(place, {"begun": torch.ones_like(tokens), "copy": copy, "none": None})

    first = Both(start(), {"begun": start(), "copy": [], "none": None})
    beams = beam_search(step, first, 3, start=start(), length=3)
    assert torch.equal(beams.tokens, beam_search(model.step, None, 3, start=start(), length=3).tokens)


def nan_at(value):
    return lambda tokens, state: (torch.tensor([[0.0, value, -1.0]]).expand(len(tokens), 3), state)


class Opaque:
    pass


BAD = [
    ({"k": 0}, ValueError, "`k` must be ≥ 1; got 0"),
    ({"k": [2, 2]}, ValueError, "one for each of the 3 steps; got 2"),
    ({"k": 1.5}, TypeError, "`k` must be an int; got float"),
    ({"k": True}, TypeError, "`k` must be an int; got bool"),
    ({"length": 0, "k": 1}, ValueError, "`length` must be ≥ 1; got 0"),
    ({"start": torch.zeros(1)}, TypeError, "`start` must be an integer tensor; got torch.float32"),
    ({"start": torch.zeros(1, 2, dtype=torch.int64)}, ValueError, r"`start` must have the shape \(batch\)"),
    ({"lengths": torch.tensor([4])}, ValueError, "0 ≤ lengths ≤ 3 .* from 4 to 4"),
    ({"lengths": torch.tensor([1, 1])}, ValueError, r"`lengths` must have the shape \(1,\)"),
    ({"step": nan_at(torch.nan)}, ValueError, "got NaN at step 0, in row 0"),
    ({"step": nan_at(torch.inf)}, ValueError, r"got \+inf at step 0, in row 0"),
    ({"step": lambda tokens, state: (torch.zeros(3), state)}, ValueError, r"log-probabilities \(1, V\) at step 0"),
    ({"step": lambda tokens, state: (torch.zeros(5, 3), state)}, ValueError, r"got \(5, 3\)"),
    ({"step": lambda tokens, state: (torch.zeros(1, 3).long(), state)}, TypeError, "must be float16"),
    ({"state": Opaque()}, TypeError, "got Opaque. Reorder it with `reorder=`"),
    ({"select": khot.search.sampled, "length_penalty": 1.0}, ValueError, "`length_penalty` must be 0"),
    ({"end": -1}, ValueError, "`end` must be ≥ 0; got -1"),
    ({"select": khot.search.soft, "end": 3}, ValueError, r"0 ≤ end < 3 \(size of the last dim of `step`\); got 3"),
    (
        {"select": khot.search.soft, "end": [0, 1]},
        ValueError,
        r"k ≤ 1 \(possible continuations\) for soft beams; got 2",
    ),
    ({"select": khot.search.soft, "k": 4}, ValueError, r"k ≤ 3 \(possible continuations\) for soft beams; got 4"),
    ({"select": khot.search.soft, "state": torch.zeros(1).long()}, TypeError, "must hold floating tensors"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input(change, error, message):
    def step(tokens, state):
        return torch.zeros(len(tokens), 3).log_softmax(-1), state

    good = {"step": step, "state": None, "k": 2, "start": start(), "length": 3}
    call = {**good, **change}
    with pytest.raises(error, match=message):
        beam_search(call.pop("step"), call.pop("state"), call.pop("k"), **call)


@pytest.mark.parametrize("select", [khot.search.sampled, khot.search.soft])
def test_not_a_number_is_found_by_every_selection(select):
    for value, what in ((torch.nan, "NaN"), (torch.inf, r"\+inf")):
        with pytest.raises(ValueError, match=f"got {what} at step 0"):
            beam_search(nan_at(value), None, 2, start=start(), length=2, select=select)


@pytest.mark.parametrize("select", [khot.search.hard, khot.search.sampled])
def test_slots_without_a_continuation_stay_empty(select):
    def step(tokens, state):
        return torch.tensor([0.5, 0.5, 0.0]).log().expand(len(tokens), 3), state

    beams = beam_search(step, None, 5, start=start(2), length=2, select=partial(select))
    assert sorted(listed(beams.tokens[0])) == [(), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert beams.scores[:, 4].tolist() == [-torch.inf] * 2
    torch.testing.assert_close(beams.scores[:, :4].exp(), torch.full((2, 4), 0.25))
    nothing = beam_search(lambda t, s: (torch.full((len(t), 3), -torch.inf), s), None, 2, start=start(), length=2)
    assert listed(nothing.tokens[0]) == [(), ()]


def test_half_precision_and_an_empty_batch():
    model = Prefixes(4, 3, dtype=torch.float32)
    table = model.table.bfloat16()

    def step(tokens, state):
        log_probs, state = model.step(tokens, state)
        return log_probs.bfloat16(), state

    beams = beam_search(step, None, 3, start=start(), length=3)
    assert beams.scores.dtype == torch.float32
    assert table.dtype == torch.bfloat16
    for select in (khot.search.hard, khot.search.sampled, khot.search.soft):
        none = beam_search(nan_at(-1.0), None, 2, start=start(0), length=3, select=select)
        assert none.tokens.shape == (0, 2, 3)
