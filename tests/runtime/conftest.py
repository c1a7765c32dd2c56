from collections.abc import Iterator
from pathlib import Path

import pytest

import rolemesh
from rolemesh.runtime import Backend, create_backend


@pytest.fixture(scope="module")
def ray_backend() -> Iterator[Backend]:
    path = [str(Path(__file__).parent), str(Path(rolemesh.__file__).parents[1])]
    backend = create_backend("ray", num_cpus=8, object_store_bytes=400_000_000, pythonpath=path)
    backend.start()
    yield backend
    backend.stop()


@pytest.fixture(params=["local", "simulated", pytest.param("ray", marks=pytest.mark.ray)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend, for the contract suite."""
    return request.getfixturevalue("ray_backend") if request.param == "ray" else create_backend(request.param)
