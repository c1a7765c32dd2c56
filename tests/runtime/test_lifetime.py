"""Whatever a run owns ends with it: processes with their children, the cluster, folders, shared memory (S19, B06, B07, B09, I01, I03, I06).

Drivers are real programs, ended in every way. What is left is looked for by the marks in /proc, and by the pids of those without marks.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import rolemesh
from rolemesh.cli.cleaning import clean
from rolemesh.errors import ConfigError, RolemeshError
from rolemesh.runtime.janitor import JanitorLink, is_watched
from rolemesh.runtime.janitor_process import Janitor, find, folder_of, key_of, kill, read_record, removed, socket_of

HERE = Path(__file__).parent
PROGRAM = str(HERE / "lifetime_program.py")
MEMBERS = ("pid", "child", "grandchild", "fork")
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{Path(rolemesh.__file__).parents[1]}:{HERE}"}


@pytest.fixture
def name() -> str:
    return f"lifetime-{uuid.uuid4().hex[:8]}"


def marked(run: str) -> list[int]:
    """Processes that have the mark of a run in their environment."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("ROLEMESH_RUN") == run and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if find(pid) is not None]


def wait_for_none(of: Callable[[], list[Any]], at_most: float) -> None:
    ends = time.monotonic() + at_most
    while (there := of()) and time.monotonic() < ends:
        time.sleep(0.05)
    assert there == [], f"after {at_most} s"


def left(run: str, told: dict[str, Any], *, shared_memory: bool = True) -> list[str]:
    """All that is left of a run, the janitor too. A cluster that is not the run's own may kill those that remove Python's shared memory."""
    members = [family[key] for family in told["families"] for key in MEMBERS]
    paths = [folder_of(run), *(f"/dev/shm/{family['memory']}" for family in told["families"] if shared_memory)]
    found = [*(f"process {pid}" for pid in {*marked(run), *alive(members)}), *filter(os.path.exists, paths)]
    return [*found, *(["janitor"] if is_watched(run) else [])]


@contextmanager
def program(name: str, *ends: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, PROGRAM, name, json.dumps(options), *ends]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    ) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def told_by(driver: subprocess.Popen[str]) -> dict[str, Any]:
    assert driver.stdout is not None
    line = driver.stdout.readline()
    assert line, driver.communicate()[1]
    return json.loads(line)


# -- with Ray -----------------------------------------------------------------------------------------------------------------


@pytest.mark.ray
def test_B09_B06_children_end_with_a_killed_worker_and_everything_with_a_killed_driver(name: str) -> None:
    with program(name, "wait") as driver:
        told, run = told_by(driver), f"{name}-0"
        first, second = told["families"]
        os.kill(first["pid"], signal.SIGKILL)
        wait_for_none(lambda: alive([first[member] for member in MEMBERS]), at_most=5)
        assert len(alive([second[member] for member in MEMBERS])) == 4
        assert any("agent" in " ".join(psutil.Process(pid).cmdline()).lower() for pid in marked(run)), "Ray's agents carry the mark"
        driver.kill()
        wait_for_none(lambda: left(run, told), at_most=15)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGTERM to the group", "SIGHUP"])
def test_B06_every_signal_frees_everything(name: str, how: str) -> None:
    with program(name, "wait") as driver:
        told, run = told_by(driver), f"{name}-0"
        number = signal.Signals[how.split()[0]]
        if "group" in how:
            os.killpg(driver.pid, number)
        else:
            driver.send_signal(number)
        _, errors = driver.communicate(timeout=60)
        if how != "SIGHUP":  # which ends a Python program on the spot
            assert "KeyboardInterrupt" in errors
            assert left(run, told) == [], "before the driver ends"
        wait_for_none(lambda: left(run, told), at_most=15)


@pytest.mark.ray
@pytest.mark.slow
def test_B07_after_an_exception_that_the_script_catches_a_second_run_in_the_same_process_works(name: str) -> None:
    with program(name, "raise", "return") as driver:
        first = told_by(driver)
        second = told_by(driver)
        assert left(f"{name}-0", first) == [], "freed before the second run started"
        _, errors = driver.communicate(timeout=60)
        assert driver.returncode == 0, errors
        assert left(f"{name}-1", second) == []


@pytest.mark.ray
@pytest.mark.slow
def test_I03_I06_three_start_in_the_same_second(name: str) -> None:
    with program(f"{name}-a", "wait") as a, program(f"{name}-b", "wait") as b, program(f"{name}-c", "wait") as c:
        told = [told_by(driver) for driver in (a, b, c)]
        assert len({each["address"] for each in told}) == 3
        for driver in (a, b, c):
            driver.kill()
        for letter, each in zip("abc", told, strict=True):
            wait_for_none(lambda run=f"{name}-{letter}-0", each=each: left(run, each), at_most=15)


