"""Private and version-dependent names of torch, each with a fallback.

A name that a version of torch lacks costs speed or a transform, never a wrong number: without it khot assumes that a
mode is on and asks the dispatcher, or refuses what it cannot do. `NAMES` collects them; a test deletes each in turn.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

Context = AbstractContextManager[None]
_P = ParamSpec("_P")
_R = TypeVar("_R")
NAMES: list[str] = []


def _get(name: str, fallback: Any) -> Any:
    NAMES.append(name)
    try:
        return attrgetter(name.removeprefix("torch."))(torch)
    except AttributeError:
        return fallback


def _lacks(name: str) -> NotImplementedError:
    return NotImplementedError(f"This transform of torch.func needs `{name}`, which torch {torch.__version__} lacks.")


# Whether a transform of torch.func is active.
transforms_active: Callable[[], bool] = _get("torch._C._are_functorch_transforms_active", lambda: True)
# The number of the backward pass that runs; −1 if none does.
_backward_pass: Callable[[], int] = _get("torch._C._current_graph_task_id", lambda: 0)
# What the dispatcher looks at in a tensor. Ordinary tensors of a device have keys with an equal `raw_repr()`; that of
# the fallback is a new object, unequal to all others.
dispatch_keys: Callable[[Tensor], Any] = _get("torch._C._dispatch_keys", lambda t: SimpleNamespace(raw_repr=object))
# How many TorchDispatchModes are active, and how many TorchFunctionModes.
dispatch_modes: Callable[[], int] = _get("torch._C._len_torch_dispatch_stack", lambda: 1)
function_modes: Callable[[], int] = _get("torch._C._len_torch_function_stack", lambda: 1)
# The C functions with which DLPack reads a tensor, in a capsule; older versions of torch have none.
DLPACK = "torch.Tensor.__dlpack_c_exchange_api__"
dlpack_table: Any = _get(DLPACK, None)
# What DLPack does not tell of a tensor: whether its sign is still to be changed, and whether its dimensions have names.
ODDITIES = tuple(filter(None, (_get(f"torch.Tensor.{name}", None) for name in ("is_neg", "has_names"))))
# Σ_j a[row, j]·b[column, j] for each pair of a row and a column: what the gradient of `embedding_bag` calls.
_PRODUCTS = "torch.ops.aten._embedding_bag_per_sample_weights_backward"
_products: Callable[..., Tensor] | None = _get(_PRODUCTS, None)


def entry_products(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the entries (rows, columns) of a·bᵀ alone, (entries,); a (m, d) and b (n, d) of one dtype."""
    if _products is None:
        parts = zip(rows.split(2**12), columns.split(2**12), strict=True)
        return torch.cat([(a[row] * b[column]).sum(1) for row, column in parts])
    return _products(a, b, columns, rows.new_zeros(1), rows, 0)


def is_traced_number(value: Any) -> bool:
    """Return whether `value` is a number of numpy inside torch.compile, which traces it as an array without values."""
    return torch.compiler.is_compiling() and isinstance(value, np.ndarray) and value.ndim == 0


# Whether torch.jit.trace records.
is_tracing: Callable[[], bool] = _get("torch._C._is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]


def is_in_backward() -> bool:
    """Return whether a backward pass runs, which computes again what was checkpointed."""
    return not torch.compiler.is_compiling() and _backward_pass() != -1


def is_shape_only(x: Tensor) -> bool:
    """Return whether a tensor has a shape and no values: on the meta device, or in torch's FakeTensorMode."""
    return x.is_meta or type(x).__name__ == "FakeTensor"


def has_values(x: Tensor) -> bool:
    """Return whether a check may read values: there are none on the meta device, in a graph or in a transform."""
    return not (is_shape_only(x) or torch.compiler.is_compiling() or transforms_active() or is_tracing())


def require_values(what: str, *tensors: Any) -> None:
    """Raise NotImplementedError if `what` depends on values that are not there, or that torch.jit.trace would freeze.

    A compiled or exported graph is no concern of it: there torch itself breaks the graph, or says why it cannot.
    """
    if torch.compiler.is_compiling():
        return
    if any(isinstance(t, Tensor) and is_shape_only(t) for t in tensors):
        reason = "those on the meta device and fake ones have a shape alone"
        raise NotImplementedError(f"{what} depends on the values of tensors, and {reason}. Use a device with values.")
    if is_tracing():
        reason = "torch.jit.trace would record the steps for those of the example alone"
        raise NotImplementedError(f"{what} depends on the values of tensors, and {reason}. Use torch.compile.")


def assert_in_graph(condition: Any, message: str) -> None:
    """Raise unless a condition on sizes holds; in a compiled graph that cannot know them before, when it runs."""
    torch._check(condition, lambda: message)


class _Snapshot:
    """Keep the values of a tensor at a moment; without values it is unequal to all others."""

    def __init__(self, t: Tensor) -> None:
        self.values = t.detach().clone() if has_values(t) else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Snapshot) or self.values is None or other.values is None:
            return False
        a, b = self.values, other.values
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a != a) & (b != b)).all())


