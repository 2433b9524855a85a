"""How a Sparsifier lives with training: gradients, copies, compile, resuming, and bad input."""

import copy
import io
import math

import pytest
import torch
from torch import nn

import khot
from khot.nn import sparsity
from khot.nn.sparsity import Sparsifier
from tests.sparse_models import Mixed, mlp, nonzero, size, train

FLAT = khot.nn.schedules.between(khot.nn.schedules.cubic, 0, 0)
WAYS = {
    "soft": {"mask": sparsity.soft},
    "straight through": {"mask": sparsity.straight_through},
    "spartan": {"gradient": sparsity.soft_gradient},
    "dense gradient": {"gradient": sparsity.dense_gradient},
    "top-kast": {"mask": sparsity.hard, "gradient": sparsity.best_gradient(0.2)},
    "top-kast, now and then": {"mask": sparsity.hard, "gradient": sparsity.best_gradient(0.2), "every": 3},
    "sampled": {"mask": sparsity.sampled, "score": sparsity.learned},
    "learned": {"score": sparsity.learned},
    "product": {"score": sparsity.magnitude_times_learned, "mask": sparsity.soft},
    "rigl": {"score": sparsity.gradient_growth(), "mask": sparsity.hard, "every": 3},
    "now and then": {"mask": sparsity.soft, "every": 3},
    "channels": {"units": sparsity.channels, "mask": sparsity.soft},
    "2:4": {"units": sparsity.n_of_m(2, 4)},
}


def sparsified(way="soft", *, model=None, steps=10, **changes):
    model = mlp() if model is None else model
    budget = None if way == "2:4" else 0.3
    settings = {"steps": steps, "generator": torch.Generator().manual_seed(0), **WAYS[way], **changes}
    return model, Sparsifier(model, budget, **settings)


def direct_loss(weights, x, temperature):
    """σ_k over all |w| at once, by hand."""
    flat = torch.cat([w.abs().flatten() for w in weights])
    heat = temperature * float(flat.detach().mean())
    mask = khot.sigmoid_topk(flat, 0.3 * len(flat), temperature=heat)
    parts = mask.split([w.numel() for w in weights])
    for i, (w, m) in enumerate(zip(weights, parts, strict=True)):
        x = x @ (w * m.view(w.shape)).mT
        x = x.relu() if i < 2 else x
    return x.square().mean()


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("calls", [1, 2])
def test_the_gradient_is_that_of_the_masked_weights(is_fused, calls):
    torch.manual_seed(0)
    model = mlp().double()
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.bias = None
    score = sparsity.magnitude if is_fused else sparsity.Score(lambda known: known.magnitude)
    x = torch.randn(5, 12, dtype=torch.float64)
    before = [layer.weight.detach().clone().requires_grad_() for layer in model if isinstance(layer, nn.Linear)]
    Sparsifier(model, 0.3, steps=10, mask=sparsity.soft, score=score, density_schedule=FLAT, temperature=(0.5, 0.5))
    for _ in range(calls):  # a second backward pass between two steps adds its gradient
        model(x).square().mean().backward()
    expected = torch.autograd.grad(calls * direct_loss(before, x, 0.5), before)
    for layer, g in zip([m for m in model if isinstance(m, nn.Linear)], expected, strict=True):
        torch.testing.assert_close(layer.parametrizations.weight.original.grad, g)


def test_the_default_is_the_recipe_by_hand():
    """Soft masks, a cubic budget, the temperature in units of what is kept, and the soft mask folded in at 80 %."""
    torch.manual_seed(0)
    model, steps, x = nn.Linear(9, 7, bias=False).double(), 20, torch.randn(8, 9, dtype=torch.float64)
    w, mask, is_kept = model.weight.detach().clone().requires_grad_(), torch.ones(63, dtype=torch.float64), None
    sparsifier = Sparsifier(model, 0.2, steps=steps)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for done in range(1, steps + 1):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        sparsifier.step()
        product = w * (mask if is_kept is None else is_kept).view(7, 9)
        (g,) = torch.autograd.grad((x @ product.mT - 1).square().mean(), w)
        w = (w.detach() - 0.3 * g).requires_grad_()
        if is_kept is None:
            size = w.abs().flatten()
            unit = float(((mask * size).sum() / mask.sum()).detach())
            k = 63 * (0.2 + 0.8 * max(0, 1 - done / steps / 0.75) ** 3)
            mask = khot.sigmoid_topk(size, k, temperature=0.05 ** (done / steps / 0.8) * unit)
            assert sparsifier.cost() == pytest.approx(k if done < 16 else 12)
        if done == 16:
            is_kept = torch.zeros(63, dtype=torch.float64).index_fill(0, size.topk(12).indices, 1.0)
            w = (w * mask.view(7, 9)).detach().requires_grad_()
    torch.testing.assert_close(sparsifier.finalize().weight, w * is_kept.view(7, 9))


