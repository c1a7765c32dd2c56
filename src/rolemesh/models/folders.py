"""Where the files of a model are: a folder of the user, or of a built-in one. Called by the loaders of this package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from rolemesh.errors import ConfigError

BUILTIN = ("tiny",)


def model_folder(path: str, *, subject: str = "model.path") -> Path:
    """The folder behind `path`: a built-in name or an existing folder. Raises ConfigError naming `subject` (the config key)."""
    if path in BUILTIN:
        return Path(str(files("rolemesh.models") / path))
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    raise ConfigError.one(
        subject,
        f"must be a Hugging Face folder on this machine or a built-in model ({', '.join(BUILTIN)})",
        f"{path!r}, " + ("which is a file" if folder.is_file() else "which does not exist"),
        "Models are never downloaded; fetch the folder first and give its path",
    )
