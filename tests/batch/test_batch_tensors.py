"""Tensors of batch columns: layouts, types, private memory."""

from __future__ import annotations

import pytest
import torch

from rolemesh.batch import Batch, tensors
from rolemesh.errors import BatchError


def batch() -> Batch:
    return Batch.from_columns(
        {
            "draw": [0, 1, 2],
            "sample": [0, 0, 0],
            "response_ids": [[5, 6], [], [7]],
            "rollout_logprobs": [[-0.5, -1.5], [], [-2.0]],
            "reward": [1.0, None, 0.5],
            "response": ["a", "b", "c"],
            "extra/right": [True, False, True],
        }
    )


def test_padded():
    found = tensors(batch(), ["response_ids", "rollout_logprobs"], pad_value=-1)
    assert set(found) == {"response_ids", "response_ids/lengths", "rollout_logprobs", "rollout_logprobs/lengths"}
    assert found["response_ids"].equal(torch.tensor([[5, 6], [-1, -1], [7, -1]]))
    assert found["response_ids/lengths"].equal(torch.tensor([2, 0, 1]))
    assert found["rollout_logprobs"].equal(torch.tensor([[-0.5, -1.5], [-1.0, -1.0], [-2.0, -1.0]]))


def test_packed():
    found = tensors(batch(), ["response_ids", "rollout_logprobs"], layout="packed")
    assert found["response_ids"].equal(torch.tensor([5, 6, 7]))
    assert found["response_ids/offsets"].equal(torch.tensor([0, 2, 2, 3]))
    assert found["rollout_logprobs"].equal(torch.tensor([-0.5, -1.5, -2.0]))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_scalars_have_one_value_a_row_in_either_layout(layout):
    found = tensors(batch(), ["reward", "draw", "extra/right"], layout=layout)
    assert set(found) == {"reward", "draw", "extra/right"}
    assert found["reward"].nan_to_num(-9.0).equal(torch.tensor([1.0, -9.0, 0.5]))
    assert found["draw"].equal(torch.tensor([0, 1, 2]))
    assert found["extra/right"].equal(torch.tensor([True, False, True]))


def test_slices_give_their_own_rows():
    found = tensors(batch().slice(1, 2), ["response_ids"])
    assert found["response_ids"].equal(torch.tensor([[0], [7]]))
    assert found["response_ids/lengths"].equal(torch.tensor([0, 1]))


def test_no_rows_and_no_tokens():
    empty = tensors(batch().slice(0, 0), ["response_ids", "reward"])
    assert empty["response_ids"].shape == (0, 0)
    assert empty["response_ids"].dtype == torch.int64
    assert empty["reward"].shape == (0,)
    assert tensors(batch().slice(1, 1), ["response_ids"])["response_ids"].shape == (1, 0)
    assert tensors(batch().slice(0, 0), ["response_ids"], layout="packed")["response_ids/offsets"].equal(torch.tensor([0]))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_tensors_are_private_memory(layout):
    source = batch()
    for tensor in tensors(source, ["response_ids", "rollout_logprobs", "reward", "draw", "extra/right"], layout=layout).values():
        tensor.fill_(1)
    assert source.equals(batch())


def test_what_is_no_number_is_refused():
    with pytest.raises(BatchError, match="'response' is of kind string and cannot become a tensor"):
        tensors(batch(), ["response"])
    with pytest.raises(BatchError, match="no column 'advantage'"):
        tensors(batch(), ["advantage"])
    with pytest.raises(BatchError, match="layout must be one of padded, packed, got 'flat'"):
        tensors(batch(), ["draw"], layout="flat")
