"""Every option of rolemesh, declared once.

The models are frozen, keyword-only and refuse unknown keys; the docstring under a field is its help text and the source of
`docs/reference/options.md`. Nothing here imports torch or Ray. Problems that concern one field are declared on the field; problems
between fields live in `config/checks.py`, so that all of them are reported in one go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from rolemesh.config.model_schema import LoraConfig as LoraConfig
from rolemesh.config.model_schema import ModelConfig as ModelConfig
from rolemesh.config.model_schema import RewardModelConfig as RewardModelConfig
from rolemesh.config.rollout_schema import EnvironmentConfig as EnvironmentConfig
from rolemesh.config.rollout_schema import RolloutConfig as RolloutConfig
from rolemesh.config.rollout_schema import ServeConfig as ServeConfig
from rolemesh.config.section import NotNegative, NotNegativeFloat, Positive, PositiveFloat
from rolemesh.config.section import Section as Section
from rolemesh.names import ACTOR, REF, REWARD


class SourceConfig(Section):
    """One source of prompts."""

    short: ClassVar[str | None] = "path"

    path: str
    """A `.parquet` or `.jsonl` file, a Hugging Face dataset saved to disk (the folder of one split), either of them inside an installed
    package (`package:NAME/FILE`), or a reasoning-gym task such as `reasoning_gym:chain_sum`."""
    weight: PositiveFloat = 1.0
    """Share of the prompts among several sources, in proportion to the weights of the others; kept exactly, not by chance."""
    name: str | None = None
    """Value of the column `source`; by default the rows' own column `source`, else the name of the file, dataset or task."""
    options: dict[str, Any] | None = None
    """Settings of the task; those of `data` when not set."""
    size: Positive | None = None
    """Number of problems of a task; that of `data` when not set."""
    prompt_key: str | None = None
    """Column with the prompt; that of `data` when not set."""
    answer_key: str | None = None
    """Column with the reference answer; that of `data` when not set."""
    prompt_template: str | None = None
    """Text around each prompt; that of `data` when not set."""

    @property
    def label(self) -> str:
        """What to call the source: its name, or that of the file, dataset or task."""
        place = Path(self.path.rpartition(":")[2])
        split_of_a_dataset = not place.suffix and (place.parent / "dataset_dict.json").is_file()
        return self.name or (place.parent.name if split_of_a_dataset else place.stem)


def spelled_out(section: type[Section], value: Any) -> Any:
    """A text where a list of sections is due, or in such a list, as the section it stands for; any other value as it is."""
    if section.short is None:
        return value
    if isinstance(value, str):
        return [{section.short: value}]
    return [{section.short: item} if isinstance(item, str) else item for item in value] if isinstance(value, list | tuple) else value


def _as_sources(value: Any) -> Any:
    listed = spelled_out(SourceConfig, value)
    return tuple(listed) if isinstance(listed, list) else listed


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_as_sources)]


class DataConfig(Section):
    """Prompts for training and evaluation."""

    train: Sources = (SourceConfig(path="reasoning_gym:chain_sum"),)
    """Where prompts come from: a `path` as below, or a list of sources, drawn by their weights."""
    eval: Annotated[tuple[SourceConfig, ...] | None, BeforeValidator(_as_sources)] = None
    """Held-out prompts, same forms as `train`. By default of every source the same task with other seeds, or rows set aside of the file;
    then at most a fifth of its prompts."""
    options: dict[str, Any] = {}
    """Settings of the reasoning-gym task, for example `{min_terms: 2, max_terms: 2}`."""
    size: Annotated[int, Field(gt=0, le=100_000_000)] = 100_000
    """Number of problems of a generated task; files bring their own."""
    eval_size: Positive = 256
    """Number of held-out prompts used for one evaluation, of several sources by their weights."""
    prompt_key: str = "prompt"
    """Column of the file that holds the prompt: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Column of the file that holds the reference answer."""
    prompt_template: str = "{prompt}"
    """Text around each prompt; `{prompt}` is replaced."""
    chat: bool = False
    """Apply the tokenizer's chat template to the prompt."""
    max_prompt_tokens: Positive = 256
    """Longest prompt, in tokens; see `overlong`."""
    max_response_tokens: Positive = 128
    """Longest answer that is generated, in tokens."""
    overlong: Literal["error", "left", "right", "drop"] = "error"
    """Prompts above `max_prompt_tokens`: refuse to start, cut on the left or right, or drop them (counted and printed)."""
    shuffle: bool = True
    """Draw prompts in a seeded random order, a new one each epoch."""


