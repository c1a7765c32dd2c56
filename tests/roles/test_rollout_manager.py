"""The rollout manager: who answers what, deaths, lateness, comebacks. On virtual time, with a fake engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from rolemesh.batch import Batch, BatchRef, assemble, block_meta
from rolemesh.config import load_config
from rolemesh.config.schema import Config
from rolemesh.engines.rollout.fake import FakeEngine
from rolemesh.errors import DeadlineExceeded, WorkerDied, WorkerError
from rolemesh.protocols.engine import Request, Sampling
from rolemesh.roles.rollout import WRITES, RolloutWorker
from rolemesh.roles.rollout_manager import REPLACEMENTS, RolloutManager
from rolemesh.roles.rollout_round import Round
from rolemesh.runtime import Backend, CallRecord, Deadlines, Fault, Faults, Pool, SimulatedBackend, Worker, WorkerContext, register

END = 9
SETTINGS = {"version": 3, "temperature": 1.0, "seed": 5}


def config(**rollout: Any) -> Config:
    overrides = [f"rollout.{name}={value}" for name, value in {"slots": 4, "deadline": 100, **rollout}.items()]
    return load_config("demo", ["data.max_prompt_tokens=8", "data.max_response_tokens=12", *overrides])


class Letters:
    """A tokenizer that is enough here."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token) for token in ids if token != END)


def answer(request: Request, sampling: Sampling) -> tuple[list[int], list[float]]:
    """Of 1 to 12 tokens, made of the request alone."""
    draw, sample = request.id
    tokens = [(draw + 2 * sample + place) % 8 for place in range((draw * 5 + sample * 3) % 12)]
    return [*tokens, END], [-float(place + draw) for place in range(len(tokens) + 1)]


class Rollout(RolloutWorker):
    """Over a fake engine; remembers what it was given."""

    taken: ClassVar[dict[int, list[tuple[int, int]]]] = {}
    most: ClassVar[int] = 0
    broken: ClassVar[tuple[int, int] | None] = None

    def load(self) -> None:
        data = self.config.data
        limits = {"max_prompt_tokens": data.max_prompt_tokens, "max_response_tokens": data.max_response_tokens}
        self.engine = FakeEngine(None, slots=self.config.rollout.slots, answer=answer, **limits)
        self.tokenizer, self.stop = Letters(), (END,)  # type: ignore[assignment]

    @register(dispatch="all", mutates=True)
    def load_weights(self, version: int) -> int:  # type: ignore[override]
        self.engine.abort()
        self.engine.load_weights([], version)
        return version

    def take_on(self, batch: Batch, **settings: Any) -> None:
        if self.broken in [(draw, sample) for draw, sample in batch.ids.tolist()]:
            raise ValueError("this prompt breaks the engine")
        super().take_on(batch, **settings)
        self.taken[self.context.rank] += [(draw, sample) for draw, sample in batch.ids.tolist()]
        Rollout.most = max(self.most, self.engine.unfinished)


class Neighbour(Worker):
    """Lives in the same processes."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    Rollout.taken, Rollout.most, Rollout.broken = defaultdict(list), 0, None


class Told:
    """What a manager said, and its calls."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.records: list[CallRecord] = []

    def of(self, method: str) -> list[CallRecord]:
        return [record for record in self.records if record.method == method]


async def started(
    backend: Backend, replicas: int, told: Told, *, settings: Config | None = None, neighbour: bool = False, call: float = 1000.0
) -> RolloutManager:
    pool = await Pool.of_slots(backend, "pool", [replicas])
    await pool.create(deadline=60)
    manager = RolloutManager(
        "rollout", Rollout, pool, range(replicas), worker_kwargs={"config": settings or config()}, observer=told.records.append,
        tell=told.texts.append, deadlines=Deadlines(call=call),
    )  # fmt: skip
    await manager.create(deadline=60)
    await manager.init()
    if neighbour:
        from rolemesh.runtime import WorkerGroup

        other = WorkerGroup("neighbour", Neighbour, pool, range(replicas))
        await other.create(deadline=60)
        await other.init()
    return manager