def test_a_layer_without_a_gradient_has_its_part_of_the_sum():
    """The mask of a layer that the loss does not reach still depends on the others', through the threshold."""
    torch.manual_seed(0)
    found, first = [], mlp().double()
    for score in (sparsity.magnitude, sparsity.Score(lambda known: known.magnitude)):
        model = copy.deepcopy(first)
        Sparsifier(model, 0.3, steps=10, mask=sparsity.soft, score=score, density_schedule=FLAT)
        model[0](torch.ones(1, 12, dtype=torch.float64)).square().sum().backward()
        found.append([model[i].parametrizations.weight.original.grad for i in (0, 2, 4)])
    for one, other in zip(*found, strict=True):
        assert float(one.abs().max()) > 0
        torch.testing.assert_close(one, other)


def test_weights_that_change_before_backward_raise():
    for score in (sparsity.magnitude, sparsity.learned):
        model, sparsifier = sparsified(score=score)
        for _ in range(3):
            sparsifier.step()
        loss = model(torch.ones(2, 12)).sum()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        sparsifier.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|must not change"):
            loss.backward()


@pytest.mark.parametrize("way", WAYS)
def test_resuming_gives_the_same_bits(way):
    def start():
        torch.manual_seed(0)
        model, sparsifier = sparsified(way, steps=20)
        return model, sparsifier, torch.optim.Adam(model.parameters(), 1e-2)

    def run(model, sparsifier, optimizer, steps):
        for i in range(sparsifier.done, sparsifier.done + steps):
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i))
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            sparsifier.step()

    for stop in (7, 18):  # before and after the masks are frozen
        whole, rest = start(), start()
        run(*whole, 20)
        part = start()
        run(*part, stop)
        file = io.BytesIO()
        torch.save([p.state_dict() for p in part], file)
        file.seek(0)
        for target, state in zip(rest, torch.load(file), strict=True):
            target.load_state_dict(state)
        run(*rest, 20 - stop)
        for one, other in zip(whole[1].finalize().parameters(), rest[1].finalize().parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_computes_the_same_and_goes_its_own_way(way):
    torch.manual_seed(0)
    model, sparsifier = sparsified(way)
    x = torch.randn(8, 12)
    train(model, sparsifier, x, steps=4)
    both = copy.deepcopy((model, sparsifier))
    other = copy.deepcopy(model)
    for twin in (both[0], other):
        torch.testing.assert_close(twin.eval()(x), model.eval()(x), rtol=0, atol=0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    both[0].train()
    train(*both, x, steps=4)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert nonzero(both[1].finalize()) <= size(mlp()) * (0.5 if way == "2:4" else 0.3)


@pytest.mark.parametrize("rule", [sparsity.soft, sparsity.straight_through, sparsity.sampled])
def test_evaluation_is_what_finalize_makes(rule):
    model, sparsifier = sparsified("soft", density_schedule=FLAT, mask=rule)
    x = torch.randn(3, 12)
    for path, kept in sparsifier.kept().items():
        mask = sparsifier.masks()[path]
        assert torch.equal(kept, mask * (kept > 0)) if rule is sparsity.soft else set(kept.unique().tolist()) <= {0, 1}
    assert not torch.equal(model(x), model.eval()(x)) or rule is sparsity.straight_through
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    assert sum(int(m.count_nonzero()) for m in sparsifier.kept().values()) == int(0.3 * size(mlp()))
    after = model(x)  # masks follow the weights without a step
    sparsifier.finalize()
    assert torch.equal(model(x), after)


def test_tied_weights_have_one_mask():
    torch.manual_seed(0)
    model = Mixed()
    sparsifier = Sparsifier(model, 0.2, steps=4)
    train(model, sparsifier, torch.randint(11, (4, 5)), steps=4)
    assert torch.equal(model.embed.weight, model.head.weight)
    sparsifier.finalize()
    assert model.embed.weight is model.head.weight
    assert nonzero(model) == int(0.2 * size(model))


def test_half_precision_and_autocast():
    x = torch.randn(4, 12)
    model, sparsifier = sparsified("soft")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        model(x).float().sum().backward()
    half, sparsifier = sparsified("soft", model=mlp().bfloat16(), density_schedule=FLAT)
    half(x.bfloat16()).sum().backward()
    assert half[0].weight.dtype == torch.bfloat16
    assert sparsifier.cost() == pytest.approx(0.3 * size(mlp()), rel=1e-6)
    model, sparsifier = sparsified("soft", density_schedule=FLAT)
    model.double()
    assert model(x.double()).dtype == torch.float64
    assert sparsifier.cost() == pytest.approx(0.3 * size(mlp()), rel=1e-6)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("way", ["soft", "learned", "top-kast"])
def test_torch_compile_gives_the_same_training(way):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, sparsifier = sparsified(way)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(8, 12)
        for _ in range(10):
            optimizer.zero_grad()
            (run(x) - 1).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sparsifier.step()
        results.append([p.detach() for p in sparsifier.finalize().parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_growth_is_by_gradient_and_starts_at_zero():
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False)
    how = {"score": sparsity.gradient_growth(0.5), "mask": sparsity.hard, "density_schedule": FLAT}
    sparsifier = Sparsifier(model, 12, steps=100, **how)
    w = model.parametrizations.weight.original
    kept = sparsifier.masks()["weight"].clone() > 0
    x = torch.randn(5, 6)
    model(x).square().sum().backward()
    with torch.no_grad():
        product = (w * kept).requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad((x @ product.mT).square().sum(), product)
    sparsifier.step()
    now = sparsifier.masks()["weight"] > 0
    dropped = int(0.5 / 2 * (1 + math.cos(math.pi / 75)) * 12)  # after 1 of 100 steps, of 75 that replace
    stay = w.detach().abs().masked_fill(~kept, -1).flatten().topk(12 - dropped).indices
    rest = gradient.abs().flatten().index_fill(0, stay, -1).topk(12 - len(stay)).indices
    assert set(torch.nonzero(now.flatten()).flatten().tolist()) == {*stay.tolist(), *rest.tolist()}
    assert (w[now & ~kept] == 0).all()
    assert int(now.sum()) == 12


def test_top_kast_gives_gradients_to_the_best():
    model = nn.Linear(10, 10, bias=False)
    Sparsifier(model, 20, steps=10, density_schedule=FLAT, **WAYS["top-kast"])
    model(torch.randn(4, 10)).square().sum().backward()
    w = model.parametrizations.weight.original
    best = w.detach().abs().flatten().topk(40).indices  # 20, and 0.2 of 100
    assert set(torch.nonzero(w.grad.flatten()).flatten().tolist()) == set(best.tolist())
    assert int(model.weight.count_nonzero()) == 20


def test_the_report_adds_up():
    _, sparsifier = sparsified("soft")
    for _ in range(5):
        sparsifier.step()
    report = sparsifier.report()
    assert sum(row.cost for row in report.rows) == pytest.approx(sparsifier.cost())
    assert sum(row.share for row in report.rows) == pytest.approx(1)
    lines = str(report).splitlines()
    assert len(lines) == 5
    assert "0.weight" in lines[1]
    assert lines[-1].endswith("budget 105.6")
    pytest.importorskip("matplotlib").use("Agg")
    assert len(report.plot().patches) == 3


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_csr_computes_the_same():
    model, sparsifier = sparsified("straight through", steps=0)
    x = torch.randn(4, 12)
    expected = model.eval()(x)
    sparsifier.finalize(sparse=True)
    assert model[0].weight.layout == torch.sparse_csr
    torch.testing.assert_close(model(x), expected)


BAD = {
    "budget": ({"budget": 0.0}, "`budget` must be > 0"),
    "least": ({"budget": 1e-4}, "must be ≥ 1, the least that can be kept; got 0.0352"),
    "too much": ({"budget": 10**6}, "`budget` must be at most 352"),
    "none": ({"budget": None}, "`budget` must be a number"),
    "names": ({"exclude": ["nowhere"]}, "`exclude` must name modules of the model; got 'nowhere'"),
    "no layers": ({"layers": lambda name, module: False}, "`layers` must accept at least one layer"),
    "no weights": ({"layers": lambda name, module: isinstance(module, nn.ReLU)}, "'1' .ReLU. has no parameter"),
    "example": ({"cost": sparsity.Flops(torch.ones(2, 3))}, "must accept the example of `cost`"),
    "table": ({"cost": sparsity.Latency({"0": 1.0})}, "'2' is missing"),
    "free": ({"cost": lambda module, name, shapes: 0}, "`cost` must be > 0"),
    "pattern": ({"units": sparsity.n_of_m(2, 3), "budget": None}, "'2.weight' must be a multiple of m = 3"),
    "two budgets": ({"units": sparsity.n_of_m(2, 4)}, "`budget` must be None with `n_of_m`"),
    "growth": ({"score": sparsity.gradient_growth()}, "`mask` must be `hard`"),
    "fractions": (
        {"share": sparsity.by_layer({"9": 0.5}), "budget": None},
        "must name layers .'0', '2', '4'.; got '9'",
    ),
    "score": ({"score": sparsity.Score(lambda known: known.magnitude[:2])}, "must give one number per item"),
    "freeze": ({"freeze": 2.0}, "0 ≤ freeze ≤ 1"),
    "choices": ({"units": sparsity.choices}, "must have a `khot.nn.Choice`"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_leaves_the_model_unchanged(name):
    changes, match = BAD[name]
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        Sparsifier(model, **{"budget": 0.5, "steps": 3, **changes})
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model._forward_pre_hooks
    assert model[0].__class__ is nn.Linear


ODD = {
    "no weights": (lambda: nn.Sequential(nn.ReLU()), "`layers` must accept at least one layer"),
    "buffers only": (lambda: nn.BatchNorm1d(4, affine=False), "`layers` must accept at least one layer"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), "'0' has no weights yet; run the model once"),
    "meta": (lambda: nn.Linear(4, 4, device="meta"), "has no weights yet"),
    "empty": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 0)), "'1' must have real weights, at least one"),
    "complex": (lambda: nn.Linear(4, 4, dtype=torch.complex64), "must have real weights"),
    "sparse": (lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)), "'0' has sparse gradients"),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "parametrized already"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_models_without_weights_to_choose_from_are_refused(name):
    make, match = ODD[name]
    with pytest.raises(ValueError, match=match):
        Sparsifier(make(), 0.5, steps=3)