class AlgorithmConfig(Section):
    """How rewards become gradients."""

    name: str = "grpo"
    """Algorithm by name, or an own one by import path."""
    group_size: Positive = 8
    """Answers sampled for each prompt."""
    normalize_std: bool = True
    """Divide a group's advantages by the spread of its rewards (GRPO); off gives Dr. GRPO's centred rewards."""
    clip_low: NotNegativeFloat = 0.2
    """Lower clip of the policy ratio: 1 - clip_low."""
    clip_high: NotNegativeFloat = 0.2
    """Upper clip of the policy ratio: 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the ratio for negative advantages (dual-clip PPO); none when not set."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"] = "token_mean"
    """How the tokens of a mini-batch are weighed into one loss; computed over the whole mini-batch before it is cut."""
    whiten_advantages: bool | None = None
    """Shift and scale the advantages of a step to mean 0 and spread 1: over tokens (`ppo`) or answers (`grpo`). By default `ppo` does."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of later rewards, a token (`ppo`)."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of generalized advantage estimation (`ppo`): 1 trusts the rewards that came, 0 the critic."""
    value_clip: PositiveFloat | None = 0.2
    """How far a value may move in a step before its gain no longer counts (`ppo`); no limit when not set."""
    critic_path: str | None = None
    """Model that the critic starts from, in a form of `model.path`: a language model, or a classifier with one label; `model.path` when not
    set."""
    critic_learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of the critic; its warm-up, schedule and the rest are those of `trainer`."""
    critic_warmup: NotNegative = 0
    """Steps at the start in which the critic is trained and the policy is not."""
    kl_coefficient: NotNegativeFloat = 0.0
    """Weight of the divergence from the reference model (role `ref`); 0 does without one."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence counts: in the loss of the policy, or in the reward of each token (`ppo`)."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the divergence: `k1` suits the reward; in the loss it pulls nowhere on average, use `k2` or `k3` there."""
    kl_target: PositiveFloat | None = None
    """Mean divergence of a token, in nats, that the coefficient is steered to, by at most 2 % a step; fixed when not set."""
    entropy_coefficient: NotNegativeFloat = 0.0
    """Weight of the entropy of the policy, which the loss then raises."""
    no_signal: Literal["train", "skip_step", "stop"] = "skip_step"
    """When no group of a step has any spread in its rewards: train all the same, skip the update, or stop the run."""


