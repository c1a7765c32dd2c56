"""Two processes over gloo (this one and another) against one."""

import multiprocessing
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch.distributed import FileStore, ProcessGroupGloo
from train_support import AGGREGATIONS, algorithm, batch, critic, critic_batch, engine, largest_gap, ppo, tiny_model

from rolemesh.observe import Metrics

SHARES = {"uneven": ([0, 2, 4, 5, 7], [1, 3, 6]), "one rank has nothing": (list(range(8)), [])}


def rank_main(rank: int, folder: str) -> None:
    """Everything that is collective, results written to `folder`."""
    group = ProcessGroupGloo(FileStore(f"{folder}/store", 2), rank, 2, timedelta(seconds=120))
    data = batch()
    trainer = engine(rows=2, process_group=group)
    gradients: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for mode in AGGREGATIONS:
        prepared = algorithm(mode).prepare(data, Metrics())
        for share, rows in SHARES.items():
            gradients[mode, share] = trainer.compute_gradients(
                prepared.take(rows[rank]), algorithm(mode).loss, temperature=1.0, metrics=Metrics()
            )
    metrics, skipped = Metrics(), Metrics()
    trainer.check_replicas()
    for rows in SHARES.values():
        trainer.update(data.take(rows[rank]), algorithm().loss, temperature=1.0, metrics=metrics)
    nothing = data.with_columns({"token_weight": np.zeros(8)})
    trainer.update(nothing.take(SHARES["uneven"][rank]), algorithm().loss, temperature=1.0, metrics=skipped)
    broken = data.with_columns({"rollout_logprobs": [[float("nan")] * len(row) for row in data.rows("response_ids")]})
    trainer.update(broken.take([0] if rank == 1 else []), algorithm().loss, temperature=1.0, metrics=skipped)
    trainer.check_replicas()
    try:
        engine(tiny_model(seed=rank), process_group=group).check_replicas()
        refused = ""
    except ValueError as error:
        refused = str(error)
    found = {"gradients": gradients, "state": trainer.state(), "metrics": metrics, "skipped": skipped, "refused": refused}
    torch.save(found | critic_of_rank(rank, group), f"{folder}/{rank}.pt")


def critic_of_rank(rank: int, group: ProcessGroupGloo) -> dict[str, object]:
    """The same for the critic."""
    data, metrics, gradients = critic_batch(), Metrics(), {}
    trainer = critic(rows=2, process_group=group)
    trainer.check_replicas()
    for share, rows in SHARES.items():
        gradients[share] = trainer.compute_gradients(data.take(rows[rank]), ppo().value_loss, metrics=Metrics())
    for rows in SHARES.values():
        trainer.update(data.take(rows[rank]), ppo().value_loss, metrics=metrics)
    trainer.check_replicas()
    return {"value_gradients": gradients, "value_state": trainer.state(), "value_metrics": metrics}


def test_C01_C04_two_workers_train_as_one(tmp_path: Path):
    other = multiprocessing.get_context("spawn").Process(target=rank_main, args=(1, str(tmp_path)))
    other.start()
    try:
        rank_main(0, str(tmp_path))
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))

    check_critic(first, second)
    data = batch()
    for (mode, share), found in first["gradients"].items():
        prepared = algorithm(mode).prepare(data, Metrics())
        alone = engine().compute_gradients(prepared, algorithm(mode).loss, temperature=1.0, metrics=Metrics())
        assert largest_gap(alone, found) < 1e-6, (mode, share)
        assert largest_gap(found, second["gradients"][mode, share]) == 0, (mode, share)

    trainer, metrics = engine(), Metrics()
    for _ in SHARES:
        trainer.update(data, algorithm().loss, temperature=1.0, metrics=metrics)
    assert first["state"]["step"] == second["state"]["step"] == 2
    for name, weight in trainer.state()["model"].items():
        assert torch.equal(first["state"]["model"][name], second["state"]["model"][name]), name
        assert torch.allclose(first["state"]["model"][name], weight, rtol=0, atol=1e-5), name

    merged, alone = first["metrics"].merge(second["metrics"]).reduce(), metrics.reduce()
    assert merged.keys() == alone.keys()
    for name, value in alone.items():
        assert abs(merged[name] - value) < 1e-4 * max(1, abs(value)), name

    # A bad step of one rank is left out by both and counted once.
    skipped = first["skipped"].merge(second["skipped"]).reduce()
    assert skipped["actor/steps_skipped_empty"] == 1
    assert skipped["actor/steps_skipped_nonfinite"] == 1
    assert all("the workers hold different weights" in found["refused"] for found in (first, second))


def check_critic(first: dict, second: dict) -> None:
    """The critics of both ranks against one that saw all rows."""
    data, trainer, metrics = critic_batch(), critic(), Metrics()
    alone = trainer.compute_gradients(data, ppo().value_loss, metrics=Metrics())
    for share, found in first["value_gradients"].items():
        assert largest_gap(alone, found) < 1e-6, share
        assert largest_gap(found, second["value_gradients"][share]) == 0, share
    for _ in SHARES:
        trainer.update(data, ppo().value_loss, metrics=metrics)
    assert first["value_state"]["step"] == second["value_state"]["step"] == 2
    for name, weight in trainer.state()["model"].items():
        assert torch.equal(first["value_state"]["model"][name], second["value_state"]["model"][name]), name
        assert torch.allclose(first["value_state"]["model"][name], weight, rtol=0, atol=1e-5), name
    merged, whole = first["value_metrics"].merge(second["value_metrics"]).reduce(), metrics.reduce()
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        assert abs(merged[name] - value) < 1e-4 * max(1, abs(value)), name
