"""Whole channels: which tensors share them, found by a trace of the model, and their removal at the end.

A *space* is a set of channels that are kept or dropped together: the outputs of a layer, what follows them (norms,
depthwise convolutions), and all that is added to them. Dropping a channel sets its rows, its bias and its norm to 0, so
that 0 reaches the next layer; at the end the rows are removed, and the columns of the next layer with them.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ._units import Group, Layers, Masked, own_weights

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# What maps 0 to 0, channel by channel.
QUIET: tuple[type[nn.Module], ...] = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
)
QUIET += (
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Softsign,
    nn.Tanhshrink,
)
QUIET += (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d)
QUIET += (nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.Upsample)
QUIET_FUNCTIONS: set[Any] = {torch.relu, torch.tanh, F.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu, F.mish}
QUIET_FUNCTIONS |= {F.hardswish, F.dropout, F.dropout2d, F.max_pool1d, F.max_pool2d, F.avg_pool1d, F.avg_pool2d, F.tanh}
QUIET_FUNCTIONS |= {F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, torch.clone}
QUIET_METHODS = {"relu", "relu_", "tanh", "contiguous", "clone", "float", "to"}
SUMS = {operator.add, operator.iadd, torch.add, operator.sub, operator.isub, torch.sub}
PRODUCTS = {operator.mul, operator.imul, torch.mul}


@dataclass(eq=False)
class Space:
    """Hold channels that are kept or dropped together."""

    size: int
    is_fixed: bool = False
    rows: list[tuple[str, nn.Module]] = field(default_factory=list)  # layers whose outputs they are
    followers: list[tuple[str, nn.Module]] = field(default_factory=list)  # norms and depthwise convolutions
    columns: list[tuple[str, nn.Module, int]] = field(default_factory=list)  # what they feed, and columns per channel
    joined: "Space | None" = None

    def root(self) -> "Space":
        """Return the space that this one was joined with."""
        return self if self.joined is None else self.joined.root()

    def layers(self) -> list[nn.Module]:
        """Return the modules whose outputs or inputs they are; one that keeps them, once for both."""
        return [m for _, m in self.rows + self.followers] + [m for _, m, _ in self.columns]

    def remove(self, kept: Tensor) -> None:
        """Make the layers of the space smaller; kept (channels,) bool."""
        _remove(self, kept)


@dataclass
class Value:
    """Hold where the channels of a tensor are."""

    space: Space
    repeat: int = 1  # how many neighbouring entries belong to a channel, after `flatten`
    is_last: bool = False  # whether they are in the last dim and not in dim 1


class _Tracer(fx.Tracer):
    """Trace into modules that hold chosen layers; others with weights of their own are one step."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers = layers

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if super().is_leaf_module(m, module_qualified_name):
            return True
        has_weights = next(m.parameters(), None) is not None
        return has_weights and not any(child in self.layers.values() for child in m.modules())