class RewardConfig(Section):
    """One reward function, or model; the rewards of a list are summed by weight."""

    name: str = "reasoning_gym"
    """Verifier by name (`exact`, `regex`, `math_verify`, `reasoning_gym`), `environment` for what the environment gave, or an own function
    by import path (`my_pkg.rewards:score`). With `model` what to call that one; then `model` when not set."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    sources: tuple[str, ...] | None = None
    """Data sources (values of the column `source`) whose answers it scores; all when not set."""
    threshold: float | None = None
    """Scores at or above it count 1, others 0; for verifiers that give partial credit to wrong answers."""
    options: dict[str, Any] = {}
    """Further keyword arguments of the function."""
    deadline: PositiveFloat = 30.0
    """Seconds for one sample; then its work is ended for good, and the sample has no reward (status `timeout`)."""
    memory_mb: Positive | None = 4096
    """Memory that a scoring process and what it starts may hold; a sample that takes more has no reward. No limit when null."""
    model: RewardModelConfig | None = None
    """Score by this model instead of a function."""

    def model_post_init(self, context: Any) -> None:
        """What a model is called that was not named."""
        if self.model is not None and "name" not in self.model_fields_set:
            object.__setattr__(self, "name", "model")


class RoleConfig(Section):
    """Where a role lives and what serves it."""

    pool: str = "main"
    """Name of the pool that holds the role's workers."""
    workers: Positive | Literal["auto"] = "auto"
    """Number of worker processes; `auto` takes all slots of the pool (reward without a model: derived from CPUs)."""
    cpus: PositiveFloat | None = None
    """CPUs of one worker of a role that has processes of its own (reward without a model); derived when not set."""
    processes: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Scoring processes of one reward worker; one for each of its CPUs when not set. More than that pays if functions wait."""
    worker: str | None = None
    """Own worker class by import path, instead of the built-in one of the role."""
    tensor_parallel: Positive = 1
    """Workers that hold one copy of the model together, each a part of every layer; they share a node. For `actor`, `critic` and own
    `worker` classes."""


class PoolConfig(Section):
    """A set of slots: places for one process each."""

    nodes: tuple[NotNegative, ...] | Literal["auto"] = "auto"
    """Slots per node: `[2]` is one node with two, `[4, 2]` two uneven nodes; `auto` derives them from the machine."""
    gpus: NotNegativeFloat = 0
    """GPUs of one slot, a whole number; for a part of one set `share`."""
    share: PositiveFloat = 1
    """Slots that share one device: 2 gives each a half of it. Whole numbers only."""
    resources: dict[str, PositiveFloat] = {}
    """What else one slot takes, by the cluster's name for it: other accelerators (`{NPU: 1}`) or custom resources. Nodes without it hold
    no process of the pool."""
    accelerator_type: str | None = None
    """Accelerator that the pool's nodes must have, such as `H100`; any when not set."""
    labels: dict[str, str] = {}
    """Labels that the pool's nodes must have, such as `{team: red}`. They bind every process of the pool, helpers too."""
    cpus: PositiveFloat | None = None
    """CPUs of one slot; derived when not set."""
    capacity_factor: Annotated[float, Field(ge=1)] = 1.0
    """Slots held in all for each one in use: with 1.2, ten slots have two spares, which replace workers that die."""


class TrainerConfig(Section):
    """The loop, the optimizer, and what is written when."""

    steps: Positive = 100
    """Steps of the run."""
    prompts_per_step: Positive = 32
    """Prompts drawn for one step; the step trains on `prompts_per_step * algorithm.group_size` answers."""
    minibatches: Positive = 1
    """Optimizer steps per pass over the answers of a step; must divide `prompts_per_step`."""
    epochs: Positive = 1
    """Passes over the answers of a step."""
    micro_batch_tokens: Positive = 16_384
    """Tokens (padding included) of one forward and backward pass; changes memory and speed, never the gradient."""
    packing: bool = True
    """Rows of a pass lie one behind the other, without padding, where the model can do so; changes speed, never the gradient."""
    sharding: Literal["none", "fsdp"] = "none"
    """What data-parallel workers of actor, critic and ref hold: each the whole model, or each a part of weights, gradients and moments,
    gathered layer by layer (FSDP2)."""
    activation_checkpointing: bool = False
    """Keep the input of each layer alone for the backward pass and compute the rest again: less memory, a third more work."""
    bucket_mib: Positive = 64
    """MiB of a bucket in which weights are published to other processes: it is checked as a whole, and read while the next is written."""
    publish: Literal["merged", "adapter"] = "merged"
    """What rollout workers in other processes get of a model with `model.lora`: merged weights; or, after the first time, the adapter
    alone, which they merge themselves: far less to send, but each of them keeps the model's own weights in float32 as well."""
    publish_folder: Path | None = None
    """Folder on a file system that all nodes share, through which weights are published as safetensors files to all that are not in the
    actor's process; by default they go through the node's shared memory, and to other nodes through the object store. It must be there,
    and the run removes its files when it ends."""
    verify_weights: Literal["sample", "full"] = "sample"
    """What the checksum of a bucket covers: one word of each 4 KiB, which shows what was not written; or every one."""
    offload: bool = False
    """Models under training are moved to host memory while other roles use their devices, and back when it is their turn."""
    learning_rate: NotNegativeFloat = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: NotNegative = 0
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; `linear` and `cosine` need `schedule_steps`."""
    schedule_steps: Positive | None = None
    """Optimizer steps after which `linear` and `cosine` reach 0; never taken from `steps`."""
    weight_decay: NotNegativeFloat = 0.0
    """Decoupled weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down; none when not set."""
    save_every: NotNegative = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept."""
    async_save: bool = True
    """Copy and write checkpoints beside the next step, from host memory; else training waits until they are on disk."""
    eval_every: NotNegative = 0
    """Steps between evaluations on held-out prompts; 0 evaluates only before the first and after the last step."""
    save_samples_every: Positive = 10
    """Steps between files of samples under `samples/`."""
    sinks: tuple[str, ...] = ()
    """Further loggers (`tensorboard`, or own ones by import path); files in the run directory are always written."""


