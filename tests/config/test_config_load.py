"""Recipes, overrides and what is said about wrong ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.config import RENAMED, Config, dump_config, load_config, recipe_names
from rolemesh.config.reference import option_names
from rolemesh.config.schema import AlgorithmConfig, RewardConfig, RoleConfig, SftConfig, TrainerConfig
from rolemesh.errors import ConfigError, Problem


@pytest.fixture
def recipe(tmp_path):
    def write(text: str, name: str = "my.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def problems(recipe: str | None, *overrides: str, **more) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides, **more)
    found = {problem.subject: problem for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems), "one problem for each subject"
    assert all(problem.remedy for problem in found.values())
    text = str(caught.value)
    assert "pydantic" not in text
    assert "validation" not in text.lower()
    assert "Traceback" not in text
    return found


def test_empty_recipe_gives_the_defaults(recipe):
    assert load_config(recipe("")) == Config()


def test_recipe_is_laid_over_the_defaults(recipe):
    config = load_config(recipe("trainer: {steps: 5}\nreward: [{name: exact}]\nseed: 3\n"))
    assert config == Config(trainer=TrainerConfig(steps=5), reward=(RewardConfig(name="exact"),), seed=3)


def test_no_recipe_is_the_demo():
    assert load_config(None) == load_config("demo")
    assert "demo" in recipe_names()


def test_roles_of_a_recipe_replace_the_default_and_dotted_keys_extend(recipe):
    path = recipe("roles: {actor: {pool: a}, rollout: }\npools: {a: {nodes: [1]}}\n")
    config = load_config(path)
    assert config.roles == {"actor": RoleConfig(pool="a"), "rollout": RoleConfig()}
    assert list(config.pools) == ["a"]
    config = load_config(path, ["roles.critic.pool=a", "roles.actor.workers=3", "pools.b.nodes=[2, 1]"])
    assert config.roles["critic"] == RoleConfig(pool="a")
    assert config.roles["actor"] == RoleConfig(pool="a", workers=3)
    assert config.pools["a"].nodes == (1,)
    assert config.pools["b"].nodes == (2, 1)
    assert list(load_config(path, ["roles={x: {worker: 'm:W'}}"]).roles) == ["x"]


def test_overrides_of_every_form(recipe):
    config = load_config(
        recipe("reward: [{name: exact}, {name: math_verify}]\n"),
        [
            "trainer.steps=5",
            "trainer.learning_rate=1e-3",
            "pools.main.nodes=[2]",
            "reward.0.threshold=1",
            "reward.2.name=my_pkg.rewards:score",
            "trainer.betas.1=0.95",
            "data.options.max_terms=2",
            "data.options.note=no",
            "trainer.max_grad_norm=null",
            "trainer={epochs: 2}",
        ],
    )
    assert (config.trainer.steps, config.trainer.epochs) == (5, 2)
    assert config.trainer.learning_rate == 1e-3
    assert config.pools["main"].nodes == (2,)
    assert [reward.name for reward in config.reward] == ["exact", "math_verify", "my_pkg.rewards:score"]
    assert config.reward[0].threshold == 1.0
    assert config.trainer.betas == (0.9, 0.95)
    assert config.trainer.max_grad_norm is None
    assert config.data.options == {"max_terms": 2, "note": "no"}


def test_text_options_take_the_text_as_it_stands(recipe):
    empty = recipe("")
    assert load_config(empty, ["data.prompt_template=Q: {prompt} # A="]).data.prompt_template == "Q: {prompt} # A="
    assert load_config(empty, ["data.prompt_template='{prompt}\\n'"]).data.prompt_template == "{prompt}\\n"
    assert load_config(empty, ['data.prompt_template="{prompt}\\n"']).data.prompt_template == "{prompt}\n"
    assert load_config(empty, ["name=5"]).name == "5"
    assert load_config(empty, ["data.eval=null"]).data.eval is None


def test_H04_optional_nested_keys_need_no_prefix(recipe):
    empty = recipe("")
    config = load_config(empty, ["sft.steps=5", "algorithm.dual_clip=3", "reward.0.options.strict=true"])
    assert config.sft == SftConfig(steps=5)
    assert config.algorithm == AlgorithmConfig(dual_clip=3.0)
    assert config.reward[0].options == {"strict": True}
    assert load_config(empty, ["sft.steps=5", "sft=null"]).sft is None
    for prefix in ("+", "++", "~", "--"):
        found = problems(empty, f"{prefix}sft.steps=5")
        assert "Write sft.steps=5" in found[f"override '{prefix}sft.steps=5'"].remedy


def test_unknown_keys_name_their_place_and_the_nearest_key(recipe):
    path = recipe("trainr: {steps: 3}\ntrainer: {lerning_rate: 1}\nalgorithm: {learning_rate: 1e-3}\npools: {main: {node: [1]}}\n")
    found = problems(path, "roles.actor.wokers=2", "optimizer={weight_decay: 1}", "trainer.lr=1", "zzzz=1")
    remedies = {subject: problem.remedy for subject, problem in found.items()}
    assert remedies["trainr"] == "Did you mean trainer?"
    assert remedies["trainer.lerning_rate"] == "Did you mean trainer.learning_rate?"
    assert remedies["algorithm.learning_rate"].startswith("Did you mean trainer.learning_rate")
    assert remedies["pools.main.node"] == "Did you mean pools.main.nodes?"
    assert remedies["roles.actor.wokers"].startswith("Did you mean roles.actor.worker")
    assert remedies["optimizer"] == "Did you mean trainer.weight_decay?"
    assert "trainer.learning_rate" in remedies["trainer.lr"]
    assert remedies["zzzz"].startswith("Options of the top level: name, seed")
    assert len(found) == 8


def test_a_key_of_another_section_is_found_there(recipe):
    assert problems(recipe(""), "algorithm.weight_decay=1")["algorithm.weight_decay"].remedy == "Did you mean trainer.weight_decay?"


@pytest.mark.parametrize(
    ("override", "subject", "need"),
    [
        ("trainer.steps=0", "trainer.steps", "must be a whole number above 0"),
        ("trainer.steps=1.5", "trainer.steps", "must be a whole number above 0"),
        ("trainer.steps=true", "trainer.steps", "must be a whole number above 0"),
        ("trainer.steps='5'", "trainer.steps", "must be a whole number above 0"),
        ("trainer.save_every=-1", "trainer.save_every", "must be a whole number of at least 0"),
        ("rollout.top_p=1.5", "rollout.top_p", "must be a number above 0 and of at most 1"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip", "must be a number above 1 or null"),
        ("data.shuffle=yes", "data.shuffle", "must be true or false"),
        ("trainer.schedule=cosin", "trainer.schedule", "must be one of constant, linear, cosine"),
        ("trainer.betas=[0.9]", "trainer.betas", "must be a list of 2 items, each a number"),
        ("pools.main.nodes=[1, -1, x]", "pools.main.nodes", "must be a list, each item a whole number of at least 0 or 'auto'"),
        ("pools.main.nodes=2", "pools.main.nodes", "must be a list, each item a whole number of at least 0 or 'auto'"),
        ("roles.actor.workers=many", "roles.actor.workers", "must be a whole number above 0 or 'auto'"),
        ("pools.main=3", "pools.main", "must be a mapping of options"),
        ("trainer=3", "trainer", "must be a mapping of options"),
        ("roles=[actor]", "roles", "must be a mapping of names to options"),
        ("reward={name: exact}", "reward", "must be a list, each item a mapping of options"),
        ("reward=[exact]", "reward.0", "must be a mapping of options"),
        ("runs_dir=[a]", "runs_dir", "must be a path"),
        ("data.options=[1]", "data.options", "must be a mapping of names to values"),
        ("rollout.temperature=.nan", "rollout.temperature", "must be a number of at least 0"),
        ("rollout.temperature=.inf", "rollout.temperature", "must be a number of at least 0"),
        ("rollout.temperature=1e999", "rollout.temperature", "must be a number of at least 0"),
        ("trainer.steps.x=1", "trainer.steps.x", "trainer.steps holds a single value and has no parts"),
        ("trainer.betas.2=1", "trainer.betas.2", "the list has 2 items, indexes 0 to 1"),
        ("reward.5.name=exact", "reward.5.name", "the list has 1 items, indexes 0 to 0"),
        ("reward.x.name=exact", "reward.x.name", "the list has 1 items, indexes 0 to 0"),
        ("trainer.steps=[", "trainer.steps", "the value must be YAML"),
        ("trainer.steps", "override 'trainer.steps'", "must look like key=value"),
        ("=5", "override '=5'", "must look like key=value"),
        ("trainer..steps=5", "override 'trainer..steps=5'", "must look like key=value"),
    ],
)
def test_wrong_values_are_told_in_plain_words(recipe, override, subject, need):
    found = problems(recipe(""), override)
    assert list(found) == [subject]
    assert found[subject].need.startswith(need)


def test_remedies_of_wrong_values(recipe):
    empty = recipe("")
    short = problems(empty, "trainer.betas=[0.9]")["trainer.betas"]
    assert (short.free, short.remedy) == ("[0.9]", "The default is [0.9, 0.999]")
    assert problems(empty, "rollout.serve=true")["rollout.serve"].remedy == "Write for example rollout.serve={}"
    assert problems(empty, "model.lora=16")["model.lora"].remedy == "Write for example model.lora={rank: ...}"
    for override, value in (("environment.tools", "calculator"), ("model.lora.target_modules", "q_proj"), ("pools.main.nodes", "2")):
        assert problems(empty, f"{override}={value}")[override].remedy == f"Put it into a list: {override}=[{value}]"
    assert problems(empty, "pools.main.nodes=-2")["pools.main.nodes"].remedy == "The default is 'auto'"
    assert problems(empty, "trainer.schedule=cosin")["trainer.schedule"].remedy == "Did you mean 'cosine'?"
    assert problems(empty, "reward={name: exact}")["reward"].remedy == "Put it into a list: reward=[{name: exact}]"
    assert problems(recipe("name: 5"))["name"].remedy == 'Put it in quotes: "5"'


def test_all_problems_come_at_once(recipe):
    path = recipe("trainer: {steps: x}\nmodle: {}\n")
    found = problems(path, "rollout.top_p=2", "sft.steps=", "bad", "data.size=[")
    assert set(found) == {"trainer.steps", "modle", "rollout.top_p", "sft.steps", "override 'bad'", "data.size"}


def test_a_wrong_recipe_value_is_told_even_below_an_override(recipe):
    assert list(problems(recipe("trainer: 3\nroles: 4\nreward: 5\n"), "trainer.steps=5", "roles.x.pool=a", "reward.0.name=a")) == [
        "reward",
        "roles",
        "trainer",
    ]


def test_unknown_recipe_names_the_nearest(tmp_path):
    (tmp_path / "demo.yaml").write_text("", encoding="utf-8")
    (tmp_path / "long.yaml").write_text("", encoding="utf-8")
    found = problems("demp", recipes_dir=tmp_path)["recipe"]
    assert "demo, long" in found.need
    assert "Did you mean 'demo'?" in found.remedy
    assert "did you mean" in problems(str(tmp_path / "demmo.yaml"))["recipe"].remedy.lower()
    assert "demo" in problems("nosuchdir/x.yaml")["recipe"].remedy


def test_yaml_errors_name_the_line(recipe):
    path = recipe("name: a\ntrainer:\n  steps: [1\nseed: 1\n")
    (subject,) = problems(path)
    assert subject.startswith(f"{path} line ")
    assert subject.split()[-3] in ("3,", "4,")
    (subject,) = problems(recipe("name: a\n\tseed: 1\n"))
    assert " line 2, " in subject


def test_duplicate_keys_are_refused(recipe):
    (problem,) = problems(recipe("trainer: {steps: 1}\nseed: 1\ntrainer: {epochs: 2}\n")).values()
    assert " line 3, " in problem.subject
    assert problem.free == "key 'trainer' is already given in line 1"
    (problem,) = problems(recipe("trainer:\n  steps: 1\n  steps: 2\n")).values()
    assert " line 3, " in problem.subject


@pytest.mark.parametrize("text", ["- a\n", "just text\n", "5\n"])
def test_a_recipe_must_be_a_mapping(recipe, text):
    (problem,) = problems(recipe(text)).values()
    assert problem.need == "must be a mapping of sections"


def test_H18_renamed_options_raise_with_the_new_name(recipe, monkeypatch):
    monkeypatch.setitem(RENAMED, "algorithm.num_generations", "algorithm.group_size")
    monkeypatch.setitem(RENAMED, "pools.<pool>.slots", "pools.<pool>.nodes")
    found = problems(recipe("algorithm: {num_generations: 2}\n"), "pools.big.slots=[2]")
    assert found["algorithm.num_generations"].need == "was renamed to algorithm.group_size"
    assert found["pools.big.slots"].need == "was renamed to pools.<pool>.nodes"


def test_dump_loads_back_equal(recipe):
    config = load_config(
        recipe(""),
        [
            "data.options={text: 'no', number: '1e-5', real: 1e-5, deep: {list: [1, 'null', true], time: '1:30', octal: '010'}}",
            'data.prompt_template="{prompt}: # \\n  x "',
            "sft.steps=1",
            "reward.1.name=my_pkg:f",
            "trainer.weight_decay=1e-7",
            "pools.gpu={nodes: [8, 4], gpus: 1}",
            "name=on",
        ],
    )
    assert config.data.options["number"] == "1e-5"
    assert config.data.options["real"] == 1e-5
    assert load_config(recipe(dump_config(config), "dumped.yaml")) == config


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(options=st.dictionaries(st.text(max_size=8), plain, max_size=4), template=st.text(max_size=30), rate=st.floats(0, 1e300))
def test_dump_loads_back_equal_whatever_the_values(tmp_path_factory, options, template, rate):
    base = Config()
    config = base.model_copy(
        update={
            "data": base.data.model_copy(update={"options": options, "prompt_template": template}),
            "trainer": base.trainer.model_copy(update={"learning_rate": rate}),
        }
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config


def test_config_and_plan_load_neither_torch_nor_ray():
    code = "import sys, rolemesh.config, rolemesh.plan; print([m for m in ('torch', 'ray', 'transformers', 'pyarrow') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


def test_A14_config_carries_no_rank():
    assert [name for name in option_names() if "rank" in name] == ["model.lora.rank"]  # of matrices


def test_null_takes_an_entry_of_a_mapping_away():
    assert set(load_config("demo-ppo", ["roles.ref=null"]).roles) == {"actor", "rollout", "critic", "reward"}
    assert set(load_config("demo", ["pools.spare.nodes=[1]", "pools.spare=null"]).pools) == {"main"}
    assert load_config("demo", ["roles.nobody=null"]) == load_config("demo")


def test_runs_go_into_the_working_directory():
    assert Path(load_config("demo").runs_dir) == Path("runs")
