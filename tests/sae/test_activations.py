"""Reading activations from files."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from sae_runs import D, matrix
from safetensors.torch import save_file

from khot.sae import Activations, Pairs, _activations, check_activations, open_activations

pytestmark = pytest.mark.slow


def test_every_form(tmp_path):
    x = matrix()
    np.save(tmp_path / "c.npy", x)
    np.save(tmp_path / "f.npy", np.asfortranarray(x))
    np.save(tmp_path / "half.npy", x.astype(np.float16))
    np.save(tmp_path / "big.npy", x.astype(">f8"))
    np.savez(tmp_path / "stored.npz", x=x)
    np.savez_compressed(tmp_path / "packed.npz", x=x)
    save_file({"x": torch.from_numpy(x)}, tmp_path / "x.safetensors")
    save_file({"x": torch.from_numpy(x).bfloat16()}, tmp_path / "bf16.safetensors")
    for path in tmp_path.iterdir():
        data = open_activations(path)
        assert (data.tokens, data.d) == x.shape, path
        expected = torch.from_numpy(x)
        if path.stem in ("half", "bf16"):
            expected = expected.to(torch.float16 if path.stem == "half" else torch.bfloat16).float()
        index = np.array([3, 77, 399])
        assert torch.equal(data.rows(index), expected[index]), path
        assert torch.equal(torch.cat([part for _, part in data.parts()]), expected), path


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    """A sparse file of 2 TB: only what is asked for is read."""
    path, tokens = tmp_path / "huge.safetensors", 2**37 // D
    header = json.dumps({"x": {"dtype": "F32", "shape": [tokens, D], "data_offsets": [0, 4 * tokens * D]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * tokens * D)
    data = open_activations(path)
    assert data.tokens == tokens
    assert torch.equal(data.rows(np.array([0, tokens - 1])), torch.zeros(2, D))


def test_several_arrays_are_told_apart(tmp_path):
    np.savez(tmp_path / "two.npz", a=matrix(0), b=matrix(1))
    with pytest.raises(ValueError, match=r"must have one array, or `array` must name one; got a, b"):
        open_activations(tmp_path / "two.npz")
    assert torch.equal(open_activations(tmp_path / "two.npz", "b").rows(slice(None)), torch.from_numpy(matrix(1)))
    with pytest.raises(ValueError, match=r"must have an array 'c'; got a, b"):
        open_activations(tmp_path / "two.npz", "c")


def test_where_nan_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(_activations, "ROWS", 64)
    x = matrix()
    x[[5, 70, 390], 3] = np.nan
    x[70, 4] = np.inf
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=r"4 NaN or infinite values in 3 rows: 5, 70, 390$"):
        check_activations(open_activations(tmp_path / "x.npy"))
    x[100:120] = np.nan
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=r"in 23 rows: 5, 70, 100, 101, 102, …$"):
        check_activations(open_activations(tmp_path / "x.npy"))


def test_values_beyond_float32_are_not_called_infinite(tmp_path):
    x = matrix().astype(np.float64)
    x[[5, 70], 3] = 1e39, -1e300
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=r"got 2 values that exceed float32's 3.4e38 in 2 rows: 5, 70$"):
        check_activations(open_activations(tmp_path / "x.npy"))
    x[70, 4] = np.nan
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=r"got 1 NaN or infinite values and 2 values that exceed"):
        check_activations(open_activations(tmp_path / "x.npy"))


def test_the_checksum_is_that_of_every_value_in_any_form(tmp_path, monkeypatch):
    x = matrix()
    np.save(tmp_path / "c.npy", x)
    np.save(tmp_path / "f.npy", np.asfortranarray(x))
    np.save(tmp_path / "big.npy", x.astype(">f8"))
    np.savez_compressed(tmp_path / "packed.npz", x=x)
    for path in tmp_path.iterdir():
        assert open_activations(path).crc == zlib.crc32(x.tobytes()), path
    monkeypatch.setattr(_activations, "ROWS", 64)
    assert check_activations(open_activations(tmp_path / "c.npy")) == zlib.crc32(x.tobytes())


def test_a_npy_file_has_no_names(tmp_path):
    np.save(tmp_path / "x.npy", matrix())
    with pytest.raises(ValueError, match=r"x.npy must be opened without the name of an array, .* got 'zz'"):
        open_activations(tmp_path / "x.npy", "zz")


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        '{"x": 3}',
        '{"x": {"dtype": "F32"}}',
        '{"x": {"dtype": "F32", "shape": [4, 4], "data_offsets": "xx"}}',
        '{"x": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0]}}',
        '{"x": {"dtype": "F32", "shape": [4, "b"], "data_offsets": [0, 64]}}',
        '{"x": {"dtype": "F32", "shape": [4, 4], "data_offsets": [-8, 56]}}',
        '{"x": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 32]}}',
    ],
)
def test_a_safetensors_header_that_does_not_fit_is_no_array(header, tmp_path):
    """Offsets below 0 mapped the header as numbers, and a shape too large those of the next array, in silence."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(128))
    with pytest.raises(ValueError, match=r"x\.safetensors must "):
        open_activations(path)


def test_targets_that_do_not_vary_are_refused(tmp_path):
    """`khot sae` trained on them, and ended with a TypeError in the report."""
    x, y = matrix(), np.ones((len(matrix()), 3), np.float32)
    for inputs, targets, what in ((x, y, "targets"), (y, x, "activations")):
        with pytest.raises(ValueError, match=f"{what} must have at least two different rows"):
            check_activations(Pairs(Activations(inputs), Activations(targets)))
