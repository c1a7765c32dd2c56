"""A module that cannot be imported, in a way that an environment variable names; without it, one that leaves a thread running."""

from __future__ import annotations

import ctypes
import os
import threading
import time

match os.environ.get("BROKEN_IMPORTS"):
    case "raise":
        raise RuntimeError("no licence file")
    case "exit":
        raise SystemExit(3)
    case "segv":
        ctypes.string_at(0)
    case "hang":
        time.sleep(1000)

LOCK = threading.Lock()


def _work():
    while True:
        with LOCK:
            time.sleep(0.001)


threading.Thread(target=_work, daemon=True).start()


def locked(sample):
    with LOCK:  # held for ever in a process that was forked while the thread held it
        return float(sample.response)
