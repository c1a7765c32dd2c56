"""The controller's loop. What each line waits for, and who unblocks it:

    draw        nobody: prompts come from the controller's own stream
    generate    rollout workers; they hold exactly the weights that `publish` gave them
    score       reward, ref and critic workers, side by side
    advantages  critic workers, if there are any; else nobody: rewards and lengths only, no tokens
    update      actor and critic workers, side by side, all mini-batches of the step in one call each
    publish     actor rank zero packs, rollout workers load; the new version is served from here on

Every name here is a function of `phases.py` over one `TrainingRun`; the token data stays with the workers all along.
"""

from __future__ import annotations

from rolemesh.training import phases
from rolemesh.training.run import TrainingRun


async def train(run: TrainingRun) -> None:
    """Train to the last step of the config, from wherever the run stands."""
    await phases.warm_start(run)
    await phases.publish(run)
    await phases.evaluate(run)
    for number in run.steps():
        await step(run)
        if run.is_due(run.config.trainer.eval_every, number):
            await phases.evaluate(run)
        if run.is_due(run.config.trainer.save_every, number):
            await phases.save(run)


async def step(run: TrainingRun) -> None:
    """One step. Its columns are let go at its end."""
    prompts = phases.draw(run)
    samples = await phases.generate(run, prompts)
    scored = await phases.score(run, samples)
    ready = await phases.advantages(run, scored)
    await phases.update(run, ready)
    await phases.publish(run)
    await phases.record(run, ready)
