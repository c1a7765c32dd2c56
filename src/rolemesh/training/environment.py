"""What of this process's environment reaches the workers, and whether the system can carry it. Called by `preflight.py`."""

from __future__ import annotations

import os

from rolemesh.config.schema import Config
from rolemesh.errors import ConfigError
from rolemesh.training.admission import joins_cluster, python_path

LONGEST_VARIABLE = 128 * 1024
"""Linux starts no program with a longer one, name and end included."""
ROOM_FOR_ARGUMENTS = 256 * 1024
"""Of the system's limit for variables and arguments together."""
SHOWN = 5


def check_environment(config: Config) -> None:
    """Workers of a cluster of the run's own inherit the whole environment; to one that is joined nothing travels but PYTHONPATH and a
    few settings. Raises ConfigError when it is too long to start a process with."""
    travels = {"PYTHONPATH": os.pathsep.join(python_path())}
    if config.backend == "local":
        return
    if not joins_cluster(config):
        travels = dict(os.environ) | travels
    sizes = {name: len(os.fsencode(f"{name}={value}")) + 1 for name, value in travels.items()}
    limit, longest, total = os.sysconf("SC_ARG_MAX") - ROOM_FOR_ARGUMENTS, max(sizes.values()), sum(sizes.values())
    if longest <= LONGEST_VARIABLE and total <= limit:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:SHOWN]
    raise ConfigError.one(
        "environment",
        f"must be short enough to start processes with: {LONGEST_VARIABLE} bytes a variable, {limit} in all",
        f"{total} bytes in all; largest: {', '.join(f'{name} {sizes[name]}' for name in largest)}",
        f"Unset or shorten {largest[0]}, or pass its content in a file",
    )
