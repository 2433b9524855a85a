"""Cases that every process of a group runs: its part against the whole row on one process."""

import functools

import torch
import torch.distributed as dist

import khot
from khot.distributed import messages

FAMILY = {
    "sigmoid": khot.sigmoid_topk,
    "laplace": khot.laplace_topk,
    "normal": khot.normal_topk,
    "cauchy": khot.cauchy_topk,
    "euclidean": khot.euclidean_topk,
    "power": khot.power_topk,
}
ATOL = {torch.float32: 1e-6, torch.float64: 1e-12}


MOST_ROUNDS = {"sigmoid": 16, "laplace": 16, "normal": 20, "cauchy": 32, "euclidean": 32, "power": 80}


def bounds(n, layout):
    """Where the parts of a row of n begin and end: even, uneven, or with an empty part."""
    world = dist.get_world_size()
    if layout == "even":
        at = [n * r // world for r in range(world + 1)]
    elif layout == "uneven":
        at = [0] + [n * (r * r + 1) // (world * world + 1) for r in range(1, world)] + [n]
    else:
        at = [0, 0] + [n * r // (world - 1) for r in range(1, world)]
    return at[dist.get_rank()], at[dist.get_rank() + 1]


def part(t, layout="even", dim=-1):
    low, high = bounds(t.shape[dim], layout)
    return t.narrow(dim, low, high - low)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rows(n, dtype):
    """Rows of many kinds; each is solved with several k and temperatures."""
    x = random(8, n, seed=n)
    u = torch.rand(8, n, generator=torch.Generator().manual_seed(n + 1), dtype=torch.float64)
    x[1] = torch.tan(torch.pi * (u[1] - 0.5)) ** 3
    x[2] = x[2].round()
    x[3] = (5 * x[3]).exp()
    x[4, 0] = 1e8
    x[5] = 1000 + x[5]
    x[6] = 0.7
    x[7, : n // 4] = -torch.inf
    return x.to(dtype)


def agrees(got, expected, k, dtype, layout="even"):
    expected = part(expected, layout)
    scale = max(float(torch.as_tensor(k).max()), 1.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=ATOL[dtype] * scale, equal_nan=True)


def _family(dtype, layout):
    for name, fn in FAMILY.items():
        for n in (60, 1500):
            x = rows(n, dtype)
            for k, temperature in ((0.5, 1.0), (n / 20, 1e-4), (n // 2, 1.0), (n - 0.5, 10.0), (7.0, 0.01)):
                y = fn(part(x, layout), k, temperature=temperature, group=dist.group.WORLD)
                whole = fn(x.double(), k, temperature=temperature).to(dtype)
                try:
                    agrees(y, whole, k, dtype, layout)
                except AssertionError as error:
                    raise AssertionError(f"{name} n={n} k={k} T={temperature}: {error}") from None


def family_float32_even():
    _family(torch.float32, "even")


def family_float64_uneven():
    _family(torch.float64, "uneven")


def family_float64_empty():
    _family(torch.float64, "empty")


def ends_and_infinities():
    x = torch.tensor([[1.0, torch.inf, 0.0, -torch.inf, 2.0, 3.0, torch.inf, -1.0]]).repeat(9, 1).double()
    x[8, 2] = torch.nan
    k = torch.tensor([0.0, 1.0, 2.0, 3.5, 7.0, 8.0, -1.0, torch.nan, 3.0]).double()
    for fn in (khot.sigmoid_topk, khot.euclidean_topk, khot.log_sigmoid_topk):
        got = fn(part(x, "uneven"), k, group=dist.group.WORLD)
        agrees(got, fn(x, k), 1, torch.float64, "uneven")
    tau = khot.threshold(part(x, "uneven"), k, group=dist.group.WORLD)
    torch.testing.assert_close(tau, khot.threshold(x, k), rtol=0, atol=1e-12, equal_nan=True)
    hard = khot.hard_topk(part(x, "uneven"), k, group=dist.group.WORLD)
    agrees(hard, khot.hard_topk(x, k), 1, torch.float64, "uneven")


def masks_costs_dims_and_half_precision():
    x, group = random(4, 60, 3), dist.group.WORLD
    mask = torch.rand(4, 60, 3, generator=torch.Generator().manual_seed(5)) < 0.7
    costs = 0.2 + torch.rand(4, 60, 1, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    k = torch.tensor([[1.0], [2.5], [4.0], [11.0]]).double()
    for layout in ("even", "empty"):
        cut = functools.partial(part, layout=layout, dim=1)
        got = khot.sigmoid_topk(cut(x), k, dim=1, mask=cut(mask), group=group)
        torch.testing.assert_close(got, cut(khot.sigmoid_topk(x, k, dim=1, mask=mask)), rtol=0, atol=1e-11)
        got = khot.normal_topk(cut(x), k, dim=1, mask=cut(mask), costs=cut(costs), group=group)
        whole = khot.normal_topk(x, k, dim=1, mask=mask, costs=costs)
        torch.testing.assert_close(got, cut(whole), rtol=0, atol=1e-11)
        half = khot.sigmoid_topk(cut(x).bfloat16(), k, dim=1, group=group)
        torch.testing.assert_close(half, cut(khot.sigmoid_topk(x.bfloat16(), k, dim=1)), rtol=0, atol=0.004)
    own = khot.relaxation(lambda z: 0.5 + 0.5 * z / (2 + z.square()).sqrt(), symmetric=True)
    got = own(part(x[..., 0]), 5, group=group)
    torch.testing.assert_close(got, part(own(x[..., 0], 5)), rtol=0, atol=1e-11)


def every_layout():
    """The whole table of cases on short rows: both dtypes, all layouts, and the rounds and bytes of every call."""
    x, scales = rows(48, torch.float64), ((0.5, 1.0), (7.0, 0.01), (24.0, 1e-4), (47.5, 10.0))
    for name, fn in FAMILY.items():
        for dtype in (torch.float32, torch.float64):
            for layout in ("even", "uneven", "empty"):
                for k, temperature in scales:
                    with messages() as sent:
                        y = fn(part(x.to(dtype), layout), k, temperature=temperature, group=dist.group.WORLD)
                    case = f"{name} {dtype} {layout} k={k} T={temperature}"
                    whole = fn(x.to(dtype).double(), k, temperature=temperature).to(dtype)
                    torch.testing.assert_close(
                        y,
                        part(whole, layout),
                        rtol=0,
                        atol=ATOL[dtype] * max(k, 1),
                        equal_nan=True,
                        msg=lambda m, c=case: f"{c}: {m}",
                    )
                    assert len(sent) - 1 <= MOST_ROUNDS[name], f"{case}: {len(sent) - 1} rounds"
                    # A survey of 96 B a row, 4 rounds of 2 KB and one of 16 B if it is wide, and 48 B a round.
                    assert sum(m.bytes for m in sent) <= len(x) * (96 + 4 * 2048 + 16 + 48 * len(sent)), case


def gathered(fn):
    """A relaxation of whole rows, held alike by all processes, that computes on parts."""

    def call(x, k, *, dim=-1, temperature=1.0, mask=None):
        x = khot.distributed.spread(x, dist.group.WORLD).movedim(dim, -1)
        low, high = bounds(x.shape[-1], "uneven")
        allowed = None if mask is None else mask.expand(x.movedim(-1, dim).shape).movedim(dim, -1)[..., low:high]
        y = fn(x[..., low:high], k, temperature=temperature, mask=allowed, group=dist.group.WORLD)
        whole = torch.nn.functional.pad(y, (low, x.shape[-1] - high))
        return khot.distributed.total(whole, dist.group.WORLD).movedim(-1, dim)

    return call


def laws_of_relaxations():
    """What `check_relaxation` checks of values and of autograd, for rows in parts."""
    from khot.testing._relaxation import Relaxation

    laws = ["range_and_sum", "count_and_temperature_per_row", "translation", "temperature_scales", "permutation"]
    laws += ["order_preserved", "complement", "cold_limit", "hot_limit", "monotone_in_k", "inverse", "masked"]
    for fn, quantile in ((khot.sigmoid_topk, torch.logit), (khot.laplace_topk, None)):
        relaxation = Relaxation(gathered(fn), quantile, symmetric=True, smooth=True)
        for law in laws:
            getattr(relaxation, law)()
    x = random(2, 7).requires_grad_()
    k, heat = torch.tensor([2.0, 3.5]).double().requires_grad_(), torch.tensor(0.7).double().requires_grad_()
    call = gathered(khot.sigmoid_topk)
    assert torch.autograd.gradcheck(lambda x, k, t: call(x, k, temperature=t), (x, k, heat))
    wrong = Relaxation(gathered(lambda x, k, **o: 1.01 * khot.sigmoid_topk(x, k, **o)), None, True, True)
    try:
        wrong.range_and_sum()
    except AssertionError:
        return
    raise AssertionError("the control: a wrong sum is found")


def rounds_and_bytes():
    for scale, offset, temperature, most in (
        (1.0, 0.0, 1.0, 6), (1.0, 1e4, 1.0, 6), (1.0, 0.0, 1e-4, 16), (1e4, 0.0, 1.0, 16)
    ):  # fmt: skip
        x = offset + scale * random(1, 4000, seed=3, dtype=torch.float32)
        with messages() as sent:
            khot.sigmoid_topk(part(x), 40, temperature=temperature, group=dist.group.WORLD)
        rounds = len(sent) - 1  # the two messages of the survey are in flight together
        assert rounds <= most, f"{rounds} rounds at {offset} ± {scale}, T {temperature}"
        if most == 6:
            assert sum(m.bytes for m in sent) <= 96 + 6 * 48, sent
    hostile = torch.tan(torch.pi * (torch.rand(20, 4000, generator=torch.Generator().manual_seed(1)) - 0.5)) ** 3
    with messages() as sent:
        khot.sigmoid_topk(part(hostile), 40, group=dist.group.WORLD)
    assert len(sent) - 1 <= 16, sent
    y = khot.sigmoid_topk(part(x).requires_grad_(), 40, group=dist.group.WORLD)
    with messages() as sent:
        y.square().sum().backward()
    assert [m.bytes for m in sent] == [16], "one message, of Σv and Σvg"


def derivatives():
    group = dist.group.WORLD
    weights, more = random(3, 30, seed=8), random(3, 30, seed=9)
    for name, fn in {**FAMILY, "log": khot.log_sigmoid_topk}.items():
        for layout in ("uneven", "empty"):
            results = []
            for in_parts in (False, True):
                cut = functools.partial(part, layout=layout) if in_parts else (lambda t: t)
                options = {"group": group} if in_parts else {}
                x = cut(random(3, 30)).clone().requires_grad_()
                k = torch.tensor([2.0, 3.5, 11.0]).double().requires_grad_()
                heat = torch.tensor([0.5, 1.0, 3.0]).double().requires_grad_()
                y = fn(x, k, temperature=heat, **options)
                first = torch.autograd.grad((y * cut(weights)).sum(), (x, k, heat), create_graph=True)
                # A loss that all processes hold alike: parts are summed, and what is alike counts once.
                own = (first[0] * cut(more)).sum()
                own = khot.distributed.total(own, group) if in_parts else own
                loss = own + 2 * first[1].square().sum() + first[2].pow(3).sum()
                second = torch.autograd.grad(loss, (x, k, heat), allow_unused=True, materialize_grads=True)
                results.append([t.detach() for t in (*first, *second)])
            for i, (whole, got) in enumerate(zip(*results, strict=True)):
                whole = part(whole, layout) if i % 3 == 0 else whole
                is_close = torch.allclose(got, whole, rtol=1e-8, atol=1e-10)
                assert is_close, f"{name} {layout} {i}: {(got - whole).abs().max()}"


def losses_and_thresholds():
    group = dist.group.WORLD
    target = (torch.rand(3, 40, generator=torch.Generator().manual_seed(2)) < 0.3).double()
    for in_parts in (False, True):
        cut = functools.partial(part, layout="uneven") if in_parts else (lambda t: t)
        options = {"group": group} if in_parts else {}
        x = cut(random(3, 40)).clone().requires_grad_()
        heat = torch.tensor(0.7).double().requires_grad_()
        loss = khot.khot_cross_entropy(x, cut(target), temperature=heat, **options)
        tau = khot.threshold(x, target.sum(-1), temperature=heat, **options)
        found = [loss, tau, *torch.autograd.grad(loss + tau.square().sum(), (x, heat))]
        if not in_parts:
            whole = [*found[:2], part(found[2], "uneven"), found[3]]
    for a, b in zip(found, whole, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=1e-11)


def hard_with_ties():
    """Short parts are gathered, in two rounds; long ones are counted by digits."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    for n, dtype in [*((400, dtype) for dtype in dtypes), *((4000, dtype) for dtype in dtypes)]:
        x = random(20, n, seed=4).mul(3).round().div(3).to(dtype)
        x[:3] = 0.0
        x[3, ::2] = -0.0
        k = torch.arange(20) * (n // 20)
        for layout in ("even", "uneven", "empty"):
            with messages() as sent:
                got = khot.hard_topk(part(x, layout), k, group=dist.group.WORLD)
            assert torch.equal(got, part(khot.hard_topk(x, k), layout))
            assert (len(sent) <= 3) == (n == 400), sent
            for row in (2, 5):  # one row goes on with the scores of its bucket alone
                got = khot.hard_topk(part(x[row], layout), 25 * row, group=dist.group.WORLD)
                assert torch.equal(got, part(khot.hard_topk(x[row], 25 * row), layout))


def faults_of_values():
    world, rank = dist.group.WORLD, dist.get_rank()
    x = random(3, 40)
    bad = part(x).clone()
    if rank == 1:
        bad[1, 2] = torch.nan
    y = khot.sigmoid_topk(bad, 3, group=world)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()
    assert khot.sigmoid_topk(part(x), 3 + (rank == 1), group=world).isnan().all(), "another k"
    assert khot.sigmoid_topk(part(x), 3, temperature=1 + 0.5 * (rank == 1), group=world).isnan().all(), "another T"
    assert khot.hard_topk(part(x), 3 + (rank == 1), group=world).isnan().all()
    assert khot.sigmoid_topk(part(x), 41, group=world).isnan().all(), "k > n"


def compiled():
    import torch._dynamo

    group = dist.group.WORLD
    x = part(random(4, 64, dtype=torch.float32))

    def fn(t, temperature):
        return 3 * khot.sigmoid_topk(t, 5, temperature=temperature, group=group)

    results = []
    for call in (fn, *(torch.compile(fn, fullgraph=True, backend=backend) for backend in ("aot_eager", "inductor"))):
        t, heat = x.clone().requires_grad_(), torch.tensor(0.5, requires_grad=True)
        y = call(t, heat)
        results.append([y, *torch.autograd.grad(y.square().sum(), (t, heat))])
    for a, *others in zip(*results, strict=True):
        for b in others:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