def prompts(backend: Backend, count: int = 20, samples: int = 4) -> BatchRef:
    rows = {
        "draw": np.arange(count) + 100,
        "sample": np.zeros(count, dtype=np.int64),
        "prompt_ids": [[draw % 7] * (1 + draw % 8) for draw in range(count)],
    }
    batch = Batch.from_columns(rows).compact()
    return BatchRef.from_blocks([(backend.put(batch), block_meta(batch))]).repeat(samples)


async def read(backend: Backend, written: BatchRef) -> Batch:
    refs, assembly = written.assembly(WRITES)
    return assemble(assembly, await backend.fetch(refs, 60))


def check(found: Batch, sent: BatchRef, version: int = 3) -> None:
    """Every row is there once, in the order sent, with its own answer."""
    assert np.array_equal(found.ids, sent.ids)
    for (draw, sample), tokens, logprobs in zip(
        found.ids.tolist(), found.rows("response_ids"), found.rows("rollout_logprobs"), strict=True
    ):
        expected, numbers = answer(Request(id=(draw, sample), prompt_ids=[]), None)  # type: ignore[arg-type]
        assert (list(tokens), list(logprobs)) == (expected, numbers)
    assert set(found.scalars("weight_version")) == {version}
    assert set(found.scalars("weight_spans")) == {None}


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_F13_rows_come_back_in_their_order_whoever_answers_them(replicas: int) -> None:
    backend, told = SimulatedBackend(durations={"hand_in": 5.0, "generate": 5.0}), Told()

    async def main() -> None:
        manager = await started(backend, replicas, told)
        assert await manager.load_weights(3) == [3] * replicas
        sent = prompts(backend)
        check(await read(backend, await manager.generate(sent, **SETTINGS)), sent)
        check(await read(backend, await manager.generate(sent.take(range(30)[::-1]), **SETTINGS)), sent.take(range(30)[::-1]))

    backend.run(main())
    assert len(told.of("generate")) == 2
    assert not told.of("hand_in") + told.of("take_on")
    record = told.of("generate")[0]
    assert set(record.processes) == {f"pool-{replica}.1" for replica in range(replicas)}
    values = record.metrics.reduce()
    if replicas == 1:
        assert (len(record.replies), record.busy) == (1, 5.0), "one replica is one call"
        return
    assert record.busy == pytest.approx(record.ended - record.started), "the busiest replica is never idle"
    assert sum(reply.ended - reply.started for reply in record.replies) > 1.5 * record.busy
    assert sum(values[f"rollout/requests/{replica}"] for replica in range(replicas)) == 80
    lengths = [len(answer(Request(id=(draw, sample), prompt_ids=[]), None)[0]) for draw in range(100, 120) for sample in range(4)]  # type: ignore[arg-type]
    assert sum(values[f"rollout/tokens/{replica}"] for replica in range(replicas)) == sum(lengths)
    assert min(values[f"rollout/requests/{replica}"] for replica in range(replicas)) > 0
    assert Rollout.most <= 6 + 3, "no replica holds more than 1.5 rows a slot, and the rest of a prompt"
    for taken in Rollout.taken.values():
        draws = [draw for draw, _ in taken]
        starts = [place for place in range(len(draws)) if place == 0 or draws[place] != draws[place - 1]]
        assert all(len({sample for _, sample in taken[start : start + 2]}) == 2 for start in starts), "answers to a prompt stay together"
    assert not told.texts


