"""Options of models: of the policy, and of models that score answers. A part of the schema."""

from __future__ import annotations

from typing import Literal

from rolemesh.config.section import Positive, Section


class LoraConfig(Section):
    """A low-rank adapter (LoRA), trained in place of the model's own weights. Without dropout, which would part trainer and engine."""

    rank: Positive = 16
    """Rank of the adapter's matrices."""
    alpha: Positive = 32
    """The adapter's part is scaled by alpha / rank."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Linear layers that get one, by name or last part of it (`[q_proj, v_proj]`); `all-linear` takes all but the output layer."""


class ModelConfig(Section):
    """The policy model."""

    path: str = "tiny"
    """A Hugging Face folder, a `.gguf` file, either of them inside an installed package (`package:NAME/FILE.gguf`), or the name of a
    built-in tiny model (`tiny`), which is made from scratch."""
    tokenizer: str | None = None
    """Tokenizer folder; the model's own files when not set."""
    pad_token: str | None = None
    """Padding token, for a tokenizer that declares none; must be in its vocabulary (its end token will do)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights where they are served; where they are trained, of matrix products on float32 weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. Off unless you know its author."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the actor's weights. A reference in the actor's pool is then the actor without it."""


class RewardModelConfig(Section):
    """A model that scores answers and is never trained. The role `reward` then has its workers in the slots of its pool."""

    path: str
    """A Hugging Face folder, also one inside an installed package: a sequence classifier with one label, or a causal model whose files hold
    a head with one output beside it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of its weights and products."""
    trust_remote_code: bool = False
    """Run Python code that comes with the folder. Off unless you know its author."""
    chat: bool | None = None
    """Apply the model's own chat template to prompt and answer. By default where it has one and another vocabulary than the policy; with
    the same vocabulary it reads the policy's tokens as they are."""
    max_tokens: Positive | None = None
    """Most tokens of prompt and answer that it reads; as many as the model and its tokenizer take when not set."""
    overlong: Literal["error", "left", "right"] = "error"
    """Rows above that: without a reward (status `error`), or cut on the left or right, and counted."""

    @property
    def as_model(self) -> ModelConfig:
        """For whoever loads models."""
        return ModelConfig(path=self.path, dtype=self.dtype, trust_remote_code=self.trust_remote_code)
