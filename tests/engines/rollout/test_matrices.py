"""Matrices as products with them are fastest, on both sides of the size from which they are packed."""

from __future__ import annotations

import psutil
import pytest
import torch

from rolemesh.engines.rollout.matrices import _PACKED_FROM, make_matrix

SHAPES = [(256, 512), (256, 511), (864, 288), (288, 768), (363, 362), (4096, 33)]
"""Of weights [out, in]: at the threshold, just below it, those of a model of 15M parameters, odd ones."""


def weights(shape, bias):
    generator = torch.Generator().manual_seed(0)
    out, width = shape
    weight = torch.randn(shape, generator=generator) / width**0.5
    return weight, torch.randn(out, generator=generator) if bias else None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_products_are_those_of_float64_for_any_number_of_rows(shape, bias):
    weight, added = weights(shape, bias)
    matrix = make_matrix(weight.t().contiguous().t(), added)  # not contiguous
    for rows in (1, 3, 8, 9, 63, 64, 65, 130):
        x = torch.randn(rows, shape[1])
        expected = x.double() @ weight.double().t() + (added.double() if bias else 0)
        into, total = torch.empty(rows, shape[0]), torch.ones(rows, shape[0])
        matrix.into(into, x)
        matrix.add_to(total, x)
        for found in (matrix(x), into, total - 1):
            assert found.dtype == torch.float32
            assert (found - expected).abs().max() < 2e-5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_row_of_a_block_of_16_has_the_same_bits_in_any_place_and_company(shape, bias):
    """What deterministic mode rests on."""
    matrix = make_matrix(*weights(shape, bias))
    x = torch.randn(16, shape[1])
    alike = matrix(x)
    assert torch.equal(matrix(x.flip(0)), alike.flip(0))
    assert (matrix(x[3].repeat(16, 1)) == alike[3]).all()
    for neighbours in (0.0, 1e30, torch.nan):
        for place in (0, 7, 15):
            block = torch.full_like(x, neighbours)
            block[place] = x[3]
            assert torch.equal(matrix(block)[place], alike[3])


@torch.inference_mode()
def test_the_memory_of_a_process_does_not_grow_with_the_numbers_of_rows():
    """OneDNN keeps half a MB for each that it meets: 200 of them would be 100 MB."""
    out, width = 384, 376
    assert out * width >= _PACKED_FROM
    matrix, x = make_matrix(torch.randn(out, width), None), torch.randn(200, width)
    matrix(x)
    process = psutil.Process()
    before = process.memory_info().rss
    for rows in range(1, 201):
        matrix(x[:rows])
    assert process.memory_info().rss - before < 30 * 2**20
