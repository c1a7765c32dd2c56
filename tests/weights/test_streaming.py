"""A publication within one process: an outlet, what it has packed, intakes and real engines."""

import threading
import time

import pytest
import torch

from rolemesh.config.schema import ModelConfig
from rolemesh.engines.rollout import create_engine
from rolemesh.errors import DeadlineExceeded, StaleWeights
from rolemesh.models import load_model
from rolemesh.protocols.engine import RolloutEngine
from rolemesh.weights import Intake, Outlet, WeightManifest, Weights, plan_buckets

KIB = 1024


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return load_model(ModelConfig(), seed=0)


@pytest.fixture
def engine() -> RolloutEngine:
    return create_engine("fake", load_model(ModelConfig(), seed=1), slots=2, max_prompt_tokens=4, max_response_tokens=4)


def into(engine: RolloutEngine, manifest: WeightManifest, deadline: float = 30.0) -> Intake:
    def load(weights: Weights) -> int:
        engine.load_weights(weights, manifest.version)
        return engine.weight_version

    return Intake(manifest, load, waiter="rollout rank 0", deadline=deadline)


def test_publications_of_several_buckets_are_bit_equal(model: torch.nn.Module, engine: RolloutEngine):
    outlet = Outlet(bucket_bytes=600 * KIB, path="", leads=True)
    for version in range(3):
        weights = {name: weight.detach() + version for name, weight in model.named_parameters()}
        manifest = outlet.begin(version, weights.items(), iter(weights.items()), shared=False)
        assert len(manifest.buckets) > 5
        intake = into(engine, manifest)
        for number in range(len(manifest.buckets)):
            assert engine.weight_version == -1
            held = intake.take(number, outlet.pack(version, number))
        assert held == engine.weight_version == version
        for name, parameter in engine._parameters._parameters.items():
            assert torch.equal(parameter, weights[name]), name


def test_a_rank_that_does_not_lead_gives_its_parts_in_step(model: torch.nn.Module):
    outlet = Outlet(bucket_bytes=600 * KIB, path="/nowhere", leads=False)
    weights = list(model.named_parameters())
    source = iter(weights)
    manifest = outlet.begin(0, weights, source, shared=True)
    for number, bucket in enumerate(manifest.buckets[:-1]):
        assert outlet.pack(0, number) is None
        assert bucket.names[-1] != weights[-1][0]
    assert [name for name, _ in source] == list(manifest.buckets[-1].names)
    with pytest.raises(ValueError, match="bucket 1 of weight version 1 was asked for, but version 0 is being published"):
        outlet.pack(1, 0)
    outlet.begin(2, weights[:-1], iter(weights), shared=True)
    with pytest.raises(ValueError, match=f"more weights than the manifest of version 2 says, first {weights[-1][0]}"):
        [outlet.pack(2, number) for number in range(len(manifest.buckets))]


def test_F01_missing_doubled_stale_and_half_written_buckets_leave_the_engine_refusing(model: torch.nn.Module, engine: RolloutEngine):
    outlet = Outlet(bucket_bytes=600 * KIB, path="", leads=True, full=True)
    weights = dict(model.named_parameters())

    def begin(version: int) -> WeightManifest:
        return outlet.begin(version, weights.items(), iter(weights.items()), shared=False)

    def whole(version: int) -> None:
        manifest = begin(version)
        intake = into(engine, manifest)
        for number in range(len(manifest.buckets)):
            intake.take(number, outlet.pack(version, number))
        assert engine.weight_version == version

    for version, damage, error, message in (
        (1, "missing", ValueError, "bucket 3 of weight version 1 came where 2 was next"),
        (3, "doubled", ValueError, "bucket 1 of weight version 3 came where 2 was next"),
        (5, "other", ValueError, "must come next, found bucket 1"),
        (7, "stale", StaleWeights, "holds weight version 6, asked for 7"),
        (9, "half-written", ValueError, "does not have the checksum"),
    ):
        whole(version - 1)
        manifest = begin(version)
        intake = into(engine, manifest)
        first = outlet.pack(version, 0)
        assert intake.take(0, first) is None
        second = outlet.pack(version, 1)
        number, bucket = 1, second
        if damage == "missing":
            number, bucket = 2, outlet.pack(version, 2)
        elif damage == "doubled":
            number, bucket = 0, first
        elif damage == "other":
            bucket = first
        elif damage == "stale":
            other = Outlet(bucket_bytes=600 * KIB, path="", leads=True)
            other.begin(version - 1, weights.items(), iter(weights.items()), shared=False)
            bucket = [other.pack(version - 1, number) for number in (0, 1)][1]
        else:
            second[second.nbytes // 2 :] = 0
        with pytest.raises(error, match=message):
            intake.take(number, bucket)
        assert engine.weight_version == -1, damage
        with pytest.raises(error, match=message):
            intake.take(1, second)  # nor does it go on with the right one
        assert engine.weight_version == -1, damage
    whole(10)


def test_a_publisher_that_stops_or_gives_up_leaves_the_engine_refusing(model: torch.nn.Module, engine: RolloutEngine):
    outlet = Outlet(bucket_bytes=600 * KIB, path="", leads=True)
    weights = dict(model.named_parameters())
    manifest = outlet.begin(4, weights.items(), iter(weights.items()), shared=False)
    intake = into(engine, manifest, deadline=0.2)
    intake.take(0, outlet.pack(4, 0))
    ends = time.monotonic() + 10
    while any(thread.name == "rolemesh-weights" for thread in threading.enumerate()):
        assert time.monotonic() < ends, "the thread ends with its deadline"
        time.sleep(0.02)
    late = rf"rollout rank 0 waited 0.2 s for bucket 2 of {len(manifest.buckets)} of weight version 4 from the actor"
    with pytest.raises(DeadlineExceeded, match=late):
        intake.take(1, outlet.pack(4, 1))
    assert engine.weight_version == -1
    manifest = outlet.begin(5, weights.items(), iter(weights.items()), shared=False)
    intake = into(engine, manifest)
    intake.take(0, outlet.pack(5, 0))
    intake.close()
    with pytest.raises(ConnectionAbortedError, match="weight version 5 was given up half-way"):
        intake.take(1, outlet.pack(5, 1))
    assert engine.weight_version == -1


def test_what_an_engine_refuses_at_once_or_too_slowly_is_raised_to_who_hands_over(engine: RolloutEngine):
    forms = [("unknown", torch.ones(2))]
    outlet = Outlet(bucket_bytes=KIB, path="", leads=True)
    manifest = outlet.begin(1, forms, iter(forms), shared=False)
    with pytest.raises(ValueError, match="the model has no parameter 'unknown'"):
        into(engine, manifest).take(0, outlet.pack(1, 0))
    with pytest.raises(ValueError, match="a weight version is at least 0"):
        into(engine, WeightManifest(version=-2, buckets=plan_buckets(forms, KIB)))

    def slow(weights: Weights) -> int:
        for _ in weights:
            time.sleep(0.5)
        return 1

    intake = Intake(manifest, slow, waiter="rollout rank 3", deadline=0.1)
    outlet.begin(1, forms, iter(forms), shared=False, nonce=manifest.nonce)
    with pytest.raises(DeadlineExceeded, match=r"rollout rank 3 waited 0.1 s for its engine to load bucket 1 of weight version 1"):
        intake.take(0, outlet.pack(1, 0))
    intake = Intake(manifest, lambda weights: 7, waiter="rollout rank 3", deadline=1)
    with pytest.raises(ValueError, match="the engine holds version 7 but did not wait for bucket 1 of version 1"):
        intake.take(0, outlet._own)
