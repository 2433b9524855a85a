"""What to choose, beside the number of features: groups that count as one, costs, and a budget."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..sklearn import KHotSelector, Portfolio
from ._text import TableError, some


def read_groups(
    given: Sequence[str], names: list[str], together: Mapping[str, list[str]] = MappingProxyType({})
) -> dict[str, list[str]]:
    """Return features by group: NAME=A,B names them; NAME alone is a column of strings, with a feature for each.

    A feature whose name has a comma is quoted: NAME="A,1",B. `together` are groups that are there without being asked
    for, except where their features are in others.
    """
    result: dict[str, list[str]] = {}
    for text in given:
        name, equal, members = text.partition("=")
        own = [m.strip() for m in next(csv.reader([members], skipinitialspace=True), []) if m.strip()]
        if not equal:
            own = features_of(name, names)
        is_one = not equal and (name in together or own not in ([], [name]))  # feature of a column of strings
        if not name or len(own) < 2 - is_one or name in result:
            fix = "such as size=width,height, or the name of a column of strings"
            raise TableError(f"--group must name at least two features, {fix}; got {text!r}")
        if outside := [feature for feature in features_of(name, names) if feature not in own]:
            raise TableError(f"--group needs a name that no other feature has; got {text!r}, beside {outside[0]!r}")
        result[name] = own
    taken = {feature for own in result.values() for feature in own}
    more = {name: own for name, own in together.items() if len(own) > 1 and name not in result}
    return result | {name: own for name, own in more.items() if not taken & {*own}}


def features_of(column: str, names: Sequence[str]) -> list[str]:
    """Return the features that a column of strings became."""
    return [name for name in names if name == column or name.startswith((f"{column}=", f"{column}→"))]


def read_costs(path: Path) -> dict[str, float]:
    """Return costs from a CSV file with a feature or group and its cost in each line; a first line of names may be."""
    if not path.is_file():
        raise TableError(f"--costs: {path} is {'not a file' if path.exists() else 'missing'}")
    result: dict[str, float] = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        text = file.read()
        separator = next((mark for mark in ";\t" if mark in text.partition("\n")[0]), ",")
        for i, line in enumerate(csv.reader(io.StringIO(text), delimiter=separator)):
            if not line:
                continue
            try:
                number = line[1] if separator == "," else line[1].replace(",", ".")
                name, cost = line[0].strip(), float(number)
            except (IndexError, ValueError):
                if i == 0:
                    continue
                raise TableError(f"--costs: line {i + 1} of {path} must be a name, a comma and a number") from None
            if not 0 < cost < math.inf or name in result:
                raise TableError(f"--costs: line {i + 1} of {path} must have a new name and a cost > 0; got {line}")
            result[name] = cost
    return result


class Wish(NamedTuple):
    """Hold what to choose, beside the number: groups, costs, and how far to look."""

    max_k: int | None = None  # if k is "auto"
    groups: Mapping[str, list[str]] = MappingProxyType({})  # features that count as one, by the name of the group
    costs: dict[str, float] | None = None  # of features or groups
    budget: float | None = None  # instead of k
    false_discoveries: float | None = None  # the largest share of them that is expected
    n_jobs: int | None = None

    def units(self, names: list[str]) -> list[tuple[str, list[int]]]:
        """Return groups, and features that are in none, with the places of their features, in order."""
        place, owner = {name: i for i, name in enumerate(names)}, dict[str, str]()
        for group, members in self.groups.items():
            for name in members:
                if name not in place:
                    raise TableError(f"--group {group}: no such feature: {name!r}; there are {some(names)}")
                if name in owner:
                    raise TableError(f"{name!r} must be in one --group; got {owner[name]!r} and {group!r}")
                owner[name] = group
        found: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            found.setdefault(owner.get(name, name), []).append(i)
        return list(found.items())

    def with_priced_columns(self, names: list[str]) -> "Wish":
        """Return the wish in which the features of a column that has a cost of its own are one group."""
        taken = {feature for own in self.groups.values() for feature in own}
        own = {name: features_of(name, names) for name in self.costs or () if name not in {*names, *self.groups}}
        more = {name: features for name, features in own.items() if features and not taken & {*features}}
        return self._replace(groups={**self.groups, **more})

    def too_dear(self, names: list[str]) -> list[str]:
        """Return the units that cost more than the budget alone."""
        selector = self.selector(0, names, "auto", 0)
        costs = np.asarray(selector.costs)
        return [name for name, places in self.units(names) if costs[places].sum() > (self.budget or 0) * (1 + 1e-12)]

    def selector(self, k: int | str, names: list[str], task: str, seed: int) -> KHotSelector:
        """Return what chooses."""
        self = self.with_priced_columns(names)
        units = self.units(names)
        how: dict[str, Any] = {"groups": [places for _, places in units if len(places) > 1] or None}
        if self.budget is not None:
            if self.costs is None:
                raise TableError("--budget needs --costs")
            costs, lacking = np.empty(len(names)), list[str]()
            for name, places in units:
                lacking += [names[i] for i in places if not {name, names[i]} & {*self.costs}]
            if lacking:
                columns = dict.fromkeys(name.partition("=")[0] for name in lacking if "=" in name)
                hint = f" (or give one to the whole column: {some(list(columns))})" if columns else ""
                raise TableError(f"--costs must have a cost for each feature; {some(lacking)} lack one{hint}")
            for name, places in units:
                for i in places:
                    costs[i] = self.costs[name] / len(places) if name in self.costs else self.costs[names[i]]
            known = {*names, *self.groups}
            if unknown := [name for name in self.costs if name not in known]:
                raise TableError(f"--costs has a cost for {some(unknown)}, which the table does not have")
            if not (least := min(costs[places].sum() for _, places in units)) <= self.budget:
                raise TableError(f"--budget must be ≥ {least:g}, the cost of the cheapest feature; got {self.budget:g}")
            how |= {"costs": costs, "budget": self.budget}
            k = None  # type: ignore[assignment]
        elif self.costs is not None:
            raise TableError("--costs needs --budget")
        elif k != "auto" and not 1 <= int(k) <= len(units):
            raise TableError(f"-k must satisfy 1 ≤ k ≤ {len(units)} (number of features); got {k}")
        if self.max_k is not None and k != "auto":
            raise TableError("--max-k needs -k auto")
        if k == "auto":
            how["max_features"] = self.max_k
        strategy = Portfolio(n_jobs=self.n_jobs)
        return KHotSelector(k, task=task, strategy=strategy, random_state=seed, **how)
