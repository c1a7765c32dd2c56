"""S19: a controller is killed with -9, and another one goes on with the same processes. One cluster and one run for the whole module."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from detached_program import open_backend, open_pool, run_of

import rolemesh
from rolemesh.errors import ConfigError, StaleCall
from rolemesh.observe import Journal
from rolemesh.runtime import Backend, KvStore, LocalBackend, Pool, WorkerGroup, create_backend

pytestmark = pytest.mark.ray
HERE = Path(__file__).parent
SOURCE = Path(rolemesh.__file__).parents[1]


def killed_program(folder: Path, end: str) -> dict[str, Any]:
    """What the program found, which killed itself then."""
    command = [sys.executable, str(HERE / "detached_program.py"), str(folder), end]
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{HERE}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two controllers were killed one after the other; this process is the third."""
    folder = tmp_path_factory.mktemp(f"story{os.getpid()}-")
    first = killed_program(folder, "queued")
    second = killed_program(folder, "stuck")
    backend = open_backend(folder)
    yield {"first": first, "second": second, "backend": backend, "folder": folder}
    backend.stop()


def names() -> set[str]:
    return {row["name"] for row in ray.util.list_named_actors(all_namespaces=True)}


def gone(pids: list[int]) -> bool:
    """Ray reaps what was killed a moment later."""
    ends = time.monotonic() + 15
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < ends:
        time.sleep(0.05)
    return not any(map(psutil.pid_exists, pids))


def reservations() -> list[str]:
    return sorted(row["name"] for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED")


def test_S19_a_new_controller_has_the_same_processes_in_under_5_seconds(story: dict[str, Any]) -> None:
    first, second = story["first"], story["second"]
    assert (first["attached"], second["attached"]) == (False, True)
    assert second["pids"] == first["pids"]
    assert second["loads"] == [1, 1], "models that were loaded stay"
    assert second["sums"] == [1.5, 1.5], "the ranks have met again"
    assert (second["epoch"], second["generation"]) == (2, 2)
    assert second["seconds"] < 30, "under 5 s on a machine that does nothing else"


def test_calls_that_a_killed_controller_has_queued_do_not_run(story: dict[str, Any]) -> None:
    assert story["first"]["counts"] == [0, 0]
    assert story["second"]["counts"] == [1, 1], "of three calls the one that was under way"


def attached(story: dict[str, Any], then: Any = None, **options: Any) -> dict[str, Any]:
    """Take over (or start) as the next controller, do something, let go of everything again. Returns what was found."""
    backend: Backend = story["backend"]

    async def main() -> dict[str, Any]:
        with Journal(story["folder"] / "journal") as journal:
            pool, counters, _, found = await open_pool(backend, journal, **options)
            if then is not None:
                found |= await then(pool, counters)
            pool.detach()
            return found

    return backend.run(main())


@pytest.mark.slow
def test_a_process_whose_call_does_not_end_is_replaced_alone(story: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 sleeps for ever. Rank 0, which waited for it in a collective, is freed and goes on."""
    monkeypatch.setattr("rolemesh.runtime.pool.TAKE_SECONDS", 2.0)
    before, found = story["second"]["pids"], attached(story)
    assert found["attached"]
    assert found["pids"][0] == before[0]
    assert gone(before[1:])
    assert (found["counts"], found["loads"]) == ([1, 0], [1, 1])
    assert found["sums"] == [1.5, 1.5], "the worker that was cut in its collective was made anew"
    assert found["generation"] == 3


@pytest.mark.slow
def test_processes_that_died_or_stopped_meanwhile_are_replaced(story: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolemesh.runtime.ray.backend.ANSWER_SECONDS", 1.0)
    before = attached(story)["pids"]
    os.kill(before[0], signal.SIGKILL)
    os.kill(before[1], signal.SIGSTOP)
    found = attached(story)
    assert found["attached"]
    assert not set(found["pids"]) & set(before)
    assert gone(before)
    assert found["sums"] == [1.5, 1.5]


def test_workers_of_other_settings_are_made_anew_in_the_same_processes(story: dict[str, Any]) -> None:
    async def count(pool: Pool, counters: WorkerGroup) -> dict[str, Any]:
        return {"counted": await counters.count_up()}

    before = attached(story, count)
    same = attached(story)
    assert (same["pids"], same["counts"]) == (before["pids"], before["counted"])
    other = attached(story, bonus=5)
    assert (other["pids"], other["counts"], other["loads"]) == (before["pids"], [0, 0], [1, 1])


def test_a_controller_of_an_older_epoch_is_refused_and_leaves_everything_alone(story: dict[str, Any]) -> None:
    backend: Backend = story["backend"]
    before = attached(story)

    async def late() -> None:
        pool = await Pool.of_slots(backend, "main", [2], cpus=0.5)
        with pytest.raises(StaleCall, match=r"process run-story\S+/main-\d\.\d refused a call of \(epoch, generation\) \(1, 0\)"):
            await pool.attach(60, epoch=1)
        await pool.close()

    backend.run(late())
    assert attached(story)["pids"] == before["pids"]


def test_the_store_goes_on_and_knows_what_it_was_told(story: dict[str, Any]) -> None:
    async def main() -> None:
        store = await KvStore.start(story["backend"], run_of(story["folder"]))
        assert await store.get("step", deadline=5) == 7
        await store.link.restart(deadline=30)
        await store.put("step", 8)
        assert await store.get("step", deadline=5) == 8

    story["backend"].run(main())


def test_a_pool_of_another_shape_is_given_back_first(story: dict[str, Any]) -> None:
    before = attached(story)
    found = attached(story, slots=3)
    assert not found["attached"]
    assert gone(before["pids"])
    assert reservations() == [f"{run_of(story['folder'])}/main@0"]


def test_a_controller_that_ends_in_order_leaves_nothing(story: dict[str, Any]) -> None:
    backend: Backend = story["backend"]

    async def main() -> list[int]:
        with Journal(story["folder"] / "journal") as journal:
            pool, _, _, found = await open_pool(backend, journal, slots=3)
            assert found["attached"]
            await pool.close()
            await backend.close()
            return found["pids"]

    pids = backend.run(main())
    ends = time.monotonic() + 10
    while (names() or reservations()) and time.monotonic() < ends:
        time.sleep(0.05)
    assert (names(), reservations()) == (set(), [])
    assert gone(pids)


async def test_where_processes_end_with_their_controller_nothing_is_attached_or_detached() -> None:
    pool = await Pool.of_slots(LocalBackend(), "none", [1], cpus=0.1)
    assert not await pool.attach(10, epoch=1)
    for backend in (LocalBackend(), create_backend("ray")):
        with pytest.raises(ConfigError, match=r"pool none: needs a backend whose processes outlive it; found \w+\. Use create_backend"):
            Pool(backend, "none", pool.bundles, pool.nodes).detach()