@pytest.mark.parametrize("method", ["take_on", "hand_in"])
@pytest.mark.parametrize("kind", ["death", "hang", "lost_reply"])
def test_prompts_of_a_replica_that_dies_or_is_late_go_to_others(kind: Any, method: str) -> None:
    faults = Faults(script=[Fault(kind=kind, method=method, rank=1, nth=2)])
    backend, told = SimulatedBackend(durations={"hand_in": 5.0}, faults=faults), Told()

    async def main() -> None:
        manager = await started(backend, 3, told)
        await manager.load_weights(3)
        sent = prompts(backend)
        check(await read(backend, await manager.generate(sent, **SETTINGS)), sent)
        (text,) = told.texts
        assert text.startswith("rollout rank 1 serves no more, 2 of 3 do: ")
        before = [process.spec.name for process in manager.processes]
        check(await read(backend, await manager.generate(sent, **SETTINGS)), sent)  # the same weights: it takes them before it serves
        assert told.texts[1] == "rollout rank 1 serves again"
        after = [process.spec.name for process in manager.processes]
        assert (before[1], after[1]) == ("pool-1.1", "pool-1.2")
        assert [before[0], before[2]] == [after[0], after[2]], "the others keep their processes"
        assert await manager.load_weights(4) == [4, 4, 4]
        values = told.of("generate")[-1].metrics.reduce()
        assert values["rollout/requests/1"] > 0

    backend.run(main())


def test_a_replica_that_shares_its_process_is_not_replaced_and_comes_back_when_it_is_idle() -> None:
    faults = Faults(script=[Fault(kind="slow", method="hand_in", rank=1, nth=1), Fault(kind="death", method="hand_in", rank=0, nth=4)],
                    slow_seconds=500)  # fmt: skip
    backend, told = SimulatedBackend(durations={"hand_in": 5.0}, faults=faults), Told()

    async def main() -> None:
        manager = await started(backend, 3, told, neighbour=True)
        await manager.load_weights(3)
        sent = prompts(backend)
        check(await read(backend, await manager.generate(sent, **SETTINGS)), sent)
        assert len(told.texts) == 2
        check(await read(backend, await manager.generate(sent, **SETTINGS)), sent)  # rank 1 still computes
        assert len(told.texts) == 2
        await backend.sleep(1000)
        assert await manager.load_weights(4) == [4, 4], "rank 0 is dead for good"
        assert told.texts[2:] == ["rollout rank 1 serves again"]
        check(await read(backend, await manager.generate(sent, **{**SETTINGS, "version": 4})), sent, version=4)
        assert all(process.spec.name.endswith(".1") for process in manager.processes)

    backend.run(main())


def test_a_replica_that_dies_while_it_takes_weights_is_left_out_and_replaced() -> None:
    backend, told = SimulatedBackend(faults=Faults(script=[Fault(kind="death", method="load_weights", rank=0, nth=2)])), Told()

    async def main() -> None:
        manager = await started(backend, 2, told)
        await manager.load_weights(2)
        assert await manager.load_weights(3) == [3]
        sent = prompts(backend)
        check(await read(backend, await manager.generate(sent, **SETTINGS)), sent)
        assert await manager.load_weights(4) == [4, 4]

    backend.run(main())


@pytest.mark.parametrize("replicas", [1, 2])
def test_when_all_have_died_they_are_replaced_and_not_for_ever(replicas: int) -> None:
    method = "generate" if replicas == 1 else "hand_in"
    deaths = [Fault(kind="death", method=method, nth=nth) for nth in range(2, 20)]
    backend, told = SimulatedBackend(faults=Faults(script=deaths)), Told()

    async def main() -> None:
        manager = await started(backend, replicas, told)
        await manager.load_weights(3)
        sent = prompts(backend, count=2 * replicas)
        check(await read(backend, await manager.generate(sent, **SETTINGS)), sent)
        with pytest.raises(WorkerDied):
            await manager.generate(sent, **SETTINGS)
        assert [replica.replaced for replica in manager.replicas] == [REPLACEMENTS] * replicas
        with pytest.raises(WorkerDied):
            await manager.load_weights(4)

    backend.run(main())


