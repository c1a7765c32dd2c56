"""Machines: this one, imagined ones, their order and their GPUs."""

from __future__ import annotations

import itertools
import os

import psutil
import pytest

from rolemesh.errors import ConfigError
from rolemesh.plan.gpus import Gpu, device_numbers, parse_query, select_visible, visible_gpus
from rolemesh.plan.imagined import parse_nodes
from rolemesh.plan.inventory import cgroup_limits, held_as_free, local_inventory, order_nodes
from rolemesh.plan.schema import Inventory, NodeInfo

GIB = 1024**3


def test_parse_nodes():
    inventory = parse_nodes("2x8")
    assert [(node.name, node.gpus, node.cpus) for node in inventory.nodes] == [("node-0", 8, 64.0), ("node-1", 8, 64.0)]
    assert inventory.origin == "--nodes 2x8"
    assert [(node.gpus, node.cpus) for node in parse_nodes("2x8,1x4").nodes] == [(8, 64.0), (8, 64.0), (4, 32.0)]
    assert [(node.gpus, node.cpus) for node in parse_nodes("2x8:64c 1x0:2c").nodes] == [(8, 64.0), (8, 64.0), (0, 2.0)]
    assert parse_nodes("1x0:2c").nodes[0].memory_bytes == 8 * GIB
    assert len(parse_nodes("1250x8").nodes) == 1250


@pytest.mark.parametrize("text", ["", "8", "x8", "2x", "2x8:", "2x8:c", "0x8", "1x0", "1x0:0c", "2x8;1x4", "-1x8", "2x8:64c:1g"])
def test_other_forms_of_nodes_are_refused(text):
    with pytest.raises(ConfigError, match="--nodes"):
        parse_nodes(text)


@pytest.mark.parametrize("text", ["9999999999x8", "2x999999999", "150000x1,60000x1", "1x0:999999999c"])
def test_nodes_that_nobody_has_are_refused_at_once(text):
    with pytest.raises(ConfigError, match="--nodes"):
        parse_nodes(text)


def test_A11_nodes_are_ordered_without_resolving_names():
    names = ["worker-10", "worker-2", "10.0.0.10", "10.0.0.9", "fd00::10", "fd00::9", "worker-1", "nowhere.invalid", "9.255.255.255"]
    expected = [
        "9.255.255.255",
        "10.0.0.9",
        "10.0.0.10",
        "fd00::9",
        "fd00::10",
        "nowhere.invalid",
        "worker-1",
        "worker-2",
        "worker-10",
    ]
    for order in itertools.islice(itertools.permutations(names), 0, 5000, 7):
        assert order_nodes(order) == expected


def test_A11_order_is_total_and_stable():
    assert order_nodes(["a02", "a2", "a002"]) == order_nodes(["a002", "a02", "a2"])
    assert order_nodes(["rack2-node10", "rack10-node1", "rack2-node9"]) == ["rack2-node9", "rack2-node10", "rack10-node1"]
    assert order_nodes(["1", "a", "²", "", "fe80::1%eth0"])  # no crash on anything


def gpu(index: int) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}abc", name="H200", memory_bytes=GIB)


def test_A13_local_ranks_index_into_the_visible_list():
    assert device_numbers("3,5") == {"3": 0, "5": 1}
    assert device_numbers("7") == {"7": 0}
    installed = [gpu(index) for index in range(8)]
    assert [found.index for found in select_visible(installed, "3,5")] == [3, 5]
    assert [found.index for found in select_visible(installed, "7")] == [7]
    assert [found.index for found in select_visible(installed, "5,3")] == [5, 3]


def test_visible_devices_as_cuda_reads_them():
    installed = [gpu(index) for index in range(4)]
    assert len(select_visible(installed, None)) == 4
    assert select_visible(installed, "") == []
    assert select_visible(installed, "-1") == []
    assert [found.index for found in select_visible(installed, "1,9,2")] == [1]
    assert [found.index for found in select_visible(installed, "GPU-2, 0")] == [2, 0]


