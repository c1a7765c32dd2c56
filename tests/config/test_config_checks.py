"""Rules between options: each broken alone, and many broken at once."""

from __future__ import annotations

import pytest

from rolemesh.config import Config, check_config, load_config, read_model_facts
from rolemesh.errors import Problem


@pytest.fixture
def check(tmp_path):
    empty = tmp_path / "empty.yaml"
    empty.write_text("", encoding="utf-8")

    def run(*overrides: str, **options) -> dict[str, Problem]:
        found = check_config(load_config(empty, overrides), **options)
        assert all(problem.remedy for problem in found)
        by_subject = {problem.subject: problem for problem in found}
        assert len(by_subject) == len(found)
        return by_subject

    return run


def test_defaults_pass():
    assert check_config(Config()) == []


def test_group_size_1_is_refused_for_grpo(check):
    problem = check("algorithm.group_size=1")["algorithm.group_size"]
    assert "at least 2" in problem.need
    assert problem.free == "1"
    assert check("algorithm.group_size=2") == {}
    assert check("algorithm.group_size=1", "algorithm.name=my_pkg.algos:Reinforce") == {}


def test_ppo_needs_a_critic_and_works_with_single_answers(check):
    problem = check("algorithm.name=ppo", "algorithm.group_size=1")["roles.critic"]
    assert problem.need == "algorithm ppo needs a critic"
    assert "roles.critic.pool=main" in problem.remedy
    assert check("algorithm.name=ppo", "algorithm.group_size=1", "roles.critic.pool=main") == {}
    assert check("algorithm.name=ppo", training=False) == {}
    assert list(check("roles.critic.pool=main")) == ["roles.critic"]


@pytest.mark.parametrize("name", ["grpo", "ppo", "my_pkg.algos:Mine"])
def test_divergence_needs_a_reference_model(check, name):
    critic = ("roles.critic.pool=main",) if name == "ppo" else ()
    given = (f"algorithm.name={name}", *critic, "algorithm.kl_coefficient=0.1")
    (problem,) = check(*given).values()
    assert problem.subject == "roles.ref"
    assert "roles.ref.pool=main" in problem.remedy
    assert check(*given, "roles.ref.pool=main") == {}


def test_an_adapter_is_not_split_over_a_row_of_ranks(check):
    split = ("roles.actor.tensor_parallel=2", "pools.main.nodes=[2]")
    problem = check(*split, "model.lora.rank=8")["roles.actor.tensor_parallel"]
    assert "must be 1 with model.lora" in problem.need
    assert check(*split) == {}
    assert check("model.lora.rank=8", "model.lora.target_modules=[q_proj]") == {}


def test_an_adapter_has_layers_and_a_rank_that_they_can_have(check):
    problem = check("model.lora.target_modules=[]")["model.lora.target_modules"]
    assert problem.need == "must name at least one layer, or be all-linear"
    hidden = read_model_facts("tiny").hidden
    problem = check(f"model.lora.rank={hidden + 1}")["model.lora.rank"]
    assert f"at most the hidden size of the model ({hidden})" in problem.need
    assert check(f"model.lora.rank={hidden}") == {}


def test_rewards_are_not_sharded(check, tmp_path):
    split = ("roles.reward.tensor_parallel=2", "pools.main.nodes=[2]")
    problem = check(*split)["roles.reward.tensor_parallel"]
    assert "functions have no model to divide" in problem.need
    assert problem.remedy == "Set roles.reward.tensor_parallel=1"
    problem = check(*split, f"reward=[{{model: {{path: {tmp_path}}}}}]")["roles.reward.tensor_parallel"]
    assert "a reward model is kept whole" in problem.need
    assert "its built-in engine" in check("roles.rollout.tensor_parallel=2", "pools.main.nodes=[2]")["roles.rollout.tensor_parallel"].need