def in_cluster(address: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """What `rolemesh clean` says of a cluster, by run."""
    command = [sys.executable, "-m", "rolemesh.cli", "clean", *arguments, "--address", address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    return {entry["run"]: entry for entry in json.loads(done.stdout)["left"]}


@pytest.mark.ray
@pytest.mark.slow
def test_B10_I01_in_a_joined_cluster_nothing_of_a_killed_run_is_left_and_the_other_goes_on(name: str, raylets: Any) -> None:
    with program(f"{name}-a", "wait", address=raylets.address) as a, program(f"{name}-b", "wait", address=raylets.address) as b:
        told = [told_by(driver) for driver in (a, b)]
        there = in_cluster(raylets.address, "--dry-run")
        assert [len(there[f"{name}-{letter}-0"]["actors"]) for letter in "ab"] == [2, 2]
        assert [len(there[f"{name}-{letter}-0"]["placement_groups"]) for letter in "ab"] == [1, 1]
        a.kill()
        wait_for_none(lambda: left(f"{name}-a-0", told[0], shared_memory=False), at_most=15)
        assert in_cluster(raylets.address, "--dry-run").keys() & {f"{name}-a-0", f"{name}-b-0"} == {f"{name}-b-0"}
        assert len(alive([family["pid"] for family in told[1]["families"]])) == 2


@pytest.mark.ray
@pytest.mark.slow
def test_S19_a_detached_run_is_freed_in_its_cluster_when_its_time_is_over_or_by_its_name(name: str, raylets: Any) -> None:
    for time_to_live in (3, 600):
        with program(f"{name}-{time_to_live}", "wait", address=raylets.address, detached=True, time_to_live=time_to_live) as driver:
            told, run = told_by(driver), f"{name}-{time_to_live}-0"
            driver.kill()
            time.sleep(1.5)
            assert len(alive([family["pid"] for family in told["families"]])) == 2, "detached"
            if time_to_live == 600:
                assert in_cluster(raylets.address)[run]["state"] == "waiting"
                assert in_cluster(raylets.address, run)[run]["freed"]
            wait_for_none(lambda run=run, told=told: left(run, told, shared_memory=False), at_most=60)
            assert run not in in_cluster(raylets.address, "--dry-run")


ELSEWHERE = """
import ray, sys
address, run = sys.argv[1:]
ray.init(address, namespace="rolemesh", runtime_env={"env_vars": {"ROLEMESH_RUN": run}}, logging_level="ERROR")
print("in", flush=True)
sys.stdin.read(1)
"""
"""A driver as the cluster sees one from another machine: it does not know the janitor of this one."""


@pytest.mark.ray
@pytest.mark.slow
def test_S19_a_run_that_goes_on_with_a_driver_on_another_machine_outlives_its_time_here(name: str, raylets: Any) -> None:
    run = f"{name}-0"
    with program(name, "wait", address=raylets.address, detached=True, time_to_live=1) as driver:
        told = told_by(driver)
        command = [sys.executable, "-c", ELSEWHERE, raylets.address, run]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "in\n"
            driver.kill()
            wait_for_none(lambda: [path for path in [folder_of(run)] if os.path.exists(path)], at_most=60)
            assert len(alive([family["pid"] for family in told["families"]])) == 2
            assert in_cluster(raylets.address)[run]["state"] == "driven"
            with pytest.raises(ConfigError, match=f"{run} must have no driver; found one on another machine"):
                clean(run, Path("runs"), raylets.address, dry_run=False, force=False, as_json=True)
            ray.shutdown()  # which `clean` leaves to the end of its process
            other.communicate("x", timeout=60)
        # Nobody tells the janitor here that it is gone: the run itself sees that it has no driver.
        wait_for_none(lambda: marked(run) + alive([family["pid"] for family in told["families"]]), at_most=60)
        assert run not in in_cluster(raylets.address, "--dry-run")


# -- the janitor alone --------------------------------------------------------------------------------------------------------

DRIVER = """
import os, subprocess, sys
from rolemesh.runtime.janitor import JanitorLink
run, ttl = sys.argv[1], float(sys.argv[2])
link = JanitorLink(run, "drive", own=True, address="", ttl=ttl)
for folder in sys.argv[3:]:
    link.entrust(folder)
child = subprocess.Popen(["bash", "-c", "env -i setsid sleep 1000 & echo $!; wait"], env=os.environ | {"ROLEMESH_RUN": run},
                         start_new_session=True, stdout=subprocess.PIPE)
print(child.pid, int(child.stdout.readline()), flush=True)
sys.stdin.read(1)
link.bye()
"""


class Driver:
    """Drives a run that consists of one process and its child."""

    def __init__(self, run: str, time_to_live: float = 0, folders: Sequence[Path] = ()) -> None:
        command = [sys.executable, "-c", DRIVER, run, str(time_to_live), *map(str, folders)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        assert self.process.stdout is not None
        self.owned = [int(pid) for pid in self.process.stdout.readline().split()]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


Drive = Callable[..., Driver]


@pytest.fixture
def drive() -> Iterator[Drive]:
    drivers: list[Driver] = []

    def start(*arguments: Any, **options: Any) -> Driver:
        drivers.append(Driver(*arguments, **options))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()


def janitors(run: str) -> list[int]:
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[-1:] == [run] and "-I" in process.cmdline():
                pids.append(process.pid)
    return pids


def cleaned(capsys: pytest.CaptureFixture[str], run: str | None, **options: Any) -> dict[str, dict[str, Any]]:
    """What `rolemesh clean --json` says, by run."""
    clean(run, Path("runs"), None, **{"dry_run": False, "force": False, **options}, as_json=True)
    return {entry["run"]: entry for entry in json.loads(capsys.readouterr().out)["left"]}


def test_a_good_bye_returns_when_nothing_is_left(name: str, drive: Drive) -> None:
    driver = drive(name)
    assert len(alive(driver.owned)) == 2
    driver.process.communicate("x", timeout=30)
    assert alive(driver.owned) == []
    assert not os.path.exists(folder_of(name))
    wait_for_none(lambda: janitors(name), at_most=5)


def test_the_janitor_ignores_the_signals_of_a_terminal_and_outlives_its_driver(name: str, drive: Drive) -> None:
    driver = drive(name)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(*janitors(name), number)
    driver.kill()
    wait_for_none(lambda: alive(driver.owned) + janitors(name), at_most=10)


def test_a_good_bye_frees_everything_without_a_janitor_too(name: str, drive: Drive) -> None:
    driver = drive(name)
    os.kill(*janitors(name), signal.SIGKILL)
    driver.process.communicate("x", timeout=30)
    assert alive(driver.owned) == []
    assert not os.path.exists(folder_of(name))


def test_a_full_disk_refuses_a_driver_and_does_not_keep_a_run_from_ending(name: str, drive: Drive) -> None:
    driver = drive(name)
    Path(folder_of(name), "run.json.new").mkdir()  # no file can be written there
    driver.kill()
    wait_for_none(lambda: alive(driver.owned) + janitors(name), at_most=10)
    Path(folder_of(name), "run.json.new").mkdir(parents=True)
    with pytest.raises(RolemeshError, match=r"cannot keep its record in /tmp/rolemesh-.*IsADirectoryError"):
        JanitorLink(name, "drive", own=False, address="", ttl=1)  # without a record it leaves alone what is there
    Path(folder_of(name), "run.json.new").rmdir()
    Path(folder_of(name)).rmdir()


def test_a_client_that_ends_while_the_janitor_is_busy_is_told_of_twice(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as connection:
        listener.bind(socket_of(name))
        listener.listen()
        connection.connect(socket_of(name))
        janitor = Janitor(name, listener)
        janitor._greet()
        (client,) = janitor._clients
        janitor._lose(client)
        janitor._hear(client)
        assert janitor._clients == []


def test_S19_what_is_detached_waits_for_a_driver_and_then_ends(name: str, drive: Drive) -> None:
    first = drive(name, time_to_live=60)
    first.kill()
    second = drive(name, time_to_live=1.0)
    assert len(alive(first.owned + second.owned)) == 4, "the new driver was in time"
    second.kill()
    wait_for_none(lambda: alive(first.owned + second.owned) + janitors(name), at_most=10)


def test_a_run_has_one_driver(name: str, drive: Drive) -> None:
    driver = drive(name)
    with pytest.raises(RolemeshError, match=f"driven by process {driver.process.pid}"):
        JanitorLink(name, "drive", own=True, address="", ttl=0)
    driver.kill()


@pytest.mark.slow
def test_of_janitors_that_start_at_once_one_stays(name: str) -> None:
    program = Path(rolemesh.__file__).parent / "runtime" / "janitor_process.py"
    starts = [subprocess.Popen([sys.executable, "-I", "-S", str(program), name]) for _ in range(8)]
    assert [start.wait(20) for start in starts] == [0] * 8
    link = JanitorLink(name, "work", process=f"{name}/main-0.1")
    assert len(janitors(name)) == 1
    link.close()


def test_a_process_that_has_the_pid_by_now_is_spared() -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        found = find(child.pid)
        assert found is not None
        kill(child.pid, found.started - 1)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        kill(child.pid, found.started)
        assert child.wait(10) == -signal.SIGKILL


def test_files_in_shared_memory_go_with_their_run_alone(name: str, drive: Drive) -> None:
    mine, other = Path(f"/dev/shm/rolemesh-{key_of(name)}-shard"), Path(f"/dev/shm/rolemesh-{key_of(name + 'x')}-shard")
    for path in (mine, other):
        path.write_text("weights")
    driver = drive(name)
    driver.process.communicate("x", timeout=30)
    assert (mine.exists(), other.exists()) == (False, True)
    other.unlink()


@pytest.mark.parametrize("end", ["good-bye", "kill", "kill, and the janitor"])
def test_folders_that_a_run_has_elsewhere_go_with_it(
    name: str, capsys: pytest.CaptureFixture[str], drive: Drive, tmp_path: Path, end: str
) -> None:
    mine, later, other = (tmp_path / word for word in ("mine", "later", "other"))
    driver = drive(name, folders=[mine, later])
    for folder in (mine, other):
        (folder / "version-1").mkdir(parents=True)
        (folder / "version-1" / "weights").write_bytes(bytes(1000))
    assert read_record(folder_of(name))["folders"] == sorted(map(str, (mine, later)))
    if end == "good-bye":
        driver.process.communicate("x", timeout=30)
    elif end == "kill":
        driver.kill()
        wait_for_none(lambda: janitors(name), at_most=10)
    else:
        os.kill(*janitors(name), signal.SIGKILL)
        driver.kill()
        assert cleaned(capsys, name, dry_run=True)[name]["folder_bytes"] >= 1000
        assert mine.exists()
        assert cleaned(capsys, name)[name]["freed"]
    assert (mine.exists(), other.exists()) == (False, True)
    assert not os.path.exists(folder_of(name))


def test_folders_elsewhere_wait_for_the_next_driver_of_a_detached_run(name: str, drive: Drive, tmp_path: Path) -> None:
    folders = [tmp_path / word for word in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    drive(name, time_to_live=30, folders=folders[:1]).kill()
    second = drive(name, time_to_live=1.0, folders=folders[1:])
    assert [folder.exists() for folder in folders] == [True, True]
    second.kill()
    wait_for_none(lambda: janitors(name), at_most=15)
    assert [folder.exists() for folder in folders] == [False, False]


def test_a_folder_elsewhere_goes_though_another_machine_writes_into_it_for_a_moment(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "version-1").mkdir(parents=True)
    for number in range(2000):  # takes longer to remove than a file to be written
        (folder / "version-1" / f"old-{number}").touch()
    begun, ended = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        with suppress(FileNotFoundError):
            while True:
                (folder / "version-1" / f"{number}").write_bytes(b"x")
                number += 1
                begun.set()
        ended.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert begun.wait(10)
    assert removed(str(folder))
    assert ended.wait(10)
    assert list(tmp_path.iterdir()) == []


def test_clean_frees_what_is_left_without_a_janitor_and_refuses_what_is_driven(
    name: str, capsys: pytest.CaptureFixture[str], drive: Drive
) -> None:
    driver = drive(name)
    with pytest.raises(ConfigError, match=f"{name} must have no driver; found process {driver.process.pid}"):
        cleaned(capsys, name)
    os.kill(*janitors(name), signal.SIGKILL)
    driver.kill()
    entry = cleaned(capsys, name, dry_run=True)[name]
    assert (entry["state"], entry["freed"]) == ("left", False)
    assert {process["pid"] for process in entry["processes"]} == set(driver.owned)
    assert cleaned(capsys, name)[name]["freed"]
    assert alive(driver.owned) == []
    assert not os.path.exists(folder_of(name))


def test_clean_leaves_alone_what_is_driven_or_waited_for_unless_it_is_named(
    name: str, capsys: pytest.CaptureFixture[str], drive: Drive
) -> None:
    driven, waiting = drive(f"{name}-driven"), drive(f"{name}-waiting", time_to_live=60)
    waiting.kill()
    wait_for_none(
        lambda: [1 for entry in cleaned(capsys, f"{name}-waiting", dry_run=True).values() if entry["state"] == "driven"], at_most=5
    )
    entries = cleaned(capsys, None)
    assert [entries[f"{name}-{word}"]["freed"] for word in ("driven", "waiting")] == [False, False]
    cleaned(capsys, f"{name}-waiting")
    assert (len(alive(waiting.owned)), len(alive(driven.owned))) == (0, 2)
    cleaned(capsys, f"{name}-driven", force=True)
    assert alive(driven.owned) == []
    assert driven.process.wait(10) == -signal.SIGKILL