_has_versions = _get("torch.Tensor._version", None) is not None


def version(t: Tensor) -> Any:
    """Return what is equal to the `version(t)` of later, if `t` is not changed in place until then.

    It is torch's count of changes, which inference tensors lack; without that, a copy of the values.
    """
    return t._version if _has_versions else _Snapshot(t)


def was_changed(t: Tensor, before: Any) -> bool:
    """Return whether `t` is known to have been changed in place since its version was `before`."""
    now = version(t)
    return bool(now != before) and (_has_versions or (now.values is not None and before.values is not None))


# The level of forward-mode differentiation, given `torch.autograd.forward_ad`; negative if it is off.
_has_level = _get("torch.autograd.forward_ad._current_level", None) is not None
forward_level: Callable[[Any], int] = attrgetter("_current_level") if _has_level else lambda module: 0


def _exclude_autograd() -> Context:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for device in ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1", "Other"):
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autograd{device}"))
    guard: Context = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


_below_autograd: Callable[[], Context] = _get("torch._C._AutoDispatchBelowAutograd", _exclude_autograd)


def _no_forward_mode(enabled: bool) -> Context:
    if forward_level(forward_ad) >= 0 and transforms_active():
        raise _lacks(_FORWARD)
    return nullcontext()


_FORWARD = "torch.autograd.forward_ad._set_fwd_grad_enabled"
_forward_grad: Callable[[bool], Context] = _get(_FORWARD, _no_forward_mode)
_LEVEL = "torch._functorch.autograd_function.enable_single_level_autograd_function"
_single_level: Callable[[], Context] | None = _get(_LEVEL, None)


