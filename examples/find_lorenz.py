"""Find Lorenz's equations in noisy data, with exactly k terms and with a threshold.

`python examples/find_lorenz.py` prints the equations that `khot.sindy.KHotOptimizer` and pysindy's STLSQ find, beside
the true ones. With matplotlib it also writes the phase portraits to lorenz.png. Needs pip install '.[sindy]'.
"""

import sys

import numpy as np
import pysindy
from scipy.integrate import solve_ivp

from khot.sindy import KHotOptimizer

NOISE = 0.03  # of the standard deviation of each state
START = (-8.0, 8.0, 27.0)
NAMES = ["x", "y", "z"]


def slope(_: float, state: np.ndarray) -> list[float]:
    """Return Lorenz's equations."""
    x, y, z = state
    return [-10 * x + 10 * y, 28 * x - y - x * z, -8 / 3 * z + x * y]


def find(optimizer: pysindy.BaseOptimizer, x: np.ndarray, t: np.ndarray) -> pysindy.SINDy:
    """Fit equations with polynomials up to degree 5: 56 terms for each."""
    model = pysindy.SINDy(
        optimizer=optimizer,
        feature_library=pysindy.PolynomialLibrary(degree=5),
        differentiation_method=pysindy.SmoothedFiniteDifference(),
    )
    return model.fit(x, t, feature_names=NAMES)


t = np.arange(0, 10, 0.004)
truth = solve_ivp(slope, (0, 10), START, t_eval=t, rtol=1e-9, atol=1e-9).y.T
data = truth + NOISE * truth.std(0) * np.random.default_rng(0).standard_normal(truth.shape)

print("true equations\n(x)' = -10 x + 10 y\n(y)' = 28 x + -1 y + -1 x z\n(z)' = -2.667 z + 1 x y")
found = find(KHotOptimizer("auto"), data, t)
print("\nKHotOptimizer, which chooses k itself")
found.print()
print("\nSTLSQ, with its default threshold 0.1")
find(pysindy.STLSQ(), data, t).print()

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError:
    sys.exit()
half = t[t < 5]
simulated = found.simulate(np.array(START), half, integrator_kws={"method": "LSODA", "rtol": 1e-6, "atol": 1e-6})
figure = Figure(figsize=(10, 4), layout="constrained")
for i, (title, x) in enumerate({"data": data[: len(half)], "found equations": simulated}.items()):
    axes = figure.add_subplot(1, 2, i + 1, title=title, xlabel="x", ylabel="z")
    axes.plot(x[:, 0], x[:, 2], linewidth=0.8)
figure.savefig("lorenz.png", dpi=120)
