"""`rolemesh clean`: what runs have left on this machine and in a cluster, and freeing it. Loads Ray for a cluster only."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rolemesh.cli.options import AsJson, RunsDir
from rolemesh.config import load_config
from rolemesh.errors import ConfigError, RolemeshError
from rolemesh.observe import RunDirectory, find_run

if TYPE_CHECKING:
    from rolemesh.runtime.leftovers import Leftover
    from rolemesh.runtime.ray.sweep import Standing


def clean(
    run: Annotated[str | None, typer.Argument(help="Free this run alone: path, name or its beginning.")] = None,
    runs_dir: RunsDir = Path("runs"),
    address: Annotated[
        str | None, typer.Option(help="Look into this Ray cluster too (default: that of the run, if it joined one).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Free nothing, only list.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also end RUN when it has a driver, and the driver, without saving.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what runs have left on this machine (processes, folders) and free what has no driver any more."""
    from rolemesh.runtime.leftovers import find_leftovers

    found = {left.run or str(left.folder): left for left in find_leftovers()}
    directory = find_run(runs_dir, run) if run is not None and run not in found and address is None else None
    name = directory.name if directory is not None else run
    known = found[name].address if name in found else ""
    if directory is not None and directory.config.is_file():
        known = known or load_config(str(directory.config)).cluster.address or ""
    cluster = _in_cluster(address or known, must_answer=address is not None)
    entries = [_entry(key, found.get(key), cluster.get(key)) for key in dict.fromkeys((*found, *cluster))]
    entries = [entry for entry in entries if name in (None, entry["run"])]
    for entry in entries:
        if name is not None and not force and not dry_run:
            _refuse_driven(entry, directory)
        entry["freed"] = not dry_run and (name is not None or entry["state"] == "left")
        if entry["freed"]:
            _free(entry, found.get(entry["run"]), address or known)
    if as_json:
        typer.echo(json.dumps({"left": entries}, indent=2, default=str))
    else:
        _show(entries, Console(), dry_run=dry_run)


def _in_cluster(address: str, *, must_answer: bool) -> dict[str, Standing]:
    if not address:
        return {}
    from rolemesh.runtime.ray.sweep import standing

    try:
        return standing(address)
    except RolemeshError as error:
        if must_answer:
            raise
        typer.echo(f"the cluster of the run does not answer, so only this machine is looked at: {error}", err=True)
        return {}


def _entry(name: str, left: Leftover | None, there: Standing | None) -> dict[str, Any]:
    here = asdict(left) if left is not None else {"state": "in the cluster", "driver": 0, "since": None, "processes": ()}
    if there is not None and there.driven and here["state"] != "driven":  # from another machine
        here |= {"state": "driven", "driver": 0}
    return {**here, "run": name, "actors": there.actors if there else [], "placement_groups": there.groups if there else []}


def _refuse_driven(entry: dict[str, Any], directory: RunDirectory | None) -> None:
    if entry["state"] == "driven" or (directory is not None and directory.is_running()):
        driver = f"process {entry['driver']}" if entry["driver"] else "one on another machine"
        raise ConfigError.one(
            "run", f"{entry['run']} must have no driver", driver, "Stop it first; --force ends it as well, without saving"
        )


def _free(entry: dict[str, Any], left: Leftover | None, address: str) -> None:
    if entry["actors"] or entry["placement_groups"]:
        from rolemesh.runtime.ray.sweep import sweep

        sweep(address, entry["run"])
    if left is not None:
        left.free()


def _why_not(entry: dict[str, Any]) -> str:
    if entry["state"] == "waiting":
        return f": it waits for its next driver (rolemesh clean {entry['run']} frees it, rolemesh train --resume goes on)"
    return ": it has a driver" if entry["state"] == "driven" else ""


def _show(entries: list[dict[str, Any]], console: Console, *, dry_run: bool) -> None:
    if not entries:
        console.print("nothing is left")
        return
    for entry in entries:
        age = f", started {(time.time() - entry['since']) / 60:.0f} min ago" if entry["since"] else ""
        memory = sum(process["bytes"] for process in entry["processes"])
        parts = [
            f"{len(entry['processes'])} processes with {memory / 1e6:.0f} MB",
            f"{entry.get('folder_bytes', 0) / 1e6:.1f} MB in files",
            f"in Ray {len(entry['actors'])} actors and {len(entry['placement_groups'])} groups",
            "freed" if entry["freed"] else "not freed" + ("" if dry_run else _why_not(entry)),
        ]
        console.print(f"[bold]{entry['run']}[/bold]: {entry['state']}{age}; {', '.join(parts)}", soft_wrap=True, highlight=False)
    if dry_run:
        console.print("nothing was freed (--dry-run)")