def derive(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply an autograd.Function inside the autograd kernel of an op, which torch.func calls level by level."""
    if not transforms_active():
        return function.apply(*arguments)
    if _single_level is None:
        raise _lacks(_LEVEL)
    with _single_level():
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


_has_nodes = _get("torch.autograd.Function._backward_cls", None) is not None


def call_from_nodes(function: type[torch.autograd.Function], method_of: Callable[[Any], Any] | None = None) -> None:
    """Let autograd call `function.backward`, or the method that `method_of` makes for the type of its nodes.

    It is what torch's own `apply` of a node calls, after it has looked it up.
    """
    if _has_nodes:
        nodes: Any = function._backward_cls
        nodes.apply = function.backward if method_of is None else method_of(nodes)


def apply_plain(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return an `apply` for ordinary tensors while no transform is active: it has nothing to unwrap or to bind."""
    call_from_nodes(function)
    quick: Callable[..., Any] = getattr(super(torch.autograd.Function, function), "apply", function.apply)
    return quick


@contextmanager
def next_level() -> Iterator[None]:
    """Let an autograd kernel call its op again: this level is done, and the levels below it differentiate."""
    with torch.enable_grad(), _forward_grad(True), _below_autograd():
        yield


@contextmanager
def next_tangents() -> Iterator[None]:
    """Let `jvp` compute a tangent that the levels below differentiate."""
    with torch.enable_grad(), _forward_grad(True):
        yield


def primals(tensors: tuple[Tensor | None, ...]) -> list[Any]:
    """Return saved tensors without the tangents of this level."""
    return [None if t is None else forward_ad.unpack_dual(t).primal for t in tensors]


def no_autocast(x: Tensor) -> Context:
    """Turn autocast off, to keep the precision; a device without autocast, such as meta, has nothing to turn off."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def without_autocast(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a method that must compute in the precision of its first tensor, whether autocast is on or not."""

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        with nullcontext() if first is None else no_autocast(first):
            return method(*args, **kwargs)

    return run


_MAKE_FX = "torch.fx.experimental.proxy_tensor.make_fx"  # heavy: imported when it is needed
NAMES.append(_MAKE_FX)


def derivative(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the derivative of an elementwise function, as torch operations.

    It is traced once, because no transform of torch.func can be started inside the derivative of an op.
    """

    def slope(z: Tensor) -> Tensor:
        result: Tensor = torch.func.vjp(fn, z)[1](torch.ones_like(z))[0]
        return result

    def untransformed(z: Tensor) -> Tensor:
        if transforms_active():
            raise _lacks(_MAKE_FX)
        return slope(z)

    try:
        from torch.fx.experimental.proxy_tensor import make_fx
    except ImportError:
        return untransformed
    graph = make_fx(slope, tracing_mode="symbolic")(torch.zeros(7, dtype=torch.float64, device="cpu"))
    return lambda z: graph(z.flatten()).view(z.shape)


_RESOLVE = "torch.distributed.distributed_c10d._resolve_process_group"
_resolve_group: Callable[[str], Any] | None = _get(_RESOLVE, None)
_has_world = _get("torch.distributed.distributed_c10d._world", None) is not None


def process_group(name: str) -> Any:
    """Return the process group of a name: ops take names, because a graph cannot hold a group."""
    if _resolve_group is not None:
        return _resolve_group(name)
    if _has_world:  # looked up each time, because torch may put another in its place
        for group, known in torch.distributed.distributed_c10d._world.pg_names.items():
            if known == name:
                return group
    raise NotImplementedError(f"One row on many ranks needs `{_RESOLVE}`, which torch {torch.__version__} lacks.")


def reshard(module: torch.nn.Module) -> None:
    """Let FSDP2 put parameters back into shards: after a forward pass, it may hold others in their place."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()


_warned: set[str] = set()


def warn_of_ranks(what: str, fix: str) -> None:
    """Warn, once for each `what`, that a result depends on the tokens of the other processes, if there are any."""
    is_many = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not is_many or torch.compiler.is_compiling() or what in _warned or torch.distributed.get_world_size() == 1:
        return
    _warned.add(what)
    wrong = f"{what} looks at this process's tokens alone, so its gradient is not that of the whole batch. {fix}"
    warnings.warn(wrong, stacklevel=3)


_sample_gamma: Callable[..., Tensor] | None = _get("torch._standard_gamma", None)


def standard_gamma(concentration: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Gamma(concentration, 1) variables, of the shape and dtype of `concentration`.

    `torch.distributions.Gamma` takes no generator, so this calls the function beneath it. Where torch has none, the
    method of Marsaglia and Tsang (2000) draws from the same law, with other bits.
    """
    if _sample_gamma is not None:
        result: Tensor = _sample_gamma(concentration, generator=generator)
        return result

    def random(draw: Callable[..., Tensor]) -> Tensor:
        return draw(concentration.shape, dtype=concentration.dtype, device=concentration.device, generator=generator)

    d = concentration + 2 / 3  # of a + 1, as the method needs a ≥ 1; times U^(1/a) in the end
    result = torch.full_like(d, torch.nan)
    while bool((is_left := result.isnan()).any()):
        x = random(torch.randn)
        v = (1 + x / (9 * d).sqrt()) ** 3
        is_accepted = (v > 0) & (random(torch.rand).log() < x * x / 2 + d - d * v + d * v.clamp(min=1e-300).log())
        result = torch.where(is_left & is_accepted, d * v, result)
    return result * random(torch.rand) ** (1 / concentration)