def test_a_request_that_breaks_every_engine_is_told_and_does_not_cost_all_replicas() -> None:
    backend, told = SimulatedBackend(), Told()
    Rollout.broken = (103, 1)

    async def main() -> None:
        manager = await started(backend, 4, told)
        await manager.load_weights(3)
        with pytest.raises(WorkerError, match="this prompt breaks the engine"):
            await manager.generate(prompts(backend), **SETTINGS)
        assert len([replica for replica in manager.replicas if replica.out is None]) == 2
        Rollout.broken = None
        sent = prompts(backend)
        check(await read(backend, await manager.generate(sent, **SETTINGS)), sent)  # nothing of the round before is left in an engine
        assert all(replica.out is None for replica in manager.replicas)

    backend.run(main())


def test_a_slow_replica_gets_less() -> None:
    slow = [Fault(kind="slow", method="hand_in", rank=0, nth=nth) for nth in range(1, 40)]
    backend, told = SimulatedBackend(durations={"hand_in": 5.0}, faults=Faults(script=slow, slow_factor=4, slow_seconds=0)), Told()

    async def main() -> None:
        manager = await started(backend, 2, told)
        await manager.load_weights(3)
        sent = prompts(backend)
        check(await read(backend, await manager.generate(sent, **SETTINGS)), sent)

    backend.run(main())
    values = told.of("generate")[0].metrics.reduce()
    assert 0 < values["rollout/requests/0"] < 0.5 * values["rollout/requests/1"]


def test_rounds_go_one_after_the_other_and_do_not_wait_for_ever() -> None:
    backend, told = SimulatedBackend(durations={"hand_in": 5.0}), Told()

    async def main() -> None:
        import asyncio

        manager = await started(backend, 2, told, call=8.0)
        await manager.load_weights(3)
        sent = prompts(backend)
        rounds = [asyncio.ensure_future(manager.generate(sent, **SETTINGS)) for _ in range(2)]
        check(await read(backend, await rounds[0]), sent)
        with pytest.raises(DeadlineExceeded, match="the rollout round under way"):
            await rounds[1]

    backend.run(main())


@pytest.mark.parametrize("seed", range(4))
def test_with_faults_at_random_answers_are_right_or_the_run_says_why(seed: int) -> None:
    rates = {"death": 0.006, "hang": 0.003, "lost_reply": 0.003, "slow": 0.1}
    faults = Faults(seed=seed, rates=rates, methods=frozenset(["take_on", "hand_in", "load_weights"]))  # type: ignore[arg-type]
    backend, told = SimulatedBackend(durations={"hand_in": 3.0, "load_weights": 1.0}, faults=faults), Told()

    async def main() -> int:
        manager = await started(backend, 4, told)
        sent, done = prompts(backend), 0
        for version in range(4):
            try:
                held = await manager.load_weights(version)
                assert set(held) == {version}
                check(await read(backend, await manager.generate(sent, **{**SETTINGS, "version": version})), sent, version)
                done += 1
            except (WorkerDied, DeadlineExceeded):
                pass
        return done

    assert backend.run(main()) == 4


def test_H15_a_replica_with_much_more_than_the_others_is_told() -> None:
    backend = SimulatedBackend()
    batch = prompts(backend)
    round_ = Round(batch, replicas=8, slots=4, answer=5.0)
    assert {index: len(rows) for index, rows in round_.assign([6]).items()} == {6: 8}
    assert "rollout replica 6 had 8 requests of 8, 8.0 times the mean of 8" in round_.uneven()
    even = Round(batch, replicas=8, slots=4, answer=5.0)
    assert {len(rows) for rows in even.assign(range(8)).values()} == {8}
    assert even.uneven() == ""
    assert even.metrics().reduce()["rollout/requests/7"] == 8


