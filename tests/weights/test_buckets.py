import pickle
import weakref

import numpy as np
import pytest
import torch

from rolemesh.errors import StaleWeights
from rolemesh.weights import Buffer, Outlet, WeightManifest, pack, plan_buckets, unpack


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


def packed(
    weights: dict[str, torch.Tensor], version: int = 5, limit: int = 2**20, full: bool = True
) -> tuple[WeightManifest, list[Buffer]]:
    """All buckets of these weights, each in memory that held something else before."""
    manifest = WeightManifest(version=version, buckets=plan_buckets(weights.items(), limit), full=full, nonce=3)
    source = iter(weights.items())
    memories = [np.full(manifest.largest + 100, 255, dtype=np.uint8) for _ in manifest.buckets]
    return manifest, [pack(manifest, number, source, memory) for number, memory in enumerate(memories)]


@pytest.mark.parametrize("limit", [2**20, 400, 256, 1])
def test_round_trip_keeps_every_bit_dtype_and_shape(limit: int):
    weights = some_weights()
    manifest, buffers = packed(weights, 3, limit)
    manifest = pickle.loads(pickle.dumps(manifest))
    found = {name: view for number, buffer in enumerate(buffers) for name, view in unpack(manifest, number, buffer)}
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_tensors_lie_at_multiples_of_64_bytes():
    # Header 64. embed: 7 * 5 * 4 = 140 bytes -> 192. norm: 5 * 2 = 10 -> 64. scale 4 -> 64. counts: 6 * 8 = 48 -> 64.
    # mask 3 -> 64. empty 0 -> 0. Sum: 64 + 192 + 64 + 64 + 64 + 64 = 512.
    (bucket,) = plan_buckets(some_weights().items(), 512)
    assert bucket.offsets == (64, 256, 320, 384, 448, 512)
    assert bucket.nbytes == 512


def test_buckets_are_filled_to_the_limit_and_a_larger_weight_has_one_of_its_own():
    # With 511 bytes `mask` has no room; with 256 embed fills one; with 255 it is larger than a bucket may be, and the next take 64 each.
    def names(limit: int) -> list[tuple[str, ...]]:
        return [bucket.names for bucket in plan_buckets(some_weights().items(), limit)]

    assert names(511) == [("embed", "norm", "scale", "counts"), ("mask", "empty")]
    assert names(256) == [("embed",), ("norm", "scale", "counts"), ("mask", "empty")]
    assert names(200) == [("embed",), ("norm", "scale"), ("counts", "mask", "empty")]
    assert names(1) == [("embed",), ("norm",), ("scale",), ("counts",), ("mask",), ("empty",)]
    assert [bucket.nbytes for bucket in plan_buckets(some_weights().items(), 200)] == [256, 192, 192]
    assert [bucket.nbytes for bucket in plan_buckets([], 200)] == [64]


def test_tensors_are_taken_one_by_one_and_only_those_of_the_bucket():
    weights, alive = some_weights(), []

    def one_by_one():
        for name, tensor in weights.items():
            copy = tensor.clone()
            alive.append(weakref.ref(copy))
            yield name, copy
            del copy
            assert sum(reference() is not None for reference in alive) <= 1  # the bucket takes the bytes, nobody the tensor

    manifest, expected = packed(weights, limit=200)
    source = one_by_one()
    for number, bucket in enumerate(expected):
        assert np.array_equal(pack(manifest, number, source, np.empty(256, dtype=np.uint8)), bucket)
        assert len(alive) == sum(len(bucket.names) for bucket in manifest.buckets[: number + 1])
    with pytest.raises(ValueError, match="expected embed, found norm"):
        pack(manifest, 0, iter(list(weights.items())[1:]), np.empty(256, dtype=np.uint8))
    with pytest.raises(ValueError, match=r"embed must have the shape \[7, 5\] of the manifest, found \[5, 7\]"):
        pack(manifest, 0, iter([("embed", weights["embed"].t())]), np.empty(256, dtype=np.uint8))
    with pytest.raises(ValueError, match="expected norm, found nothing more"):
        pack(manifest, 1, iter([]), np.empty(256, dtype=np.uint8))


def test_views_share_the_memory_of_the_bucket_even_if_it_is_read_only():
    manifest, (buffer,) = packed({"a": torch.zeros(4)})
    shared = buffer.view()
    shared.flags.writeable = False
    [(_, view)] = unpack(manifest, 0, shared)
    buffer[64:68] = np.frombuffer(np.float32(2.0).tobytes(), dtype=np.uint8)
    assert view.tolist() == [2.0, 0.0, 0.0, 0.0]


