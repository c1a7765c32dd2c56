"""Files inside installed packages: found without running anything of the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rolemesh.config.packaged import local_path
from rolemesh.errors import ConfigError


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "package_with_files"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "data" / "train.jsonl").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def find(text):
    return local_path(text, subject="data.train")


def test_a_file_of_a_package(package):
    assert find("package:package_with_files/data/train.jsonl") == package / "data" / "train.jsonl"
    assert find("package:package_with_files/data") == package / "data"
    assert "package_with_files" not in sys.modules


def test_other_paths_are_left_as_they_are():
    assert find("some/file.jsonl") == Path("some/file.jsonl")
    assert find("~/file.jsonl") == Path.home() / "file.jsonl"


def test_a_missing_package_comes_with_the_command_that_installs_it():
    with pytest.raises(
        ConfigError, match=r"data\.train: the package no_such_package must be installed.*`pip install --no-deps no-such-package`"
    ):
        find("package:no_such_package/file.gguf")


def test_a_missing_file_is_told_its_neighbours(package):
    with pytest.raises(ConfigError, match=r"must hold data/trian\.jsonl; found data/train\.jsonl\. Did you mean 'data/train\.jsonl'"):
        find("package:package_with_files/data/trian.jsonl")


@pytest.mark.parametrize("text", ["package:", "package:package_with_files", "package:a.b/file", "package:package_with_files/../secret"])
def test_other_forms_are_refused(package, text):
    with pytest.raises(ConfigError, match=r"must have the form package:NAME/path/of/the/file"):
        find(text)
