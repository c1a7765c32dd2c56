"""Find built-ins by name and user code by import path (`my_pkg.rewards:score`); suggest the nearest name for a wrong one."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rolemesh.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'exact'? `, for a remedy to begin with; empty when no known name is close."""
    hint = nearest(name, known)
    return f"Did you mean {hint!r}? " if hint else ""


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
    except (Exception, SystemExit) as error:  # the module is foreign code, and runs as it is imported
        raise ConfigError.one(
            subject,
            f"importing {module_name!r} must not fail",
            f"{type(error).__name__}: {error}",
            f"Mend the module; `python -c 'import {module_name}'` shows where it fails",
        ) from error
    return found


def check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, subject: str, name: str, called: str) -> None:
    """Raise ConfigError unless `function` (the config's `name`) can be called with these arguments; `called` shows how it is called.

    Nothing is called here. Some callables of other languages do not say what they take; those pass.
    """
    if not callable(function):
        raise ConfigError.one(subject, f"{name} must be something to call: {called}", f"a {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError.one(subject, f"{name}{signature} is called as {called}", str(error), "Change what it takes") from error


def resolve(name: str, builtins: Mapping[str, Any], *, subject: str) -> Any:
    """A built-in by name, or user code by import path. Raises ConfigError with the known names and the nearest one.

    A built-in that is given as an import path is imported only now.
    """
    if name in builtins:
        found = builtins[name]
        return load(found, subject=subject) if isinstance(found, str) else found
    if is_import_path(name):
        return load(name, subject=subject)
    raise ConfigError.one(
        subject,
        f"must be one of {', '.join(sorted(builtins))} or an import path like my_pkg.module:name",
        repr(name),
        did_you_mean(name, builtins).rstrip(),
    )