class Trace:
    """Hold the spaces of a model, and the layer that each comes from and goes to."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self.layers, self.names = layers, {id(m): name for name, m in model.named_modules()}
        self.spaces: list[Space] = []
        self.used: dict[int, tuple[Space, Space]] = {}  # by layer: its inputs and its outputs
        if len({id(w) for m in layers.values() for w in own_weights(m).values()}) < len(layers):
            raise ValueError("`channels` must not choose in layers that share a weight. Leave one out with `exclude`.")
        tracer = _Tracer(layers)
        try:
            graph = tracer.trace(model)
        except Exception as error:
            raise ValueError(f"The model {type(model).__name__} cannot be traced by torch.fx: {error}") from error
        self.modules = dict(model.named_modules(remove_duplicate=False))
        values: dict[fx.Node, Value | None] = {}
        for node in graph.nodes:
            values[node] = self._look(node, values)
        for name, module in layers.items():
            if id(module) not in self.used:
                raise ValueError(f"{name!r} is not used where torch.fx can trace it. Leave it out with `exclude`.")

    def free(self) -> list[Space]:
        """Return the spaces whose channels may be dropped."""
        return [space for space in self.spaces if space.joined is None and not space.is_fixed and space.rows]

    # ── one step of the trace ────────────────────────────────────────────────────────────────────────────────────────
    def _look(self, node: fx.Node, values: dict[fx.Node, Value | None]) -> Value | None:
        given = [values[n] for n in node.all_input_nodes]
        known = [value for value in given if value is not None]
        if node.op == "placeholder" or node.op == "get_attr":
            return None
        if node.op == "output":
            return self._fix(known)
        if node.op == "call_module":
            return self._module(node, self.modules[str(node.target)], given)
        if not known:
            return None
        first = known[0]
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
        if node.target in SUMS or (node.op == "call_method" and name in ("add", "add_", "sub")):
            has_number = any(not isinstance(a, fx.Node) for a in node.args)
            return self._fix(known) if has_number or len(known) < len(given) else self._join(node, known)
        if node.target in PRODUCTS or (node.op == "call_method" and name in ("mul", "mul_")):
            return self._join(node, known) if len(known) > 1 else self._fix(known) if len(given) > 1 else first
        if node.target in QUIET_FUNCTIONS or (node.op == "call_method" and name in QUIET_METHODS):
            return first
        if name == "flatten" and tuple(node.args[1:]) in ((1,), (1, -1)) and not node.kwargs:
            return Value(first.space, 0, True) if not first.is_last else first
        if name == "mean" and not first.is_last and _dims(node) in ((2, 3), (-2, -1), (-1, -2), (2,), (-1,)):
            return Value(first.space, 1, len(_dims(node)) == 2 or first.is_last)
        if name in ("size", "dim", "getattr", "shape"):
            return None
        free = [layer for value in known for layer, _ in value.space.root().rows if not value.space.root().is_fixed]
        if not free:
            return self._fix(known)
        hint = f"Leave the layers before it out with `exclude`: {', '.join(map(repr, free))}."
        raise ValueError(f"The channels of {free[0]!r} cannot be traced through {name!r} ({node.name}). {hint}")

    def _module(self, node: fx.Node, module: nn.Module, given: list[Value | None]) -> Value | None:
        name = self.names.get(id(module), str(node.target))
        value = given[0] if given else None
        if id(module) in {id(m) for m in self.layers.values()}:
            return self._layer(name, module, value)
        if value is None and isinstance(module, (*QUIET, *NORMS, nn.Flatten)):
            return None
        if value is not None and isinstance(module, QUIET):
            return value
        if value is not None and isinstance(module, nn.PReLU) and module.num_parameters == 1:
            return value
        if value is not None and isinstance(module, NORMS) and module.num_features == value.space.size:
            if not any(m is module for _, m in value.space.root().followers):
                value.space.root().followers.append((name, module))
            return value
        if value is not None and isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            return Value(value.space, 0, True) if not value.is_last else value
        return self._fix([v for v in given if v is not None])  # it sees all channels, or is no layer to choose in

    def _layer(self, name: str, module: nn.Module, value: Value | None) -> Value:
        if isinstance(module, nn.Linear):
            inputs, outputs, is_last = module.in_features, module.out_features, True
        elif isinstance(module, CONVOLUTIONS):
            inputs, outputs, is_last = module.in_channels, module.out_channels, False
        else:
            kind = type(module).__name__
            raise ValueError(f"The channels of {name!r} ({kind}) cannot be removed. Leave it out with `exclude`.")
        groups = getattr(module, "groups", 1)
        if id(module) in self.used:
            raise ValueError(
                f"{name!r} is called twice, so its channels cannot be removed. Leave it out with `exclude`."
            )
        before = Space(inputs, is_fixed=True) if value is None else value.space.root()
        if value is not None and (value.is_last != is_last or inputs % before.size):
            raise ValueError(f"The channels that reach {name!r} cannot be traced: {inputs} inputs of {before.size}.")
        if groups > 1:
            if not groups == inputs == outputs or value is None:
                kind = f"a convolution with {groups} groups"
                raise ValueError(f"The channels of {name!r}, {kind}, cannot be removed. Leave it out with `exclude`.")
            before.followers.append((name, module))
            self.used[id(module)] = (before, before)
            return value
        before.columns.append((name, module, inputs // before.size))
        space = Space(outputs, rows=[(name, module)])
        self.spaces.append(space)
        self.used[id(module)] = (before, space)
        return Value(space, 1, is_last)

    def _fix(self, values: Sequence[Value]) -> Value | None:
        for value in values:
            value.space.root().is_fixed = True
        return values[0] if values else None

    def _join(self, node: fx.Node, values: list[Value]) -> Value:
        first, *others = values
        for other in others:
            a, b = sorted((first.space.root(), other.space.root()), key=self.spaces.index)
            if (a.size, first.repeat, first.is_last) != (b.size, other.repeat, other.is_last):
                self._fix(values)  # broadcast against each other
            elif a is not b:
                a.is_fixed, b.joined = a.is_fixed or b.is_fixed, a
                a.rows, a.followers, a.columns = a.rows + b.rows, a.followers + b.followers, a.columns + b.columns
        return first


def _dims(node: fx.Node) -> tuple[Any, ...]:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())
    return tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)


# ── the unit ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def channels(model: nn.Module, layers: Layers) -> list[Group]:
    """Choose among output channels, with all that follows them: rows, biases, norms, and what is added to them.

    The model is traced by torch.fx, without an example. Channels that reach the output, a LayerNorm or anything else
    that looks at all channels stay. `Sparsifier.finalize` removes the others from all layers, the next ones' inputs
    too. Every space keeps a channel at least. Arguments as for `weights`.

    Returns:
        A group for each set of channels that are dropped together.
    """
    trace = Trace(model, layers)
    groups = [_channel_group(space) for space in trace.free()]
    if not groups:
        raise ValueError("The model has no channels that may be dropped: all reach the output or a norm over channels.")
    return groups


def _channel_group(space: Space) -> Group:
    modules = [*space.rows, *space.followers]
    masked = [
        Masked(tensor, [(name, module, key)])
        for name, module in modules
        for key in ("weight", "bias")
        if (tensor := getattr(module, key, None)) is not None
    ]
    own = _Rows([t.tensor.ndim for t in masked])
    return Group(masked, space.size, own.reduce, own.spread, structure=space, name=space.rows[0][0])


@dataclass
class _Rows:
    """An item is a row of several tensors; those with one dim, biases and norms, have no score."""

    ndims: list[int]

    def reduce(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([t.flatten(1).sum(1) for t in tensors if t.ndim > 1]).sum(0)

    def spread(self, items: Tensor) -> list[Tensor]:
        return [items.view(-1, *[1] * (ndim - 1)) for ndim in self.ndims]


# ── removal ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _remove(space: Space, kept: Tensor) -> None:
    index = kept.nonzero().flatten()
    for _, module in space.rows:
        take(module, "weight", 0, index)
        take(module, "bias", 0, index)
        set_sizes(module, len(index), "out_features", "out_channels")
    for _, module in space.followers:
        for key in ("weight", "bias", "running_mean", "running_var"):
            take(module, key, 0, index)
        set_sizes(module, len(index), "num_features", "out_channels", "in_channels", "groups")
    for _, module, repeat in space.columns:
        wide = (index[:, None] * repeat + torch.arange(repeat, device=index.device)).flatten()
        take(module, "weight", 1, wide)
        set_sizes(module, len(wide), "in_features", "in_channels")


def take(module: nn.Module, key: str, dim: int, index: Tensor) -> None:
    """Replace a tensor of a module, if it has one of that name, by a part of it."""
    tensor = getattr(module, key, None)
    if tensor is not None:
        part = tensor.detach().index_select(dim, index)
        setattr(module, key, nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part)


def set_sizes(module: nn.Module, value: int, *keys: str) -> None:
    """Set those of the attributes that a module has."""
    for key in keys:
        if hasattr(module, key):
            setattr(module, key, value)