def test_source_may_be_transposed_and_may_need_a_gradient():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    manifest, (buffer,) = packed({"w": weight.t()})
    [(_, view)] = unpack(manifest, 0, buffer)
    assert not view.requires_grad
    assert torch.equal(view, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))


def test_truncated_bucket_is_refused():
    manifest, (buffer,) = packed(some_weights())
    with pytest.raises(ValueError, match=r"bucket 1 of 1 of weight version 5 must have 512 bytes, found 511"):
        unpack(manifest, 0, buffer[:-1])


@pytest.mark.parametrize("at", [0, 8, 16, 24, 32, 39, 40, 47, 64, 200, 256 + 30, 511])
def test_any_flipped_byte_of_header_weights_and_padding_is_refused(at: int):
    manifest, (buffer,) = packed(some_weights())
    buffer[at] ^= 1
    with pytest.raises((ValueError, StaleWeights)):
        unpack(manifest, 0, buffer)


def test_a_sampled_checksum_shows_each_page_that_was_not_written():
    """4 KiB are 1024 float32; of 8 pages behind the header each has one word in the sum."""
    manifest, (buffer,) = packed({"w": torch.arange(1.0, 8 * 1024 + 1)}, full=False)
    assert buffer.nbytes == 64 + 8 * 4096
    for page in range(8):
        damaged = buffer.copy()
        damaged[64 + page * 4096 : 64 + (page + 1) * 4096] = 0
        with pytest.raises(ValueError, match="does not have the checksum"):
            unpack(manifest, 0, damaged)
        damaged = buffer.copy()
        damaged[64 + page * 4096 + 8] ^= 1
        unpack(manifest, 0, damaged)
    _, (full,) = packed({"w": torch.arange(1.0, 8 * 1024 + 1)})
    with pytest.raises(ValueError, match="does not have the checksum"):
        unpack(manifest, 0, full)
    values = torch.arange(1.0, 8 * 1024 + 1).numpy().view(np.int64)
    assert buffer[32:40].view(np.int64)[0] == values[::512].sum()
    assert full[32:40].view(np.int64)[0] == values.sum()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_a_cast_in_the_sender_is_the_cast_of_the_receiver_to_the_last_bit(name: str):
    """Also of what has no exact counterpart: ties, numbers too large or too small, infinities, NaN. Whole numbers stay as they are."""
    dtype = getattr(torch, name)
    odd = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, 1e-40, 65520.0, 2.0**-25, torch.inf, -torch.inf, torch.nan]
    weights = {
        "odd": torch.tensor(odd),
        "some": torch.randn(300, 70, generator=torch.Generator().manual_seed(0)),
        "counts": torch.arange(9),
    }
    outlet = Outlet(bucket_bytes=2**20, path="", leads=True)
    manifest = outlet.begin(3, weights.items(), iter(weights.items()), shared=False, dtype=dtype)
    assert manifest.buckets[0].dtypes == (name, name, "int64")
    for key, view in unpack(manifest, 0, outlet.pack(3, 0)):
        expected = weights[key].to(dtype) if key != "counts" else weights[key]
        received = torch.empty_like(expected).copy_(weights[key])
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (view, expected, received)]
        assert torch.equal(bits[0], bits[1])
        assert torch.equal(bits[0], bits[2])


def test_half_written_bucket_is_refused():
    """The writer died after the first of two tensors: the memory holds what it had before, or zeros, but no header of any version."""
    manifest, (memory,) = packed({"a": torch.ones(4), "b": torch.ones(4)})
    with pytest.raises(ValueError, match="expected b"):
        pack(manifest, 0, iter([("a", torch.zeros(4))]), memory)
    with pytest.raises(ValueError, match="no valid header: it is half-written"):
        unpack(manifest, 0, memory)
    with pytest.raises(ValueError, match="no valid header"):
        unpack(manifest, 0, np.zeros_like(memory))


def test_F01_bucket_of_another_version_or_number_is_refused():
    manifest, buffers = packed(some_weights(), 5, limit=1)
    _, older = packed(some_weights(), 4, limit=1)
    with pytest.raises(StaleWeights) as caught:
        unpack(manifest, 0, older[0])
    assert (caught.value.fields["holds"], caught.value.fields["asked"]) == (4, 5)
    with pytest.raises(ValueError, match="bucket 3 of 6 of weight version 5 must come next, found bucket 2: one is missing or came twice"):
        unpack(manifest, 2, buffers[1])


def test_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="found twice: a"):
        plan_buckets([("a", torch.ones(1)), ("a", torch.zeros(1))], 100)


def test_bytes_of_equal_weights_are_equal():
    first, buffers = packed(some_weights(), 2, limit=200)
    again, others = packed(some_weights(), 2, limit=200)
    assert first == again
    assert all(np.array_equal(one, other) for one, other in zip(buffers, others, strict=True))
