"""The structure of the source: layers, homes of heavy dependencies, and calls that may not occur. Each rule is tried on a planted fault."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "rolemesh"

LAYERS = [
    {"errors", "lazy", "names", "registry", "recipes", "engines"},  # recipes holds YAML files, engines two packages of layer 3
    {"config", "observe"},
    {"plan", "batch", "protocols", "models"},
    {"runtime", "algorithms", "data", "rewards", "engines.train", "engines.rollout", "weights", "serving"},
    {"environments"},  # judge by the verifiers of rewards
    {"roles"},
    {"training", "doctor", "report"},
    {"cli"},
]
LAYER = {unit: number for number, units in enumerate(LAYERS) for unit in units}
SIDEWAYS = {
    ("registry", "errors"): "a wrong name is a config error",
    ("protocols", "batch"): "seams name the types that pass through them",
    ("protocols", "plan"): "seams name the types that pass through them",
}

HOMES = {
    "ray": ("runtime/ray/",),
    "vllm": ("engines/rollout/vllm",),
    "sglang": ("engines/rollout/sglang",),
    "transformers": ("models/", "engines/"),
    "aiohttp": ("serving/",),
    "peft": ("models/lora.py",),
    "tensorboard": ("observe/sinks.py",),
    "reasoning_gym": ("data/", "rewards/"),
    "math_verify": ("rewards/",),
    "textarena": ("environments/",),
}
TORCH_FREE = ("errors.py", "names.py", "registry.py", "config/", "observe/", "plan/")
NAMED_ONLY = {"transformers", "torch"}
"""May be imported anywhere for type checkers, which costs nothing when the program runs."""

HEAVY = {"torch", "transformers", "ray", "vllm", "sglang", "reasoning_gym", "math_verify", "sympy", "pandas", "scipy", "accelerate"}
LOADS_HEAVY = (
    *("engines/train/", "weights/", "runtime/ray/", "data/generated.py", "training/export.py"),
    *(f"models/{module}.py" for module in ("copying", "formats", "load", "lora", "reward_reader", "save", "tokenizer", "verify")),
    *(f"engines/rollout/{module}.py" for module in ("builtin", "fake", "fast", "generic", "matrices", "parameters", "rows", "runner")),
    "engines/rollout/sampling.py",
    *(f"roles/{module}.py" for module in ("actor", "critic", "episodes", "ref", "reward_model", "rollout", "saving", "taker", "trained")),
    *(f"engines/rollout/{module}.py" for module in ("borrowed", "sglang", "sglang_server", "vllm")),
)
"""Modules that load what takes seconds as they are imported. All others do so when they use it, if at all: see `rolemesh.lazy`."""

SWALLOWS = {
    "runtime/host.py": "a worker's method may raise anything; it travels to the controller as a WorkerError",
    "cli/main.py": "the end of the process: the trace is printed and the exit code is ours",
    "rewards/functions.py": "a reward function may raise anything; it becomes the state of that sample",
    "runtime/ray/cluster.py": "what Ray raises in a thread of its own is raised again by the one that waits for it",
    "environments/answers.py": "an exception of a user's environment may not even be shown",
    "environments/sandbox_process.py": "what a model wrote may raise anything; the model is told",
    "environments/episodes.py": "a user's environment may raise anything; it becomes the state of that episode",
    "environments/threads.py": "what a function in a thread raises is raised again by the one that waits for it",
    "environments/tool_use.py": "a tool may raise anything; the model is told",
    "weights/intake.py": "an engine loads in a thread; what it raises there is raised again by the one that hands the weights over",
    "roles/rollout.py": "an engine may raise anything; requests from outside that it had are told so, and without any it is raised again",
    "runtime/ray/backend.py": "arguments of a call are pickled by code of their own; what it raises ends the call",
    "observe/sinks.py": "a logger of the user may raise anything; it is switched off with a warning",
}
"""Files that may catch everything without raising again: the boundaries of processes and of foreign code."""


@dataclass(frozen=True)
class Import:
    """One import statement of a file: the module that it names and whether only a type checker sees it."""

    file: str
    line: int
    module: str
    typing_only: bool


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def files(root: Path) -> list[tuple[str, ast.Module]]:
    return [(path.relative_to(root).as_posix(), parse(path)) for path in sorted(root.rglob("*.py"))]


def imports(root: Path) -> Iterator[Import]:
    """Every import at any depth. `from package import module` names the module, `from module import thing` the module as well."""
    for file, tree in files(root):
        typing_only = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [_named(root, file, node, alias.name) for alias in node.names]
            else:
                continue
            for module in found:
                yield Import(file, node.lineno, module, id(node) in typing_only)


def _named(root: Path, file: str, node: ast.ImportFrom, name: str) -> str:
    module = node.module or ""
    if node.level:
        package = ["rolemesh", *Path(file).parent.parts]
        module = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
    inside = root.joinpath(*f"{module}.{name}".split(".")[1:])
    is_module = module.split(".")[0] == "rolemesh" and (inside.with_suffix(".py").exists() or inside.is_dir())
    return f"{module}.{name}" if is_module else module


def unit(parts: tuple[str, ...]) -> str:
    """The package that a module belongs to: `engines.train`, `config`, ... and the empty text for `rolemesh` itself."""
    pair = ".".join(parts[:2])
    return pair if pair in LAYER else parts[0] if parts else ""


def edges(root: Path) -> Iterator[tuple[Import, str, str]]:
    """Imports between two packages of the project: (import, from, to)."""
    for found in imports(root):
        top, *inner = found.module.split(".")
        source = unit(Path(found.file).with_suffix("").parts if Path(found.file).name != "__init__.py" else Path(found.file).parent.parts)
        if top == "rolemesh" and inner and (target := unit(tuple(inner))) != source:
            yield found, source, target


def wrong_layers(root: Path) -> list[str]:
    wrong = []
    for found, source, target in edges(root):
        above, below = LAYER.get(source, -1), LAYER.get(target)
        where = f"{found.file}:{found.line}: {source or 'rolemesh'} imports {target}"
        if below is None or source not in LAYER:
            wrong.append(f"{where}, and one of them is in no layer")
        elif above == below and (source, target) not in SIDEWAYS:
            wrong.append(f"{where}, sideways in layer {above}")
        elif above < below:
            wrong.append(f"{where}, upward from layer {above} to {below}")
    return wrong


def cycle(root: Path) -> list[str]:
    """Packages that import each other in a ring; empty if there is none."""
    graph: dict[str, set[str]] = {}
    for _, source, target in edges(root):
        graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def away_from_home(root: Path) -> list[str]:
    wrong = []
    for found in imports(root):
        package = found.module.split(".")[0]
        if found.typing_only and package in NAMED_ONLY:
            continue
        if package in HOMES and not found.file.startswith(HOMES[package]):
            wrong.append(f"{found.file}:{found.line}: {package} belongs to {' and '.join(HOMES[package])}")
        if package == "torch" and found.file.startswith(TORCH_FREE):
            wrong.append(f"{found.file}:{found.line}: torch is not for this package")
    return wrong


RUNS_CODE = {
    "environments/sandbox_process.py": ("exec", "programs of the model, in a process that has given up all rights before"),
    "runtime/ray/host.py": ("pickle.loads", "calls and replies between processes of the cluster, which came by Ray's own pickled messages"),
}
"""Files that run what they read, by what call, and why they may."""


def forbidden_calls(root: Path) -> list[str]:
    """Waits without an end, objects that die with a worker, and code made from data."""
    wrong = []
    for file, tree in files(root):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called, keywords = ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            where = f"{file}:{node.lineno}: {called}"
            if called in ("ray.get", "ray.wait") and keywords.get("timeout", "None") == "None":
                wrong.append(f"{where} without a timeout")
            if called == "asyncio.wait_for":
                wrong.append(f"{where} forgets a cancellation in Python 3.11; use asyncio.timeout")
            if called == "ray.put" and file != "runtime/ray/backend.py":
                wrong.append(f"{where}: what a worker puts dies with it; return it instead")
            if called in ("eval", "exec", "pickle.load", "pickle.loads", "yaml.unsafe_load", "os.system"):
                if file in RUNS_CODE and called == RUNS_CODE[file][0]:
                    continue
                wrong.append(f"{where} runs what it reads")
            if called == "torch.load" and keywords.get("weights_only") != "True":
                wrong.append(f"{where} without weights_only=True runs what it reads")
    return wrong


def broad_excepts(root: Path) -> dict[str, int]:
    """Files with handlers that catch everything and go on, and how many. One that ends by raising hides nothing."""
    counts: dict[str, int] = {}
    for file, tree in files(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
                caught = ast.walk(node.type) if node.type else [ast.Name("BaseException")]
                if any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in caught):
                    counts[file] = counts.get(file, 0) + 1
    return counts


def test_imports_go_down_the_layers():
    assert wrong_layers(SOURCE) == []


def test_packages_form_no_ring():
    assert cycle(SOURCE) == []


def test_every_package_has_a_layer():
    top = {
        unit(path.relative_to(SOURCE).with_suffix("").parts)
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE or path.stem[0] != "_"
    }
    assert top - LAYER.keys() == set()


def test_heavy_dependencies_stay_at_home():
    assert away_from_home(SOURCE) == []


def test_forbidden_calls():
    assert forbidden_calls(SOURCE) == []


def test_nothing_catches_everything_outside_the_boundaries():
    assert {file for file in broad_excepts(SOURCE) if file not in SWALLOWS} == set()


def test_every_boundary_on_the_list_is_still_one():
    assert {file for file in SWALLOWS if (SOURCE / file).exists()} <= broad_excepts(SOURCE).keys()


def test_a_controller_loads_no_torch_before_it_needs_a_tokenizer():
    modules = [
        ".".join(("rolemesh", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted(SOURCE.rglob("*.py"))
        if not path.relative_to(SOURCE).as_posix().startswith(LOADS_HEAVY) and path.stem != "__main__"
    ]
    code = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\n"
    code += f"print(*sorted({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


def test_a_worker_process_loads_neither_options_nor_what_draws():
    code = "import sys, rolemesh.runtime.ray.host\n"
    code += "print(*[name for name in sys.modules if name.startswith(('rolemesh.config', 'rolemesh.plan.', 'rich', 'torch'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    nodes = {f"rolemesh.plan.{module}" for module in ("gpus", "inventory", "ledger", "schema")}
    assert set(done.stdout.split()) <= nodes, done.stderr
    assert done.returncode == 0


# The checks themselves, on planted faults.


@pytest.fixture
def plant(tmp_path):
    def write(file, text):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("config/a.py", "from rolemesh.plan import build_plan", "config/a.py:1: config imports plan, upward from layer 1 to 2"),
        ("data/a.py", "def f():\n    import rolemesh.rewards", "data/a.py:2: data imports rewards, sideways in layer 3"),
        (
            "engines/train/a.py",
            "from rolemesh.engines import rollout",
            "engines/train/a.py:1: engines.train imports engines.rollout, sideways",
        ),
        ("observe/a.py", "from ..config import schema", "observe/a.py:1: observe imports config, sideways in layer 1"),
        ("errors.py", "from rolemesh import registry", "errors.py:1: errors imports registry, sideways in layer 0"),
        ("batch/a.py", "if TYPE_CHECKING:\n    from rolemesh.protocols.engine import X", "batch/a.py:2: batch imports protocols, sideways"),
        (
            "__init__.py",
            "from rolemesh.errors import ConfigError",
            "__init__.py:1: rolemesh imports errors, and one of them is in no layer",
        ),
        ("utils/a.py", "from rolemesh.errors import ConfigError", "utils/a.py:1: utils imports errors, and one of them is in no layer"),
    ],
)
def test_wrong_layers_finds(plant, file, text, wrong):
    for package in ("engines/rollout", "config", "rewards"):
        plant(f"{package}/__init__.py", "")
    plant("registry.py", "")
    (found,) = wrong_layers(plant(file, text))
    assert found.startswith(wrong)


def test_wrong_layers_lets_pass_what_goes_down(plant):
    plant("roles/a.py", "from rolemesh.engines.train import e\nfrom rolemesh import errors\nfrom rolemesh.roles.b import x\nimport torch")
    assert wrong_layers(plant("protocols/a.py", "from rolemesh.batch import Batch")) == []


def test_cycle_finds(plant):
    plant("protocols/a.py", "from rolemesh.batch import Batch")
    assert set(cycle(plant("batch/a.py", "from rolemesh.protocols import x"))) == {"protocols", "batch"}


@pytest.mark.parametrize(
    ("file", "text", "count"),
    [
        ("roles/a.py", "def f():\n    import ray", 1),
        ("roles/a.py", "if TYPE_CHECKING:\n    from ray.actor import ActorHandle", 1),
        ("runtime/ray/a.py", "import ray", 0),
        ("training/a.py", "from transformers import AutoTokenizer", 1),
        ("training/a.py", "if TYPE_CHECKING:\n    from transformers import PreTrainedTokenizerBase", 0),
        ("plan/a.py", "def f():\n    import torch.cuda", 1),
        ("observe/a.py", "from torch.utils.tensorboard import SummaryWriter", 1),
    ],
)
def test_away_from_home_finds(plant, file, text, count):
    assert len(away_from_home(plant(file, text))) == count


@pytest.mark.parametrize(
    ("file", "text", "count"),
    [
        ("runtime/ray/a.py", "ray.get(x)", 1),
        ("runtime/ray/a.py", "ray.wait([x], timeout=None)", 1),
        ("runtime/ray/a.py", "ray.get(x, timeout=5)", 0),
        ("runtime/a.py", "asyncio.wait_for(x, 5)", 1),
        ("runtime/ray/host.py", "ray.put(x)", 1),
        ("runtime/ray/backend.py", "ray.put(x)", 0),
        ("rewards/a.py", "eval(text)", 1),
        ("rewards/a.py", "model.eval()", 0),
        ("training/a.py", "torch.load(path)", 1),
        ("training/a.py", "torch.load(path, weights_only=True)", 0),
    ],
)
def test_forbidden_calls_finds(plant, file, text, count):
    assert len(forbidden_calls(plant(file, text))) == count


@pytest.mark.parametrize(
    ("handler", "count"),
    [
        ("except:\n    pass", 1),
        ("except (OSError, Exception):\n    go_on()", 1),
        ("except BaseException:\n    free()\n    raise", 0),
        ("except OSError:\n    pass", 0),
    ],
)
def test_broad_excepts_finds(plant, handler, count):
    assert sum(broad_excepts(plant("a.py", f"try:\n    f()\n{handler}")).values()) == count
