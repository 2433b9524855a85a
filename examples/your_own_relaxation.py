"""Make a soft top-k of your own from a cdf, check that it keeps every law, and use it in a layer.

Any continuous function F that rises from 0 to 1 makes one: y = F((x − τ)/T), with τ such that Σ y = k.
This one is Student's t with two degrees of freedom. Its gradient falls off slowly: a score far from the threshold still
learns. It takes a few seconds.
"""

import torch
from torch import Tensor

import khot


def student(z: Tensor) -> Tensor:
    """Return the cdf. The second form is the same function without loss of digits where it is small."""
    root = (2 + z.square()).sqrt()
    return torch.where(z > 0, 0.5 + 0.5 * z / root, 1 / (root * (root - z).clamp(min=1)))


student_topk = khot.relaxation(student, symmetric=True)
khot.testing.check_relaxation(student_topk)  # raises AssertionError with a list of broken laws, if there are any
print("student_topk keeps every law")

try:
    khot.relaxation(torch.tanh)  # rises from −1 to 1: not a cdf
except ValueError as error:
    print("tanh is refused:", str(error).split(";")[0])


def not_a_relaxation(x: Tensor, k: float, **options: object) -> Tensor:
    """Return k times a softmax. It sums to k, but its entries can be larger than 1."""
    return k * x.softmax(-1)


try:
    khot.testing.check_relaxation(not_a_relaxation)
except AssertionError as error:
    print("k times softmax is refused:", str(error).splitlines()[1])

x = torch.tensor([12.0, 3.0, 2.0, 1.0, -8.0], requires_grad=True)
print("\nscores                     " + "".join(f"{score:8.0f}" for score in x.tolist()))
for name, relax in {"sigmoid_topk": khot.sigmoid_topk, "student_topk": student_topk}.items():
    y = relax(x, 2)
    (gradient,) = torch.autograd.grad(y[4], x)
    print(f"{name}, k = 2:       " + "".join(f"{value:8.4f}" for value in y.tolist()))
    print("  gradient of the last one " + "".join(f"{value:8.0e}" for value in gradient.tolist()))

gate = khot.nn.KHotGate(5, 2, relaxation=student_topk)  # wherever khot takes a relaxation
print("\nin a layer:", gate)
