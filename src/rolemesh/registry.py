"""Find built-ins by name and user code by import path (`my_pkg.rewards:score`); suggest the nearest name for a wrong one."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from rolemesh.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def is_import_path(text: str) -> bool:
    """True for `package.module:attribute`."""
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def load(path: str, *, subject: str) -> Any:
    """Import `package.module:attribute`. Raises ConfigError naming `subject` (the config key) when it cannot."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError.one(
            subject,
            f"import path {path!r} must name an importable attribute",
            f"{type(error).__name__}: {error}",
            "Write it as package.module:attribute and make sure the package is installed or on PYTHONPATH",
        ) from error
    return found


def resolve(name: str, builtins: Mapping[str, Any], *, subject: str) -> Any:
    """A built-in by name, or user code by import path. Raises ConfigError with the known names and the nearest one."""
    if name in builtins:
        return builtins[name]
    if is_import_path(name):
        return load(name, subject=subject)
    hint = nearest(name, builtins)
    raise ConfigError.one(
        subject,
        f"must be one of {', '.join(sorted(builtins))} or an import path like my_pkg.module:name",
        repr(name),
        f"Did you mean {hint!r}?" if hint else "",
    )
