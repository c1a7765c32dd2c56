"""Model-written code as a tool, in real confined processes: what it may do, what it may not, how it ends, and what the model is told."""

from __future__ import annotations

import asyncio
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psutil
import pytest
from transformers import AutoTokenizer

from rolemesh.config.model_files import BUILTIN_MODELS
from rolemesh.config.schema import EnvironmentConfig
from rolemesh.environments import (
    Episode,
    EpisodeLoop,
    TurnEncoder,
    check_environment_section,
    environment_maker,
    sandbox,
    tool_schemas,
)
from rolemesh.environments.python_tool import python
from rolemesh.environments.sandbox import Result, Sandbox, check_sandbox, sandbox_of_loop
from rolemesh.environments.tools import ToolResult
from rolemesh.errors import ConfigError
from rolemesh.protocols.engine import Completion, Request, WeightSpan
from rolemesh.protocols.environment import Start

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN_MODELS["tiny"], local_files_only=True)
T = TypeVar("T")

try:
    check_sandbox()
except ConfigError as error:
    pytest.skip(f"no sandbox on this machine: {error}", allow_module_level=True)


def with_sandbox(work: Callable[[Sandbox], Awaitable[T]]) -> T:
    async def main() -> T:
        return await work(Sandbox(preload=False))

    return asyncio.run(main())


def run(*programs: str) -> list[Result]:
    async def all_of(box: Sandbox) -> list[Result]:
        return list(await asyncio.gather(*map(box.run, programs)))

    return with_sandbox(all_of)


def keepers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "sandbox_process" in " ".join(child.cmdline())]


# What is attempted harms only a file of the test, or nothing, should it succeed.
REFUSED = {
    "network": "import socket; socket.create_connection(('127.0.0.1', 9))",
    "datagrams": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "sockets of the machine": "import socket; socket.socket(socket.AF_UNIX)",
    "reading": "open(OWN)",
    "the environment of others": "import os; open(f'/proc/{os.getppid()}/environ')",
    "listing": "import os; os.listdir('/')",
    "writing": "open(OWN, 'w')",
    "changing": "import os; os.chmod(OWN, 0o777)",
    "deleting": "import os; os.remove(OWN)",
    "memory outside its limit": "import os; os.memfd_create('x')",
    "forks": "import os; os.fork() or os._exit(0)",
    "programs": "import subprocess; subprocess.run(['/bin/true'])",
    "replacing itself": "import os; os.execv('/bin/true', ['true'])",
    "signals": "import os; os.kill(os.getppid(), 0)",
    "signals to a thread": "import ctypes, os; assert ctypes.CDLL(None).tgkill(os.getppid(), os.getppid(), 0) == -1; raise PermissionError",
    "other priorities": "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "more memory": "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,) * 2)",
    "another session": "import os; os.setsid()",
    "namespaces": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == -1; raise PermissionError",
}


def test_what_confined_code_may_not_do(tmp_path):
    own = tmp_path / "own"
    own.write_text("mine")
    programs = [program.replace("OWN", repr(str(own))) for program in REFUSED.values()]
    found = dict(zip(REFUSED, run(*programs), strict=True))
    assert own.read_text() == "mine"
    for name, result in found.items():
        assert result.outcome == "error", (name, result)
        assert "Permission" in result.error or "not allowed" in result.error, (name, result)


ENDINGS = [  # program, outcome, output, error
    ("print('a'); 3 * 7", "ok", "a\n21\n", ""),
    ("x = 1", "ok", "", ""),
    ("import json, math, random\njson.dumps([math.pi, random.random()])", "ok", "'[3.141592653589793, 0.8444218515250481]'\n", ""),
    ("print('b')\nx = 1 / 0", "error", "b\n", "ZeroDivisionError: division by zero (line 2)"),
    ("def f():\n    return [][0]\nf()", "error", "", "IndexError: list index out of range (line 2)"),
    ("1 +", "error", "", "SyntaxError: invalid syntax (line 1)"),
    ("\0", "error", "", "SyntaxError: source code string cannot contain null bytes"),
    ("exit(0)", "ok", "", ""),
    ("exit('bye')", "error", "", "SystemExit: bye"),
    ("input()", "error", "", "EOFError: EOF when reading a line (line 1)"),
    ("bytearray(10**10)", "error", "", "MemoryError (line 1)"),
    ("import os; os._exit(5)", "error", "", "exit code 5"),
    ("import ctypes; ctypes.string_at(0)", "error", "", "the program was ended by SIGSEGV"),
    ("import sys; print('warned', file=sys.stderr)", "ok", "warned\n", ""),
    ("import sys; n = sys.stdout.buffer.write(b'\\xff\\xc3')", "ok", "\ufffd\ufffd", ""),
    ("print('\\ud800')", "ok", "\\ud800\n", ""),
    ("import threading as t; a = t.Thread(target=print, args='x'); a.start(); a.join()", "ok", "x\n", ""),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 3\nA()", "ok", "A(x=3)\n", ""),
]


