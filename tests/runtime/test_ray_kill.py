"""Ending a process by its pid, only if it is still that process."""

import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from rolemesh.protocols.backend import Process, ProcessSpec


@pytest.mark.ray
def test_a_pid_that_another_process_has_by_now_is_spared() -> None:
    from rolemesh.runtime.ray.host import find_process

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        created = psutil.Process(child.pid).create_time()
        spec = ProcessSpec(name="p", pool="pool", bundle=0)
        process = Process(spec=spec, node="n", address="a", pid=child.pid, created=created - 60, handle=None)
        assert find_process(process.pid, process.created) is None
        mine = replace(process, created=created)
        assert find_process(mine.pid, mine.created) == psutil.Process(child.pid)
        child.kill()
        child.wait(10)
        assert find_process(mine.pid, mine.created) is None
