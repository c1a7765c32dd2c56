"""Commands that look but start nothing: plan, status, init. They load neither torch nor, but for `plan --live`, Ray."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rolemesh.cli.options import Arguments, AsJson, RunArgument, RunsDir, recipe_and_overrides
from rolemesh.config import check_config, load_config
from rolemesh.errors import ConfigError, Problem, ResourceError
from rolemesh.observe import RunDirectory, find_run
from rolemesh.observe.run_dir import ACTIVE
from rolemesh.plan import (
    RUN_HELPERS,
    Inventory,
    Plan,
    build_plan,
    check_versions,
    local_inventory,
    parse_nodes,
    plan_json_text,
    render_plan,
    with_versions,
)
from rolemesh.plan.memory import size
from rolemesh.plan.needs import with_unplaced
from rolemesh.rewards import REWARDS

REWARD_EXAMPLE = '''"""A reward of your own: name it in the recipe as `rewards:score`."""


def score(sample, **options):
    """1 for the right answer, a little for a number at all, else 0. `sample` has prompt, response, answer, task, source."""
    text = sample.response.strip()
    if text == sample.answer:
        return 1.0
    return 0.1 if text.lstrip("-").isdigit() else 0.0
'''


def plan(
    arguments: Arguments = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(help="Plan for nodes that need not exist: 2x8 is two nodes with eight GPUs each. Give it again for others."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Plan for what is free now on the cluster of `cluster.address`.")] = False,
    as_json: AsJson = False,
) -> int:
    """What would run where: roles, pools, nodes, CPUs, memory, sizes, and every problem, without starting anything."""
    config = load_config(*recipe_and_overrides(arguments))
    versions = check_versions("builtin" if nodes else config.rollout.engine)  # an engine need not be here for imagined nodes
    problems = [*check_config(config, builtins={"reward.name": list(REWARDS)}), *versions.problems]
    if nodes:  # this machine need not see what imagined ones share
        problems = [problem for problem in problems if problem.subject != "trainer.publish_folder"]
    if live and (nodes or config.cluster.address is None):
        free = f"--nodes {' '.join(nodes)}" if nodes else "none"
        problem = Problem(subject="--live", need="needs cluster.address, and no --nodes", free=free, remedy="Set cluster.address=auto")
        problems.append(problem)
    imagined = parse_nodes(nodes) if nodes else None

    def make(inventory: Inventory) -> Plan:
        return with_versions(build_plan(config, inventory, helpers=RUN_HELPERS), versions)

    if problems:
        raise ConfigError(problems=with_unplaced(problems, lambda: () if live else make(imagined or local_inventory()).problems))
    if live:
        from rolemesh.training.admission import live_plan

        found = live_plan(config, make)
    else:
        found = make(imagined or local_inventory())
    if as_json:
        typer.echo("\n".join(plan_json_text(found)))
    else:
        render_plan(found, Console(soft_wrap=False))
    return ResourceError.exit_code if found.problems else 0


def status(run: RunArgument = None, as_json: AsJson = False, runs_dir: RunsDir = Path("runs")) -> None:
    """What a run does now: roles, ranks, nodes, pids, state, current call and since when."""
    directory = find_run(runs_dir, run)
    found: dict[str, Any] = {"run": directory.name, "state": "unknown", "workers": []} | directory.read_status()
    if found["state"] in ACTIVE and not directory.is_running():
        found |= {"state": "dead", "workers": [], "pools": [], "serving": {}, "workers_until": _workers_until(directory, found)}
        found["next"] = list(_next(directory, found["workers_until"]))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _show_status(found, Console())


def _workers_until(directory: RunDirectory, found: dict[str, Any]) -> float | None:
    """Until when the workers of a run without a driver wait for its next one, in seconds of the wall clock; None where none do. On a
    cluster, where they may be on other machines, as far as its last status tells."""
    from rolemesh.runtime.janitor import waits_until

    if (until := waits_until(directory.name)) is None and "time" in found and directory.config.is_file():
        cluster = load_config(str(directory.config)).cluster
        if cluster.detached and cluster.address is not None:
            until = found["time"] + cluster.time_to_live
    return until if until is not None and until > time.time() else None


def _next(directory: RunDirectory, workers_until: float | None) -> Iterator[str]:
    """What can be done about a run whose driver is gone."""
    name = directory.name if directory.path.parent == Path("runs") else str(directory.path)
    resumed = f"`rolemesh train --resume {shlex.quote(name)}` goes on"
    if any(directory.checkpoints.glob("step-*")):
        yield f"{resumed} in them" if workers_until is not None else f"{resumed} from its newest checkpoint"
    if workers_until is not None:
        yield f"`rolemesh clean {shlex.quote(name)}` ends them"


def _show_status(found: dict[str, Any], console: Console) -> None:
    steps = f", step {found['step']}" + (f" of {found['steps']}" if "steps" in found else "") if "step" in found else ""
    phase = f", {found['phase']}" if found.get("phase") and found["state"] not in ("finished", "interrupted") else ""
    console.print(f"[bold]{found['run']}[/bold]: {found['state']}{steps}{phase}")
    if (until := found.get("workers_until")) is not None:
        told = "its driver is gone; its workers wait for the next one for"
        console.print(f"{told} {until - time.time():.0f} s more (cluster.time_to_live), then they end", soft_wrap=True, highlight=False)
    for possible in found.get("next", []):
        console.print(possible, soft_wrap=True, highlight=False)
    if serving := found.get("serving"):
        counts = "".join(f", {name} {count}" for name, count in serving.items() if name not in ("address", "under_way"))
        console.print(f"serving at {serving['address']}: answers under way {serving['under_way']}{counts}", soft_wrap=True, highlight=False)
    fields = ("group", "rank", "node", "pid", "state", "call")
    table = Table(*fields, "since")
    for worker in found["workers"]:
        since = f"{time.time() - worker['since']:.1f} s" if worker["since"] else ""
        table.add_row(*(str(worker[field]) for field in fields), since)
    if found["workers"]:
        console.print(table)
    for role, parts in found.get("memory", {}).items():
        held = ", ".join(f"{what} {size(count)}" for what, count in parts.items() if count)
        console.print(f"memory of {role}: {held or 'none of its own'}")
    for pool in found.get("pools", []):
        holds = [f"{one['who']} holds slots {', '.join(map(str, one['slots']))} for {one['seconds']:.1f} s" for one in pool["holders"]]
        waits = [f"{one['who']} has waited for {one['slots']:g} for {one['seconds']:.1f} s" for one in pool["waiting"]]
        console.print(f"pool {pool['pool']}, {pool['slots']} slots: {'; '.join(holds + waits) or 'free'}")


def _own_recipe(name: str) -> str:
    """The demo's recipe under a name of its own and with the reward that lies beside it."""
    demo = resources.files("rolemesh").joinpath("recipes/demo.yaml").read_text(encoding="utf-8")
    _, _, recipe = demo.partition("name: demo\n")
    before, reward, rest = recipe.partition("reward:\n")
    _, pools, rest = rest.partition("pools:\n")
    named = name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else "mine"
    mine = "  - name: rewards:score     # the function in rewards.py, in the folder that you start from\n"
    return f"# All options: docs/reference/options.md\nname: {named}\n{before}{reward}{mine}{pools}{rest}"


def init(folder: Annotated[Path, typer.Argument(help="Folder to write into.")] = Path()) -> None:
    """Write a recipe and a reward function of your own to start from."""
    files = {"recipe.yaml": _own_recipe(folder.resolve().name), "rewards.py": REWARD_EXAMPLE}
    present = [name for name in files if (folder / name).exists()]
    if present:
        raise ConfigError.one("init", f"{folder} must not hold {' or '.join(files)} yet", ", ".join(present), "Name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError.one("init", f"it must be possible to write into {str(folder)!r}", found, "Name another folder") from error
    typer.echo(f"Wrote {folder / 'recipe.yaml'} and {folder / 'rewards.py'}.")
    typer.echo(f"Try: cd {shlex.quote(str(folder))}; rolemesh plan recipe.yaml")
    typer.echo("Then: rolemesh train recipe.yaml")