def test_how_programs_end():
    found = run(*(program for program, *_ in ENDINGS))
    for (program, outcome, output, error), result in zip(ENDINGS, found, strict=True):
        assert result == Result(outcome=outcome, output=output, error=error), program  # type: ignore[arg-type]


def test_long_output_is_cut_at_the_same_place_and_ends_the_program():
    began = time.monotonic()
    found = run("while True: print('0123456789')", "print('☃' * 3000)", "x = '☃' * 3000; print(x); 1 / 0")
    assert [result.outcome for result in found] == ["cut"] * 3
    assert found[0].output == ("0123456789\n" * 745)[:8192]
    assert found[1].output == found[2].output == "☃" * 2730  # three bytes each, the last one not in half
    assert {result.error for result in found} == {""}
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_programs_that_take_too_long_are_ended_with_what_they_printed():
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    found = run("import time; print('a'); time.sleep(100)", "print('b')\nwhile True: pass", ignoring + "while True: pass")
    assert found == [Result(outcome="timeout", output=output, error="") for output in ("a\n", "b\n", "")]


def test_nothing_passes_from_one_program_to_the_next_and_equal_programs_give_equal_results():
    chance = "import random\nprint(random.random(), hash('a'), list({'x', 'y', 'zz', 'abc'}))"
    mischief = "import builtins, random, sys\nbuiltins.print = None; random.random = None; sys.modules.clear(); left = 1"

    async def thrice(box: Sandbox) -> list[Result]:
        return [await box.run(program) for program in (chance, mischief, chance, "left")]

    first, _, second, left = with_sandbox(thrice)
    assert first == second == run(chance)[0]
    assert first.outcome == "ok"
    assert left.error == "NameError: name 'left' is not defined (line 1)"


def test_processes_are_few_and_one_that_waits_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(sandbox, "PROCESSES", 3)

    async def beside(box: Sandbox) -> int:
        await box.run("1")
        (keeper,) = keepers()
        slow = asyncio.create_task(box.run("import time; time.sleep(18)"))
        others = asyncio.gather(*(box.run(f"{number} + 1") for number in range(30)))
        most = 0
        while not others.done():
            most = max(most, len(keeper.children()))
            await asyncio.sleep(0.002)
        assert [int(result.output) for result in others.result()] == list(range(1, 31))
        assert not slow.done()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        for _ in range(500):
            if not keeper.children():
                return most
            await asyncio.sleep(0.01)
        raise AssertionError("the program that nobody waits for goes on")

    assert 2 <= with_sandbox(beside) <= 3
    assert keepers() == []


def test_a_keeper_that_is_killed_is_a_lost_service_and_replaced():
    async def lose(box: Sandbox) -> str:
        await box.run("1")
        under_way = asyncio.create_task(box.run("import time; time.sleep(15)"))
        await asyncio.sleep(0.3)
        (keeper,) = keepers()
        (program,) = keeper.children()
        keeper.kill()
        with pytest.raises(ConnectionError, match="the sandbox's process ended: exit code -9"):
            await under_way
        assert psutil.wait_procs([program], timeout=5)[1] == []
        return (await box.run("2")).output

    assert with_sandbox(lose) == "2\n"
    assert keepers() == []