class SftConfig(Section):
    """Supervised fine-tuning: of `rolemesh sft`, and the warm start of `rolemesh train` when the section is given."""

    train: str | None = None
    """Examples to learn from: a path as of `data.train`; the training prompts themselves when not set."""
    steps: Positive = 100
    """Optimizer steps."""
    batch_size: Positive = 64
    """Examples of one step."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: NotNegative = 10
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear"] = "linear"
    """Learning rate after the warm-up; `linear` falls to 0 at `steps`."""


class DeadlinesConfig(Section):
    """How long each kind of wait may take, in seconds. Nothing waits without one."""

    create: PositiveFloat = 180.0
    """Placing a pool, starting its processes and importing the worker classes in them."""
    load: PositiveFloat = 300.0
    """Loading models in the workers."""
    join: PositiveFloat = 60.0
    """Forming a communicator."""
    call: PositiveFloat = 1800.0
    """One call of a worker group."""
    control: PositiveFloat = 10.0
    """An answer of a worker's control thread."""


class ClusterConfig(Section):
    """The Ray cluster that a run works on, and what becomes of its processes without a driver."""

    address: str | None = None
    """Cluster to join: `auto` for the one on this machine, or HOST:PORT. By default the run starts one of its own, which ends with it."""
    wait: NotNegativeFloat = 0
    """Seconds to wait for nodes and resources that the plan needs and that are not there or not free yet; 0 gives up at once."""
    detached: bool = False
    """Worker processes and pools outlive the driver; `--resume` goes on with them."""
    time_to_live: PositiveFloat = 900
    """Seconds after which the processes of a detached run end when no driver has come back for them."""
    interface: str | None = None
    """Network interface (`eth0`) whose address ranks use among each other on every node; that of Ray when not set."""


class Config(Section):
    """A whole run."""

    name: str = "run"
    """Prefix of the run directory."""
    seed: NotNegative = 0
    """Seed of everything random: data order, model start, sampling."""
    runs_dir: Path = Path("runs")
    """Folder that holds run directories."""
    backend: Literal["ray", "local"] = "ray"
    """`ray` runs processes; `local` runs everything in this process, for debugging."""
    deterministic: bool = False
    """Bit-equal samples whatever the number of workers, at some cost in speed."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig | None = None
    reward: tuple[RewardConfig, ...] = (RewardConfig(),)
    roles: dict[str, RoleConfig] = {"actor": RoleConfig(), "rollout": RoleConfig(), "reward": RoleConfig()}
    pools: dict[str, PoolConfig] = {"main": PoolConfig()}
    trainer: TrainerConfig = TrainerConfig()
    sft: SftConfig | None = None
    cluster: ClusterConfig = ClusterConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()

    @property
    def reward_models(self) -> dict[int, RewardModelConfig]:
        """Models that score answers, by their place in the section `reward`."""
        return {number: reward.model for number, reward in enumerate(self.reward) if reward.model is not None}

    @property
    def process_roles(self) -> tuple[str, ...]:
        """Roles with processes of their own beside the slots: rewards that need no model."""
        return () if self.reward_models else (REWARD,)

    def slot_roles(self, pool: str) -> dict[str, RoleConfig]:
        """Roles whose workers are in the slots of a pool."""
        return {name: role for name, role in self.roles.items() if role.pool == pool and name not in self.process_roles}

    @property
    def ref_is_actor(self) -> bool:
        """The reference is the actor without its adapter, served by the same workers: it has no model of its own."""
        actor, ref = self.roles.get(ACTOR), self.roles.get(REF)
        if self.model.lora is None or actor is None or ref is None:
            return False
        return actor.pool == ref.pool and actor.worker is None and ref.worker is None
