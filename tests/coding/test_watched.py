"""Pursuits and updates under autocast, tracers and transforms: the same numbers, or an error."""

import pytest
import torch

from khot import coding

GENERATOR = torch.Generator().manual_seed(0)
SIGNALS = torch.randn(5, 16, generator=GENERATOR)
DICTIONARY = torch.nn.functional.normalize(torch.randn(24, 16, generator=GENERATOR))
CODE = coding.omp(SIGNALS, DICTIONARY, 4)
CALLS = {
    "omp": lambda: coding.omp(SIGNALS, DICTIONARY, 4).dense(),
    "omp, positive": lambda: coding.omp(SIGNALS, DICTIONARY, 4, positive=True).dense(),
    "thresholding_pursuit": lambda: coding.thresholding_pursuit(SIGNALS, DICTIONARY, 4).dense(),
    "soft_pursuit": lambda: coding.soft_pursuit(SIGNALS, DICTIONARY, 4, temperature=0.1).values,
    "splice": lambda: coding.splice(DICTIONARY, DICTIONARY[:, 0] - DICTIONARY[:, 3], 3).coef,
    **{
        name: (lambda update: lambda: update(SIGNALS, DICTIONARY, CODE)[0])(getattr(coding, name))
        for name in ("svd_update", "power_update", "least_squares_update", "gradient_update")
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_under_autocast(name):
    expected = CALLS[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = CALLS[name]()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_library_refuses_numbers_of_another_size():
    from khot.kernels import cpu

    if not cpu.serves(SIGNALS):
        pytest.skip("there is no native library")
    gram, counts = DICTIONARY @ DICTIONARY.mT, torch.full((5,), 4)
    with pytest.raises(TypeError, match=r"needs torch.float32 here; got torch.bfloat16"):
        cpu.orthogonal(SIGNALS, DICTIONARY, gram.bfloat16(), counts, 4, None)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
def test_a_tracer_is_refused():
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace would record the steps"):
        torch.jit.trace(lambda s: coding.omp(s, DICTIONARY, 3).dense(), SIGNALS, check_trace=False)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("positive", [False, True])
def test_a_compiled_pursuit_wrote_to_memory_of_others(positive):
    """torch.compile traced the call of the library: codes were wrong or empty, and the heap was overwritten."""

    def code(signals):
        return coding.omp(signals, DICTIONARY, 4, positive=positive).dense()

    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(code, backend="eager")(SIGNALS), code(SIGNALS))


@pytest.mark.parametrize("pursuit", [coding.omp, coding.thresholding_pursuit])
def test_forward_derivatives_are_not_zero(pursuit):
    x, atoms, tangent = SIGNALS.double(), DICTIONARY.double(), torch.randn(5, 16).double()

    def code(s):
        return pursuit(s, atoms, 3).dense()

    _, found = torch.func.jvp(code, (x,), (tangent,))
    step = 1e-6
    expected = (code(x + step * tangent) - code(x - step * tangent)) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert found.abs().max() > 0.01
