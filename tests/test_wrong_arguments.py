"""Every argument of every public call, replaced by a value that must be wrong: the error names that argument."""

import importlib
import inspect
import sys

import torch
from public_calls import CALLS, Tensors

ROOMS = ["", ".attention", ".coding", ".constraints", ".designs", ".estimators", ".metrics", ".nn", ".nn.neighbors"]
ROOMS += [".nn.routing", ".nn.selectors", ".nn.sparsity", ".nn.spark", ".nn.tokens", ".search", ".survey"]
METHODS = ("forward", "log_prob", "rsample", "sample")
TEXT, OBJECT, COMPLEX = "text", object(), torch.ones(3, dtype=torch.complex64)
# Arguments that may be anything, or that the distributed tests look at; and those that a function has only because
# others like it read them.
FREE = {"state", "validate_args", "group", "latent_group"}
UNREAD = {
    ("khot.search.hard", "log_weights"),
    ("khot.search.soft", "log_weights"),
    ("khot.search.sampled", "log_probs"),
    ("khot.nn.Choice.forward", "x"),  # the operations decide what it may be
    ("khot.nn.selectors.hard", "temperature"),
    *((f"khot.{name}", "generator") for name in ("search.hard", "search.soft", "search.beam_search")),
    *((f"khot.nn.selectors.{name}", "generator") for name in ("hard", "soft", "straight_through")),
    *((f"khot.nn.routing.{name}", "generator") for name in ("sigma_topk", "balanced_sigma_topk")),
    *((f"khot.nn.{name}.forward", "generator") for name in ("Router", "MoE", "SparseAutoencoder", "SoftNeighbors")),
    *((f"khot.nn.{name}.forward", "generator") for name in ("SigmoidTopKAttention", "TokenPruner")),
}


def public_functions():
    """The code of public functions, of constructors and of the usual methods, with their names."""
    found = {}
    for room in ROOMS:
        module = importlib.import_module(f"khot{room}")
        for name in dir(module):
            value = getattr(module, name)
            parts = {name: value}
            if inspect.isclass(value) and value.__module__.startswith("khot"):
                parts = {name: value.__dict__.get("__init__")}
                parts |= {f"{name}.{method}": value.__dict__.get(method) for method in METHODS}
            for label, fn in parts.items():
                if inspect.isfunction(fn) and not name.startswith("_"):
                    to_call = value if fn.__name__ == "__init__" else fn
                    found.setdefault(inspect.unwrap(fn).__code__, (f"khot{room}.{label}", to_call))
    return found


def recorded():
    """One right call of each public function that `CALLS` reaches: (name, function, its arguments)."""
    public, seen, begun = public_functions(), {}, []

    def look(frame, event, argument):
        while begun:  # what a closure shares stands in cells, which are not filled yet when a call begins
            first = begun.pop()
            seen[first.f_code] = {**first.f_locals, **seen[first.f_code]}
        if event == "call" and frame.f_code in public and frame.f_code not in seen:
            seen[frame.f_code] = dict(frame.f_locals)
            begun.append(frame)

    for call in CALLS.values():
        sys.setprofile(look)
        try:
            call(Tensors(), int)
        finally:
            sys.setprofile(None)
    return [(*public[code], arguments) for code, arguments in seen.items()]


def called(fn, arguments):
    """Call a function with arguments by name, as far as it takes them by name."""
    positional, named = [], {}
    for parameter in inspect.signature(fn).parameters.values():
        value = arguments[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= value
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = value
        else:
            positional.append(value)
    return fn(*positional, **named)


def unclear(name, fn, arguments):
    """Calls with one wrong argument that raise nothing, or an error that does not name it."""
    found = []
    for parameter in inspect.signature(fn).parameters.values():
        label, right = parameter.name, arguments.get(parameter.name)
        is_free = label in FREE or (name, label) in UNREAD or isinstance(parameter.default, bool) or label == "self"
        if is_free or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for value in (TEXT, OBJECT, COMPLEX) if isinstance(right, torch.Tensor) else (TEXT, OBJECT):
            try:
                called(fn, {**arguments, label: value})
                got = "nothing is raised"
            except Exception as error:
                if isinstance(error, TypeError | ValueError | NotImplementedError) and f"`{label}" in str(error):
                    continue
                got = f"{type(error).__name__}: {str(error)[:120]}"
            found.append(f"{name}({label}={value!r:.20}): {got}")
    return found


def test_an_error_names_the_argument_that_is_wrong():
    calls = recorded()
    assert len(calls) > 100
    assert [line for call in calls for line in unclear(*call)] == []


def test_the_search_finds_errors_that_name_nothing():
    def careless(x, k=1):
        return x.sum() + k

    assert len(unclear("careless", careless, {"x": torch.ones(2), "k": 1})) >= 4
