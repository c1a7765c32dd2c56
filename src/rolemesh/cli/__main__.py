"""`python -m rolemesh.cli`, and what the command `rolemesh` calls."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130


def run() -> None:
    """Run the command line. SIGTERM is taken like Ctrl-C from the first moment on; while modules are imported both end it quietly."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from rolemesh.cli.main import main
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    main()


if __name__ == "__main__":
    run()
