"""Program that starts the Ray processes of a cluster on this machine, prints its address and ends. `RayCluster` runs it by its path.

It does what `ray start --head` does, which has no way to leave out its server for remote clients, on a fixed port, and costs a second more.
The autoscaler and the reader of worker logs, which nobody here asks for anything, are left out too.
"""

from __future__ import annotations

import json
import sys

from ray._private.node import Node
from ray._private.parameter import RayParams


def main(options: str) -> None:
    parameters = RayParams(**json.loads(options), gcs_server_port=0, include_dashboard=False, no_monitor=True, include_log_monitor=False)
    print(Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=False).address)  # noqa: T201 - what it is for


if __name__ == "__main__":
    main(sys.argv[1])