def test_a_policy_that_is_a_classifier_is_refused(check, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"]}')
    problem = check(f"model.path={tmp_path}")["model.path"]
    assert problem.free == "Qwen2ForSequenceClassification, a classifier"
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    assert check(f"model.path={tmp_path}") == {}


def test_offloading_needs_somebody_to_leave_the_devices_to(check):
    apart = ("trainer.offload=true", "pools={a: {}, b: {}}", "roles={actor: {pool: a}, rollout: {pool: b}, reward: {pool: b}}")
    problem = check(*apart)["trainer.offload"]
    assert problem.free == "actor in pool a, rollout in pool b"
    assert check("trainer.offload=true") == {}


def test_adaptive_coefficient_needs_one_to_start_from(check):
    assert list(check("algorithm.kl_target=0.1")) == ["algorithm.kl_target"]
    assert check("algorithm.kl_target=0.1", "algorithm.kl_coefficient=0.1", "roles.ref.pool=main") == {}


def test_divergence_in_the_reward_is_for_algorithms_with_rewards_of_tokens(check):
    given = ("algorithm.kl_in=reward", "algorithm.kl_coefficient=0.1", "roles.ref.pool=main")
    assert list(check(*given)) == ["algorithm.kl_in"]
    assert check(*given, "algorithm.name=ppo", "roles.critic.pool=main") == {}


def test_model_of_the_critic_must_be_there(check, tmp_path):
    ppo = ("algorithm.name=ppo", "roles.critic.pool=main")
    problem = check(*ppo, f"algorithm.critic_path={tmp_path}/nothing")["algorithm.critic_path"]
    assert "no folder" in problem.free
    assert check(*ppo, "algorithm.critic_path=tiny") == {}
    assert check(f"algorithm.critic_path={tmp_path}/nothing") == {}, "nobody reads it"


def test_a_critic_that_warms_up_to_the_end_is_refused(check):
    ppo = ("algorithm.name=ppo", "roles.critic.pool=main", "trainer.steps=5")
    assert "below trainer.steps (5)" in check(*ppo, "algorithm.critic_warmup=5")["algorithm.critic_warmup"].need
    assert check(*ppo, "algorithm.critic_warmup=4") == {}


def test_D17_temperature_0_is_refused_for_training_only(check):
    problem = check("rollout.temperature=0")["rollout.temperature"]
    assert "above 0 for training" in problem.need
    assert check("rollout.temperature=0", training=False) == {}
    assert check("rollout.temperature=0.01") == {}


def test_a_temperature_that_no_engine_samples_at_is_refused(check):
    for temperature in ("1e-7", "2e6"):
        problem = check(f"rollout.temperature={temperature}")["rollout.temperature"]
        assert problem.need.startswith("must be within 1e-06 to 1e+06")
        assert problem.free == f"{float(temperature):g}"
        assert "1.0" in problem.remedy
        assert "must be 0 (greedy) or within" in check(f"rollout.temperature={temperature}", training=False)["rollout.temperature"].need
    for temperature in ("1e-6", "1e6"):
        assert check(f"rollout.temperature={temperature}") == {}


def test_D16_filtered_sampling_is_refused_for_training_only(check):
    found = check("rollout.top_p=0.9", "rollout.top_k=50")
    assert found["rollout.top_p"].need.startswith("must be 1 for training")
    assert found["rollout.top_k"].need.startswith("must be 0 for training")
    assert check("rollout.top_p=0.9", "rollout.top_k=50", training=False) == {}


@pytest.mark.parametrize(
    ("prompts", "parts", "near_parts", "near_prompts"),
    [
        (10, 4, "2 or 5", "8 or 12"),  # 10 = 1 * 2 * 5 * 10; multiples of 4 around 10
        (32, 5, "4 or 8", "30 or 35"),
        (7, 2, "1 or 7", "6 or 8"),
        (512, 6, "4 or 8", "510 or 516"),
    ],
)
def test_C02_batch_sizes_that_do_not_divide_name_the_nearest_that_do(check, prompts, parts, near_parts, near_prompts):
    problem = check(f"trainer.prompts_per_step={prompts}", f"trainer.minibatches={parts}")["trainer.minibatches"]
    assert problem.need == f"must divide trainer.prompts_per_step ({prompts})"
    assert problem.free == str(parts)
    assert problem.remedy == f"Nearest valid: trainer.minibatches={near_parts}, or trainer.prompts_per_step={near_prompts}"


def test_D12_fewer_prompts_than_minibatches_names_both_keys(check):
    (problem,) = check("trainer.prompts_per_step=2", "trainer.minibatches=4").values()
    assert problem.subject == "trainer.minibatches"
    assert "trainer.prompts_per_step (2)" in problem.need
    assert "trainer.prompts_per_step=4" in problem.remedy
    assert check("trainer.prompts_per_step=4", "trainer.minibatches=4") == {}


def test_schedules_need_their_own_length(check):
    problem = check("trainer.schedule=linear", "trainer.steps=50", "trainer.minibatches=2", "trainer.epochs=3")["trainer.schedule_steps"]
    assert "trainer.schedule_steps=300" in problem.remedy  # 50 steps of 2 mini-batches, 3 times
    assert check("trainer.schedule=cosine", "trainer.schedule_steps=10") == {}
    assert list(check("trainer.schedule=cosine", "trainer.schedule_steps=10", "trainer.warmup_steps=10")) == ["trainer.schedule_steps"]


@pytest.mark.parametrize("betas", ["[1.0, 0.9]", "[0.9, 1]", "[-0.1, 0.9]"])
def test_betas_lie_below_1(check, betas):
    assert list(check(f"trainer.betas={betas}")) == ["trainer.betas"]
    assert check("trainer.betas=[0, 0.99]") == {}


def test_roles_and_pools_must_fit_together(check):
    found = check("roles.critc.pool=main", "roles.judge.worker=my_pkg:Judge", "roles.actor.pool=mian", "pools.idle.nodes=[1]")
    assert set(found) == {"roles.critc", "roles.actor.pool", "pools.idle"}
    assert "'critic'" in found["roles.critc"].remedy
    assert "roles.critc.worker=" in found["roles.critc"].remedy
    assert "'main'" in found["roles.actor.pool"].remedy
    assert found["pools.idle"].need == "unused pool: no role names it"


def test_required_roles(check):
    assert set(check("roles={ref: {}}")) == {"roles.actor", "roles.rollout", "roles.reward"}


def test_pools_must_hold_slots(check):
    assert list(check("pools.main.nodes=[]")) == ["pools.main.nodes"]
    assert list(check("pools.main.nodes=[0, 0]")) == ["pools.main.nodes"]
    assert "pools" in check("pools={}")


def test_cpus_of_a_role_without_own_processes(check):
    problem = check("roles.actor.cpus=2", "roles.reward.cpus=2")["roles.actor.cpus"]
    assert "pools.main.cpus" in problem.remedy
    assert list(check("roles.actor.processes=2", "roles.reward.processes=2")) == ["roles.actor.processes"]


def test_local_backend_runs_one_actor(check):
    assert list(check("backend=local", "roles.actor.workers=2", "roles.rollout.workers=2")) == ["roles.actor.workers"]
    assert check("backend=local", "roles.actor.workers=1") == {}


def test_data_sources(check, tmp_path):
    (tmp_path / "train.jsonl").write_text("{}", encoding="utf-8")
    (tmp_path / "train.csv").write_text("", encoding="utf-8")
    assert check(f"data.train={tmp_path / 'train.jsonl'}") == {}
    assert "'train.jsonl'" in check(f"data.train={tmp_path / 'trian.jsonl'}")["data.train"].remedy
    assert ".parquet or .jsonl" in check(f"data.train={tmp_path / 'train.csv'}")["data.train"].need
    assert "reasoning_gym:chain_sum" in check("data.train=chain_sum")["data.train"].remedy
    wrong_scheme = check("data.train=reasoning_gim:chain_sum", "data.eval=hf:gsm8k")
    assert "reasoning_gym:chain_sum" in wrong_scheme["data.train"].remedy
    assert wrong_scheme["data.eval"].free == "'hf'"
    assert "name a reasoning-gym task" in check("data.train='reasoning_gym:'")["data.train"].need


def test_prompt_template_holds_the_prompt(check):
    assert list(check("data.prompt_template=Question:")) == ["data.prompt_template"]
    assert check("data.prompt_template=Q {prompt}") == {}


def test_model_paths(check, tmp_path):
    assert "'tiny'" in check("model.path=tinny")["model.path"].remedy
    assert "config.json" in check(f"model.path={tmp_path}")["model.path"].free
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert check(f"model.path={tmp_path}") == {}
    assert list(check("model.tokenizer=nowhere")) == ["model.tokenizer"]


def test_import_paths_are_checked_without_importing(check):
    found = check(
        "roles.actor.worker=my_pkg.Worker",
        "reward=[{name: my_pkg.rewards.score}, {name: no_such_package:score}, {name: exact}]",
        "rollout.engine=my engine",
        "trainer.sinks=[tensorboard, 'a:b:c']",
    )
    assert set(found) == {"roles.actor.worker", "reward.0.name", "rollout.engine", "trainer.sinks.1"}
    assert "my_pkg.rewards:score" in found["reward.0.name"].remedy


def test_known_names_are_checked_when_given(check):
    known = {"reward.name": ["exact", "math_verify"], "algorithm.name": ["grpo"], "rollout.engine": ["builtin"]}
    found = check("reward=[{name: exat}, {name: a:b}]", "algorithm.name=gppo", builtins=known)
    assert set(found) == {"reward.0.name", "algorithm.name"}
    assert "one of exact, math_verify" in found["reward.0.name"].need
    assert "'exact'" in found["reward.0.name"].remedy


def test_rewards_must_say_something(check):
    assert list(check("reward=[]")) == ["reward"]
    assert list(check("reward=[{name: exact, weight: 0}]")) == ["reward"]


def test_names_become_folders_and_processes(check):
    assert "name" in check("name=a/b")
    assert "roles" in check("roles={actor: {}, rollout: {}, reward: {}, 'a b': {worker: 'm:W'}}")


def test_all_problems_in_one_go(check):
    found = check(
        "algorithm.group_size=1",
        "rollout.temperature=0",
        "rollout.top_p=0.5",
        "trainer.prompts_per_step=10",
        "trainer.minibatches=3",
        "trainer.schedule=linear",
        "trainer.betas=[2, 2]",
        "roles.x.pool=y",
        "model.path=nowhere",
        "data.train=nothing.jsonl",
        "data.prompt_template=x",
        "reward=[]",
    )
    assert len(found) == 12  # one for each override but minibatches with prompts, and two for roles.x: no worker class, no such pool


def test_bfloat16_and_deterministic_go_together(check):
    assert check("model.dtype=bfloat16", "deterministic=true") == {}


def test_a_publication_waits_for_requests_less_than_a_call_may_take(check):
    assert "deadlines.call" in check("rollout.serve={in_flight: wait, patience: 60}", "deadlines.call=60")["rollout.serve.patience"].need
    assert check("rollout.serve={in_flight: wait, patience: 59}", "deadlines.call=60") == {}
    assert check("rollout.serve={patience: 60}", "deadlines.call=60") == {}


def test_detached_needs_processes(check):
    problem = check("cluster.detached=true", "backend=local")["cluster.detached"]
    assert (problem.need, problem.free) == ("needs worker processes", "backend=local")
    assert check("cluster.detached=true") == {}


def test_the_folder_for_weights_must_be_there_and_is_not_made(check, tmp_path):
    folder = tmp_path / "shared"
    problem = check(f"trainer.publish_folder={folder}")["trainer.publish_folder"]
    assert problem.free == f"no folder {folder}"
    assert not folder.exists()
    folder.write_text("")
    assert check(f"trainer.publish_folder={folder}")["trainer.publish_folder"].free == f"{folder} is a file"
    folder.unlink()
    folder.mkdir()
    assert check(f"trainer.publish_folder={folder}") == {}
