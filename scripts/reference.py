"""Write the pages of docs/reference/ anew from the code. Called by `make docs`; tests compare the pages with the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rolemesh.observe import metrics_reference

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {"metrics.md": metrics_reference}


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
