"""The endpoint of a run: requests while it trains, over changes of weights and deaths of replicas, and after its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_helpers import ONE_PROCESS, SMALL, Quiet, only_run, rows, small

from rolemesh.config import load_config
from rolemesh.config.schema import Config
from rolemesh.engines.rollout.builtin import BuiltinEngine
from rolemesh.observe import RunDirectory
from rolemesh.protocols.engine import Completion
from rolemesh.roles.rollout_manager import RolloutManager
from rolemesh.training import loop, phases
from rolemesh.training.launch import run_training
from rolemesh.training.run import TrainingRun

SPLIT = ("pools={main: {nodes: [1]}, serve: {nodes: [2]}}", "roles.rollout.pool=serve")
LEARNS = ("sft=null", "reward=[{name: 'test_publication:length_reward'}]")
LONG = ("sft=null", "data.max_response_tokens=200")


class Client:
    """Of a run that is under way."""

    def __init__(self, run: TrainingRun, session: aiohttp.ClientSession) -> None:
        self.run, self.session = run, session
        self.key = {"Authorization": f"Bearer {run.directory.serving_token.read_text().strip()}"}

    async def complete(self, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(f"{self.run.serving}/completions", json={"prompt": "1 + 2 =", **body}, headers=self.key) as answer:
            return answer.status, await answer.json()


def go(
    tmp_path: Path, my_loop: Callable[[TrainingRun, Client], Awaitable[None]], *overrides: str, recipe: Callable[..., Config] = small
) -> RunDirectory:
    async def with_client(run: TrainingRun) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await my_loop(run, Client(run, session))

    run_training(recipe(tmp_path, *overrides), Quiet(), loop=with_client)
    return only_run(tmp_path)


class Traffic:
    """Clients that ask one question after the other."""

    def __init__(self, client: Client, clients: int = 6) -> None:
        self.client, self.clients = client, clients
        self.answers: list[tuple[int, dict[str, Any]]] = []

    async def __aenter__(self) -> Traffic:
        self.tasks = [asyncio.ensure_future(self._ask(number)) for number in range(self.clients)]
        return self

    async def _ask(self, number: int) -> None:
        while True:
            self.answers.append(await self.client.complete(n=1 + number % 3, temperature=0.1 + number / 5, max_tokens=6, seed=number))

    async def __aexit__(self, *error: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def check(self, versions: set[int]) -> None:
        assert {status for status, _ in self.answers} == {200}
        found = {span[0] for _, told in self.answers for choice in told["choices"] for span in choice["weight_spans"]}
        assert found == versions


async def trained_beside_traffic(run: TrainingRun, client: Client) -> None:
    async with Traffic(client) as traffic:
        await loop.train(run)
        await asyncio.sleep(0.5)
    traffic.check({0, 1, 2})


def outcome(directory: RunDirectory) -> tuple[list[pa.Table], bytes]:
    """What a run has sampled, and what it has become."""
    samples = [pq.read_table(file) for file in sorted(directory.samples.iterdir())]
    (weights,) = directory.checkpoint(2).glob("model/*.safetensors")
    return samples, weights.read_bytes()


def several_turns(tmp_path: Path, *overrides: str) -> Config:
    """An environment that answers twice, and a model that has learned to end its turns."""
    of_small = {"trainer", "algorithm", "rollout", "name"}
    kept = [override for override in SMALL if override.partition("=")[0].partition(".")[0] in of_small]
    own = ["environment={tools: [], name: 'test_environment_runs:Echo', max_turns: 4}", "reward=[{name: environment}]", "data.eval_size=8"]
    sft = ["sft.steps=12", "sft.warmup_steps=2", "sft.batch_size=32"]
    return load_config("tools", [*kept, *own, *sft, f"runs_dir={tmp_path / 'runs'}", *overrides])


def check_equal_to_quiet(
    tmp_path: Path, *layout: str, recipe: Callable[..., Config] = small, learns: Sequence[str] = LEARNS
) -> RunDirectory:
    """A run in that layout, with requests, and one in one process, without any, are the same."""
    overrides = (*learns, "deterministic=true", "trainer.eval_every=1", "trainer.save_samples_every=1")
    busy = go(tmp_path / "busy", trained_beside_traffic, *overrides, *layout, "rollout.serve={}", recipe=recipe)
    run_training(recipe(tmp_path / "quiet", *overrides, *ONE_PROCESS), Quiet())
    found, expected = outcome(busy), outcome(only_run(tmp_path / "quiet"))
    assert len(found[0]) == 2
    assert found == expected
    asked = [sum(count for name, count in row.items() if name.startswith("serve/requests/")) for row in rows(busy) if "reward/mean" in row]
    assert len(asked) == 2
    assert all(asked)
    return busy


def test_a_deterministic_run_is_bit_equal_whatever_is_asked_from_outside(tmp_path: Path) -> None:
    directory = check_equal_to_quiet(tmp_path, *ONE_PROCESS)
    assert stat.S_IMODE(directory.serving_token.stat().st_mode) == 0o600
    assert "serving" not in directory.read_status()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_so_is_one_whose_answers_have_several_turns(tmp_path: Path) -> None:
    directory = check_equal_to_quiet(tmp_path, *ONE_PROCESS, recipe=several_turns, learns=())
    played = pq.read_table(directory.samples / "step-000002.parquet").column("turns").to_pylist()
    assert max(len(json.loads(turns)) for turns in played) == 5  # three of the model, and what it was told between them
    assert len({row["reward/mean"] for row in rows(directory) if "reward/mean" in row}) == 2


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", [("pools.main.nodes=[1]",), SPLIT], ids=["together", "split"])
def test_so_is_one_on_ray(tmp_path: Path, layout: tuple[str, ...]) -> None:
    check_equal_to_quiet(tmp_path, *layout)


@pytest.fixture
def halting(monkeypatch: pytest.MonkeyPatch) -> int:
    """The engine stops after so many steps until it has other weights, so that these come in the midst of what it has begun."""
    step, steps, taken = BuiltinEngine.step, 8, 0

    def some_steps(self: BuiltinEngine) -> list[Completion]:
        nonlocal taken
        taken += self.weight_version == 0
        if self.weight_version == 0 and taken > steps:
            time.sleep(0.001)
            return []
        return step(self)

    monkeypatch.setattr(BuiltinEngine, "step", some_steps)
    return steps


@pytest.mark.parametrize("policy", ["resume", "wait", "abort"])
def test_requests_under_way_when_weights_change_do_as_declared(tmp_path: Path, policy: str, halting: int) -> None:
    choices: list[dict[str, Any]] = []

    async def my_loop(run: TrainingRun, client: Client) -> None:
        manager = run.session.groups["rollout"]
        assert isinstance(manager, RolloutManager)
        await phases.publish(run)
        asking = asyncio.ensure_future(client.complete(n=9, max_tokens=30, seed=4, return_token_ids=True))
        while manager.requests.counts["serve/tokens/0"] < 4 * halting:
            await asyncio.sleep(0.01)
        run.progress.weight_version = 1
        await phases.publish(run)
        status, told = await asking
        assert status == 200
        choices.extend(told["choices"])
        async with client.session.get(f"{run.serving}/models", headers={}) as answer:
            assert answer.status == 401

    go(tmp_path, my_loop, *ONE_PROCESS, *LONG, "rollout.slots=4", f"rollout.serve.in_flight={policy}")
    assert len(choices) == 9
    for number, choice in enumerate(choices):
        spans, length = choice["weight_spans"], len(choice["token_ids"])
        begun = {"resume": [[0, 0, halting], [1, halting, length]], "wait": [[0, 0, length]], "abort": [[0, 0, halting]]}
        assert spans == (begun[policy] if number < 4 else [[1, 0, length]])  # with four slots the others wait
        assert choice["weight_version"] == spans[0][0]
        assert spans[-1][2] == length
        assert length == 30 or choice["finish_reason"] in ("stop", "abort")
        assert (choice["finish_reason"] == "abort") == (policy == "abort" and number < 4)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_requests_of_a_replica_that_is_killed_are_answered_by_another(tmp_path: Path) -> None:
    async def my_loop(run: TrainingRun, client: Client) -> None:
        manager = run.session.groups["rollout"]
        assert isinstance(manager, RolloutManager)
        await phases.publish(run)
        expected = await client.complete(n=16, max_tokens=200, seed=7, return_token_ids=True)
        asking = [asyncio.ensure_future(client.complete(n=16, max_tokens=200, seed=7, return_token_ids=True)) for _ in range(8)]
        while not all(manager.requests.counts[f"serve/tokens/{replica}"] for replica in (0, 1)):
            await asyncio.sleep(0.005)
        (busy,) = {request.replica for request in manager.requests._open.values()} & {1}
        os.kill(manager.processes[busy].pid, signal.SIGKILL)
        answers = await asyncio.gather(*asking)
        assert manager.requests.counts["serve/moved"] > 0
        # The same seed and weights: the same tokens, on any replica.
        assert [[choice["token_ids"] for choice in told["choices"]] for _, told in answers] == [
            [choice["token_ids"] for choice in expected[1]["choices"]]
        ] * 8
        await loop.step(run)
        assert manager.replicas[1].out is None
        before = manager.requests.counts["serve/requests/1"]
        _, told = await client.complete(prompt=[f"{number} + 1 =" for number in range(9)], max_tokens=100)
        assert {choice["weight_version"] for choice in told["choices"]} == {1}
        assert manager.requests.counts["serve/requests/1"] > before  # it serves again, with the new weights

    go(tmp_path, my_loop, *SPLIT, *LONG, "deterministic=true", "rollout.serve={}")


def test_too_many_requests_are_refused_and_nobody_is_left_when_the_run_ends(tmp_path: Path) -> None:
    statuses: list[dict[str, Any]] = []

    async def my_loop(run: TrainingRun, client: Client) -> None:
        waiting = [asyncio.ensure_future(client.complete(n=4)) for _ in range(3)]  # nobody has weights yet
        while not (told := run.directory.read_status().get("serving", {})).get("under_way"):
            await asyncio.sleep(0.1)
        statuses.append(told)
        async with client.session.post(f"{run.serving}/completions", json={"prompt": "1"}, headers=client.key) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(answer.headers["Retry-After"]) >= 1
        await phases.publish(run)
        assert {status for status, _ in await asyncio.gather(*waiting)} == {200}
        status, told = await client.complete(n=13)
        assert (status, told["error"]["param"]) == (400, "prompt")
        run.session.groups["rollout"].requests.close("the end")  # type: ignore[attr-defined]
        status, told = await client.complete()
        assert (status, told["error"]["message"]) == (503, "the end")

    go(tmp_path, my_loop, *ONE_PROCESS, "sft=null", "rollout.serve.requests=12")
    assert statuses[0]["under_way"] == 12
    assert statuses[0]["address"].startswith("http://127.0.0.1:")


def test_an_engine_that_cannot_do_what_is_declared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BuiltinEngine, "in_flight", frozenset({"refuse", "abort"}))
    with pytest.raises(Exception, match="in_flight"):
        run_training(small(tmp_path, *ONE_PROCESS, "rollout.serve={}"), Quiet())


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_model_is_served_without_training(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rolemesh.cli", "serve", "demo", f"runs_dir={tmp_path / 'runs'}", "pools.main.nodes=[2]"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        ends = time.monotonic() + 120
        address, status = "", {}
        while not address and time.monotonic() < ends:
            time.sleep(0.5)
            files = list(tmp_path.glob("runs/*/status.json"))
            status = json.loads(files[0].read_text()) if files else {}
            address = status.get("serving", {}).get("address", "")
        assert address, process.communicate(timeout=5) if process.poll() is not None else status
        token = only_run(tmp_path).serving_token.read_text().strip()

        def ask(key: str) -> dict[str, Any]:
            body = json.dumps({"prompt": "1 + 2 =", "temperature": 0}).encode()
            request = urllib.request.Request(f"{address}/completions", body, {"Authorization": f"Bearer {key}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                told: dict[str, Any] = json.load(answer)
                return told

        assert ask(token)["choices"][0]["weight_version"] == 0
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask("other")
        page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
        if shutil.which("curl"):
            (example,) = re.findall("```bash\n(.*?)```", page, re.DOTALL)
            told = json.loads(subprocess.run(["bash", "-c", example], cwd=tmp_path, capture_output=True, check=True, timeout=60).stdout)
            assert told["choices"][0]["token_ids"]
        pids = [worker["pid"] for worker in status["workers"]]
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        for _ in range(10):
            assert ask(token)["choices"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        with pytest.raises(urllib.error.URLError):
            ask(token)
    finally:
        process.kill()
        process.wait(timeout=10)
        if process.stdout is not None:
            process.stdout.close()