@pytest.mark.parametrize("samples", [1, 4])
def test_pieces_cost_no_step_of_the_engine(samples: int) -> None:
    backend = SimulatedBackend()
    batch = prompts(backend, count=80 // samples, samples=samples)
    requests = [Request(id=(draw, sample), prompt_ids=[1]) for draw, sample in batch.ids.tolist()]
    sampling = Sampling(temperature=1.0, max_new_tokens=12, stop_token_ids=(END,), seed=0)

    def engine() -> FakeEngine:
        made = FakeEngine(None, slots=8, max_prompt_tokens=1, max_response_tokens=12, answer=answer)
        made.load_weights([], 0)
        return made

    def run(steps_of: FakeEngine, at_least: int) -> tuple[int, list[tuple[int, int]]]:
        steps, done = 0, list[tuple[int, int]]()
        while steps_of.unfinished and len(done) < at_least:
            done += [completion.id for completion in steps_of.step()]
            steps += 1
        return steps, done

    whole, piecewise = engine(), engine()
    whole.add(requests, sampling)
    expected, _ = run(whole, len(requests))
    round_, steps, calls = Round(batch, replicas=1, slots=8, answer=5.0), 0, 0
    while not round_.done:
        piecewise.add([requests[row] for row in round_.assign([0])[0]], sampling)
        more, done = run(piecewise, round_.at_least())
        round_.take(0, answers_to(done))
        steps, calls = steps + more, calls + 1
    assert (steps, calls > 20) == (expected, True)


def answers_to(ids: list[tuple[int, int]]) -> BatchRef:
    rows = Batch.from_columns(
        {"draw": [draw for draw, _ in ids], "sample": [sample for _, sample in ids], "response_ids": [[1]] * len(ids)}
    )
    return BatchRef.from_blocks([("block", block_meta(rows))])


def context() -> WorkerContext:
    return WorkerContext(group="rollout", rank=0, world_size=1, local_rank=0, local_world_size=1, node="n", address="127.0.0.1")


def test_a_round_that_was_given_up_leaves_nothing_in_the_engine() -> None:
    worker = Rollout(context(), config=config())
    worker.load()
    worker.load_weights(3)
    rows = Batch.from_columns({"draw": [1, 2], "sample": [0, 0], "prompt_ids": [[1], [2]]})
    worker.take_on(rows, round="a", **SETTINGS)
    worker.take_on(rows, round="b", **SETTINGS)  # equal ids: refused if those of the first were still there
    assert sorted(worker.hand_in(round="b", at_least=9).ids[:, 0].tolist()) == [1, 2]
    for late in ("a", "b"):
        with pytest.raises(RuntimeError, match=f"round {late} has no request here"):
            worker.hand_in(round=late, at_least=1)
    worker.take_on(rows, round="c", **SETTINGS)
    worker.load_weights(4)
    assert worker.health().running + worker.health().queued == 0
    worker.sleep(keep_weights=True)
    with pytest.raises(Exception, match="holds weight version -1"):
        worker.take_on(rows, round="d", **{**SETTINGS, "version": 4})
    assert worker.wake() == 4


def test_a_death_of_the_actor_that_gives_the_weights_is_nobodys_fault_here() -> None:
    faults = Faults(script=[Fault(kind="death", method="hand_in", rank=1, nth=1)])
    backend, told, dead = SimulatedBackend(faults=faults), Told(), False
    error = WorkerDied(group="actor", rank=0, node="n", pid=1, method="publish", original_type="Killed", original_message="gone")

    async def main() -> None:
        nonlocal dead
        manager = await started(backend, 2, told)

        async def give(ranks: Sequence[int]) -> dict[int, int]:
            if dead:
                raise error
            return dict(zip(ranks, await manager.call("load_weights", 3, ranks=ranks), strict=True))

        assert await manager.serve(give) == [3, 3]
        await manager.generate(prompts(backend), **SETTINGS)
        dead = True
        with pytest.raises(WorkerDied, match="actor rank 0"):
            await manager.generate(prompts(backend), **SETTINGS)
        with pytest.raises(WorkerDied, match="actor rank 0"):
            await manager.serve(give)

    backend.run(main())
    assert not [text for text in told.texts if "stays out" in text]
