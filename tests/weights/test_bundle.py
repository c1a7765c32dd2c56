import pickle
import weakref

import numpy as np
import pytest
import torch

from rolemesh.errors import StaleWeights
from rolemesh.weights import pack, unpack


def some_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(7, 5, generator=generator),
        "norm": torch.randn(5, generator=generator).to(torch.bfloat16),
        "scale": torch.tensor(3.5),
        "counts": torch.arange(6).reshape(2, 3),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }


def test_round_trip_keeps_every_bit_dtype_and_shape():
    weights = some_weights()
    manifest, buffer = pack(weights.items(), 3)
    manifest = pickle.loads(pickle.dumps(manifest))
    found = dict(unpack(manifest, buffer))
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_tensors_lie_at_multiples_of_64_bytes():
    # Header 64. embed: 7 * 5 * 4 = 140 bytes -> 192. norm: 5 * 2 = 10 -> 64. scale 4 -> 64. counts: 6 * 8 = 48 -> 64.
    # mask 3 -> 64. empty 0 -> 0. Sum: 64 + 192 + 64 + 64 + 64 + 64 = 512.
    manifest, buffer = pack(some_weights().items(), 0)
    assert manifest.offsets == (64, 256, 320, 384, 448, 512)
    assert manifest.nbytes == buffer.nbytes == 512


def test_tensors_are_taken_one_by_one_when_their_shapes_are_given_before():
    weights, alive = some_weights(), []

    def one_by_one():
        for name, tensor in weights.items():
            copy = tensor.clone()
            alive.append(weakref.ref(copy))
            yield name, copy
            del copy
            assert sum(reference() is not None for reference in alive) <= 1  # the buffer takes the bytes, nobody the tensor

    like = [(name, tensor.to("meta")) for name, tensor in weights.items()]
    manifest, buffer = pack(one_by_one(), 3, like=like)
    expected, same = pack(weights.items(), 3)
    assert manifest == expected
    assert np.array_equal(buffer, same)
    with pytest.raises(ValueError, match="expected embed, found norm"):
        pack(list(weights.items())[1:], 3, like=like)


def test_views_share_the_memory_of_the_buffer_even_if_it_is_read_only():
    manifest, buffer = pack([("a", torch.zeros(4))], 0)
    shared = buffer.view()
    shared.flags.writeable = False
    [(_, view)] = unpack(manifest, shared)
    buffer[manifest.offsets[0] : manifest.offsets[0] + 4] = np.frombuffer(np.float32(2.0).tobytes(), dtype=np.uint8)
    assert view.tolist() == [2.0, 0.0, 0.0, 0.0]


def test_source_may_be_transposed_and_may_need_a_gradient():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    manifest, buffer = pack([("w", weight.t())], 0)
    [(_, view)] = unpack(manifest, buffer)
    assert not view.requires_grad
    assert torch.equal(view, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))


def test_tied_weights_are_packed_once_and_found_under_both_names():
    shared = torch.randn(16, 4)  # 256 bytes
    manifest, buffer = pack([("embed", shared), ("norm", torch.ones(4)), ("head", shared)], 1)
    assert manifest.nbytes == 64 + 256 + 64
    found = dict(unpack(manifest, buffer))
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert torch.equal(found["head"], shared)


def test_equal_values_in_different_memory_are_not_tied():
    manifest, _ = pack([("a", torch.ones(16)), ("b", torch.ones(16))], 1)
    assert manifest.offsets == (64, 128)


def test_truncated_buffer_is_refused():
    manifest, buffer = pack(some_weights().items(), 5)
    with pytest.raises(ValueError, match=r"version 5 must have 512 bytes, found 511"):
        unpack(manifest, buffer[:-1])


@pytest.mark.parametrize("at", [0, 8, 64, 200, 511])
def test_any_flipped_byte_is_refused(at: int):
    manifest, buffer = pack(some_weights().items(), 5)
    buffer[at] ^= 1
    with pytest.raises((ValueError, StaleWeights)):
        unpack(manifest, buffer)


def test_buffer_that_was_never_written_is_refused_even_without_checksum():
    manifest, buffer = pack(some_weights().items(), 5, checksum=False)
    assert manifest.checksum is None
    with pytest.raises(ValueError, match="no valid header"):
        unpack(manifest, np.zeros_like(buffer))


def test_F01_buffer_of_another_version_is_refused_even_without_checksum():
    manifest, _ = pack(some_weights().items(), 5, checksum=False)
    _, older = pack(some_weights().items(), 4, checksum=False)
    with pytest.raises(StaleWeights) as caught:
        unpack(manifest, older)
    assert caught.value.fields["holds"] == 4
    assert caught.value.fields["asked"] == 5


def test_name_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"found twice: \['a'\]"):
        pack([("a", torch.ones(1)), ("a", torch.zeros(1))], 0)


def test_bytes_of_equal_weights_are_equal():
    first, buffer = pack(some_weights().items(), 2)
    again, other = pack(some_weights().items(), 2)
    assert first == again
    assert np.array_equal(buffer, other)
