"""What every test may rely on: one thread a process, no network for models, no time limits on single generated examples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

# Before torch or numpy is imported anywhere: their thread pools are sized at import.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import _pytest.runner  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# pytest writes an environment variable for each phase of each test. Threads of Ray and gRPC that read the environment in that moment, in C,
# have crashed the process.
_pytest.runner._update_current_test_var = lambda item, when: None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the default tests of folders, by file: many of them only wait. None for tests that are named, which a debugger can
    stop in and whose output `-s` shows, and none for slow ones: they measure, or need the machine. `-n` decides otherwise."""
    folders = all(os.path.isdir(name) for name in config.args)
    return 2 if folders and config.option.markexpr == "not slow" else 0


settings.register_profile("rolemesh", deadline=None, print_blob=True)
settings.load_profile("rolemesh")


@pytest.fixture(scope="session")
def raylets() -> Iterator[Any]:
    """A Ray cluster of two nodes on this machine, with logical GPUs: `worker-2`, team red, H100; `worker-10`, team blue, whose devices have
    odd numbers, and four NPUs. `raylets.address` is where to join it. All tests share it, and leave nothing behind on it."""
    from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default, ensure_token_if_auth_enabled
    from ray.cluster_utils import Cluster

    # As `ray start` does; without it, programs that find a token of this user would join with it, and Ray's head could not talk to them.
    enable_token_auth_by_default()
    ensure_token_if_auth_enabled()
    common = {"num_cpus": 16, "num_gpus": 8, "object_store_memory": 200_000_000}
    red = {"node_name": "worker-2", "labels": {"team": "red"}, "resources": {"team": 2, "accelerator_type:H100": 1}}
    blue = {"node_name": "worker-10", "labels": {"team": "blue"}, "resources": {"NPU": 4}}
    odd = {"env_vars": {"CUDA_VISIBLE_DEVICES": "1,3,5,7,9,11,13,15"}}
    cluster = Cluster(initialize_head=True, head_node_args={**common, **red, "include_dashboard": False})
    try:
        cluster.add_node(**common, **blue, **odd)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