def test_answer_of_nvidia_smi():
    text = "0, GPU-1a, 143771, NVIDIA H200\n1, GPU-2b, [N/A], NVIDIA GB10, odd name\n"
    assert parse_query(text) == [
        Gpu(index=0, uuid="GPU-1a", name="NVIDIA H200", memory_bytes=143771 * 1024**2),
        Gpu(index=1, uuid="GPU-2b", name="NVIDIA GB10, odd name", memory_bytes=0),
    ]


def test_gpus_of_a_machine_with_a_fake_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-a, 1024, T1'\necho '1, GPU-b, 2048, T2'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [(found.index, found.memory_bytes) for found in visible_gpus()] == [(1, 2048 * 1024**2)]
    node = local_inventory().nodes[0]
    assert (node.gpus, node.gpu_memory_bytes, node.gpu_type) == (1, 2048 * 1024**2, "T2")
    program.write_text("#!/bin/sh\necho no driver >&2\nexit 9\n", encoding="utf-8")
    assert visible_gpus() == []


def test_a_hanging_nvidia_smi_ends(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 30\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("rolemesh.plan.gpus.QUERY_SECONDS", 0.2)
    assert visible_gpus() == []


def test_local_inventory_stays_within_this_machine():
    (node,) = local_inventory().nodes
    assert 0 < node.cpus <= len(os.sched_getaffinity(0))
    assert 0 < node.memory_bytes <= psutil.virtual_memory().total


@pytest.fixture
def groups(tmp_path):
    def write(own: str, files: dict[str, str]):
        (tmp_path / "own").write_text(own, encoding="ascii")
        root = tmp_path / "cgroup"
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii")
        return cgroup_limits(root, tmp_path / "own")

    return write


def test_limits_of_control_group_v2(groups):
    files = {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n", "a/b/memory.max": "4096\n", "a/memory.max": "8192\n"}
    assert groups("0::/a/b\n", files) == (1.5, 4096)


def test_limits_at_the_root_of_a_container(groups):
    assert groups("0::/docker/abc\n", {"cpu.max": "50000 100000", "memory.max": "max"}) == (0.5, 1 << 62)


def test_limits_of_control_group_v1(groups):
    files = {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000", "memory/y/memory.limit_in_bytes": "777"}
    assert groups("4:cpu,cpuacct:/x\n5:memory:/y\n", files) == (2.0, 777)
    assert groups("4:cpu,cpuacct:/z\n", {"cpu/z/cpu.cfs_quota_us": "-1", "cpu/z/cpu.cfs_period_us": "100000"}) == (float("inf"), 1 << 62)


def test_no_control_groups(tmp_path):
    assert cgroup_limits(tmp_path, tmp_path / "none") == (float("inf"), 1 << 62)


def test_what_a_run_holds_itself_counts_as_free_for_it():
    mine, other = {"CPU": 3.0, "GPU": 2.0, "NPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}
    node = NodeInfo(
        name="a", cpus=8, memory_bytes=GIB, gpus=4, resources={"NPU": 4.0}, free_cpus=1, free_gpus=1, free_resources={"NPU": 2.0},
        free_memory_bytes=5, holders={"run-1/main": mine, "run-1/gen (left by run run-1)": {"CPU": 3.0}, "run-10/main": other},
    )  # fmt: skip
    empty = NodeInfo(name="b", cpus=8, memory_bytes=GIB, free_cpus=8, free_memory_bytes=7)
    found, untouched = held_as_free(Inventory(nodes=(node, empty), origin="test"), "run-1").nodes
    assert (found.free_cpus, found.free_gpus, found.free_resources) == (7, 3, {"NPU": 3.0})
    assert found.usable_memory == GIB
    assert found.holders == {"run-10/main": other}
    assert untouched == empty