def test_no_secret_reaches_a_program(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    (found,) = run("import os; print(dict(os.environ))")
    assert found.output == "{}\n"


def text(code: str) -> ToolResult:
    async def main() -> ToolResult:
        return await python(code)

    return asyncio.run(main())


def test_what_the_model_is_told(monkeypatch):
    async def told(result: Result) -> ToolResult:
        async def answer(code: str) -> Result:
            return result

        monkeypatch.setattr(sandbox_of_loop(), "run", answer)
        return await python("x")

    for outcome, expected, counted in (
        ("ok", "12", None),
        ("error", "error: ValueError: x (line 1)\n12", "python_errors"),
        ("timeout", "error: the program took too long and was ended\n12", "python_timeouts"),
        ("cut", "error: the program printed more than 8192 bytes and was ended; this is the beginning\n12", "python_outputs_cut"),
    ):
        error = "ValueError: x (line 1)" if outcome == "error" else ""
        found = asyncio.run(told(Result(outcome=outcome, output="12\n", error=error)))  # type: ignore[arg-type]
        assert found.text == expected
        assert {name for name, count in found.counts.items() if count} == ({counted} if counted else set())
        assert set(found.counts) == {"python_errors", "python_timeouts", "python_outputs_cut"}
    assert asyncio.run(told(Result(outcome="ok", output="", error=""))).text == "(no output; print what you want to see)"


@pytest.mark.slow
def test_numpy_and_sympy_are_there():
    assert text("import numpy as np, sympy\nprint(np.arange(3) @ np.arange(3), sympy.factor('x**2 - 1'))").text == "5 (x - 1)*(x + 1)"


SCRIPT = [
    ["print(6 * 7)", "'ok'"],
    ["while True: print('x' * 100)"],
    ["1 / 0"],
    ["import socket; socket.socket()"],
]
"""Programs of a scripted policy, turn by turn; its last turn calls nothing."""


def written(turn: int) -> str:
    if turn == len(SCRIPT):
        return "42"
    return "".join(f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>" for code in SCRIPT[turn])


def scripted(request: Request, turn: int) -> Completion:
    ids = [*TOKENIZER(written(turn), add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    return Completion(id=request.id, token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", spans=(WeightSpan(0, 0, len(ids)),))


def play(episodes: int) -> list[Episode]:
    config = EnvironmentConfig(tools=("python",), max_observation_tokens=64)
    loop = EpisodeLoop(environment_maker(config), TurnEncoder(TOKENIZER, chat=False), config, max_response_tokens=2000)
    try:
        begun = [Start(draw=draw, sample=0, seed=0, source="s", prompt="p", answer=None, task={}) for draw in range(episodes)]
        loop.begin([(start, [1]) for start in begun])
        done: list[Episode] = []
        turns = Counter[tuple[int, int]]()
        while loop.unfinished:
            requests, ended = loop.news(wait=1.0)
            done += ended
            loop.give([scripted(request, turns[request.id]) for request in requests])
            turns.update(request.id for request in requests)
        assert len(keepers()) == 1
    finally:
        loop.close()
    assert keepers() == []  # it ends with the loop
    return done


def check_played(done: list[Episode]) -> None:
    assert {episode.error for episode in done} == {None}
    (turns,) = {json.dumps(episode.turns) for episode in done}  # all equal
    told = [turn["text"] for turn in json.loads(turns) if turn["role"] == "tool"]
    assert told[:2] == ["42", "'ok'"]
    assert told[2].startswith("error: the program printed more than 8192 bytes and was ended; this is the beginning\nxxx")
    assert told[3] == "error: ZeroDivisionError: division by zero (line 1)"
    assert told[4] == "error: PermissionError: [Errno 1] Operation not permitted (line 1)"
    for episode in done:
        counts = {name: int(count) for name, count in episode.counts.items()}
        assert counts == {
            "tool_calls": 5, "tool_errors": 0, "malformed_calls": 0, "observations_cut": 1,
            "python_errors": 2, "python_timeouts": 0, "python_outputs_cut": 1,
        }  # fmt: skip
        assert sum(episode.mask) == sum(turn["tokens"] for turn in episode.turns if turn["role"] == "assistant")
        assert (episode.finish_reason, episode.turns[-1]["text"]) == ("stop", "42")


@pytest.mark.slow
def test_episodes_of_a_scripted_policy_are_equal_and_the_sandbox_ends_with_their_loop():
    check_played(play(4))


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_hundreds_of_episodes_stay_on_one_loop():
    done = play(300)
    assert sorted(episode.start.draw for episode in done) == list(range(300))
    check_played(done)


def test_the_model_reads_what_it_is():
    (schema,) = tool_schemas(EnvironmentConfig(tools=("python",)))
    assert schema["function"]["name"] == "python"
    assert schema["function"]["description"].startswith("Runs a Python program and returns what it prints")
    assert schema["function"]["parameters"]["properties"]["code"] == {"type": "string", "description": "The program"}


def test_a_deadline_that_programs_may_exceed_is_refused():
    with pytest.raises(ConfigError, match=r"environment.deadline.*must be above 20 s.*found 20"):
        check_environment_section(EnvironmentConfig(tools=("python",), deadline=20.0), None, chat=False)


WITHOUT_LANDLOCK = """
import ctypes, errno
from rolemesh.environments import confinement as c
libc = ctypes.CDLL(None, use_errno=True)
c._prctl(libc, c._PR_SET_NO_NEW_PRIVS, 1, 0, "")
c._install(libc, [(c._LOAD, 0, 0, c._NUMBER), *c._answer([444], errno.ENOSYS), (c._RETURN, 0, 0, c._ALLOW)])
from rolemesh.config.schema import EnvironmentConfig
from rolemesh.environments import check_environment_section
from rolemesh.errors import ConfigError
try:
    check_environment_section(EnvironmentConfig(tools=("python",)), None, chat=False)
except ConfigError as error:
    print(error)
"""


def test_a_system_that_cannot_confine_is_refused_at_the_start():
    done = subprocess.run([sys.executable, "-c", WITHOUT_LANDLOCK], capture_output=True, text=True, timeout=60, check=True)
    assert "environment.tools" in done.stdout
    assert "Landlock, in Linux from 5.13 on where it is switched on: Function not implemented" in done.stdout


def test_the_filter_refuses_the_calls_of_another_architecture():
    if platform.machine() != "x86_64":
        pytest.skip("by the calls of 32 bits on x86_64")
    # mov eax, 20 (getpid of 32 bits); int 0x80; ret
    code = "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
    code += "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    assert run(code)[0].error == "the program was ended by SIGSYS"
