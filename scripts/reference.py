"""Write the pages of docs/reference/ anew from the code. Called by `make docs`; a test compares the pages with the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from rolemesh.batch import columns_reference
from rolemesh.config.reference import options_reference
from rolemesh.observe import metrics_reference

FOLDER: Final = Path(__file__).parents[1] / "docs" / "reference"

_COLUMNS: Final = """\
# Columns

The columns that travel between roles, one row a sample, identified by (`draw`, `sample`). Generated from
`src/rolemesh/batch/columns.py`; do not edit.

"""


def columns_page() -> str:
    """The table of columns under a heading."""
    return _COLUMNS + columns_reference()


PAGES: Final[dict[str, Callable[[], str]]] = {
    "columns.md": columns_page,
    "metrics.md": metrics_reference,
    "options.md": options_reference,
}


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
