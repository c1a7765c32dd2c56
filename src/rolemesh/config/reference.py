"""The reference page of all options, made from the schema; `docs/reference/options.md` must equal it (a test compares).

`python -m rolemesh.config.reference` writes the page to standard output.
"""

from __future__ import annotations

import inspect
import sys

from rolemesh.config.options import Option, branch, option_names, options, placeholder
from rolemesh.config.schema import Config, Section
from rolemesh.config.yaml_text import show

__all__ = ["option_names", "options_reference"]

_INTRO = """\
# Options

Generated from `src/rolemesh/config/schema.py`; do not edit. A recipe is a YAML file with these sections; on the command line any
option can be set as `key=value` with the value in YAML: `trainer.steps=5`, `pools.main.nodes=[2]`, `reward.0.threshold=1`.

What is given for a section is merged into it; what is given for `roles`, `pools`, `reward` or a single option replaces it. A dotted
key reaches inside: `roles.critic.pool=main` adds a role to those that are there.
"""


def options_reference() -> str:
    """Markdown: one table a section, one row an option, with type, default and meaning."""
    top = [option for option in options() if "." not in option.name]
    parts = [_INTRO, _table(top)]
    for name, info in Config.model_fields.items():
        found = branch(info.annotation)
        if found is None:
            continue
        prefix = name if found.kind == "section" else f"{name}.{placeholder(name, found)}"
        parts += [f"## `{prefix}`\n", f"{inspect.cleandoc(found.model.__doc__ or '')}\n"]
        if found.optional or found.kind != "section":
            default = info.get_default(call_default_factory=False)
            parts.append(f"Default of `{name}`: {_default(default)}\n")
        parts.append(_table(list(options(found.model, f"{prefix}."))))
    return "\n".join(parts).rstrip("\n") + "\n"


def _default(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"`{name}`" for name in value)
    if isinstance(value, tuple):
        return f"`[{', '.join(show(_changed(item)) for item in value)}]`"
    return "not set"


def _changed(section: Section) -> dict[str, object]:
    """The first option of a section, which names it (`{name: reasoning_gym}`)."""
    first = next(iter(type(section).model_fields))
    return {first: getattr(section, first)}


def _table(rows: list[Option]) -> str:
    lines = ["| option | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {_cell(row.words)} | `{_cell(row.default)}` | {_cell(row.help)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(options_reference())
