"""The public names of `khot.estimators`, what rooms above may use, and nothing else."""

from types import ModuleType

import khot

DOCUMENTED = {
    *("straight_through_sample", "simple", "relaxed", "xie_ermon", "stochastic_times_smooth"),
    *("imle", "AdaptiveStep", "score_function", "rloo", "minimum_variance_baseline"),
    *("taylor_control_variate", "reinmax", "distinct_subsets", "over_samples", "rebar", "unordered_set"),
}
FRONT_DOOR = {"takes_objective"}  # what other rooms import from here; not in `__all__`


def test_nothing_leaks():
    module = khot.estimators
    public = {n for n in dir(module) if not n.startswith("_") and not isinstance(getattr(module, n), ModuleType)}
    assert public == DOCUMENTED == set(module.__all__)


def test_nothing_of_khot_is_reachable_by_another_name():
    """`dir` could hide a name of another room; this does not."""
    own = {
        name
        for name, value in vars(khot.estimators).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "khot").partition(".")[0] == "khot"
    }
    assert own == DOCUMENTED | FRONT_DOOR