@pytest.mark.parametrize("name", ["layers", "units", "share", "cost", "mask", "gradient", "density_schedule"])
def test_strings_are_no_methods(name):
    with pytest.raises(TypeError, match=f"`{name}` must be a Callable; got str"):
        Sparsifier(mlp(), 0.5, steps=3, **{name: "soft"})


def test_frozen_weights_are_masked_and_others_trained():
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(6, 12)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    sparsifier = Sparsifier(model, 0.3, steps=10, mask=sparsity.straight_through)
    train(model, sparsifier, x, steps=10)
    sparsifier.finalize()
    assert nonzero(model) == int(0.3 * size(mlp()))
    assert torch.equal(model[0].weight, before * (model[0].weight != 0))
    masks = mlp().requires_grad_(False)  # only the choice is learned
    start = copy.deepcopy(masks.state_dict())
    options = {"mask": sparsity.straight_through, "score": sparsity.learned, "freeze": 1.0}
    supermask = Sparsifier(masks, 0.5, steps=10, **options)
    scores = [p.clone() for p in masks.parameters() if p.requires_grad]
    train(masks, supermask, x, steps=10)
    learned = [p for p in masks.parameters() if p.requires_grad]
    assert not all(torch.equal(a, b) for a, b in zip(scores, learned, strict=True))
    for name, w in supermask.finalize().named_parameters():
        assert torch.equal(w, start[name] * (w != 0))


def test_finalize_comes_last():
    _, sparsifier = sparsified(steps=0)
    sparsifier.finalize()
    for call in (sparsifier.step, sparsifier.finalize):
        with pytest.raises(RuntimeError, match="must come last"):
            call()
