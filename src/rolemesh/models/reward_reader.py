"""`RewardReader`: how a reward model reads prompts with answers. Made by the reward role, and before a run starts to see that it can be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError

from rolemesh.config.model_files import read_model_facts
from rolemesh.config.schema import RewardModelConfig
from rolemesh.errors import ConfigError
from rolemesh.models.prompts import encode_rendered
from rolemesh.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LIMIT: Final = 10**9
"""Tokenizers that know no limit say a larger number."""


class UnreadableSample(Exception):
    """A prompt and answer that the model cannot read; the message says why."""


class RewardReader:
    """Token ids of prompts with answers as one reward model reads them.

    With the policy's vocabulary, and unless its chat template is asked for, these are the policy's own tokens. Otherwise texts are
    tokenized anew: through the model's chat template, or as they are, one behind the other, with the special tokens that its tokenizer
    adds and, behind an answer that the policy has ended, its end token if it has one.
    """

    def __init__(self, config: RewardModelConfig, policy: PreTrainedTokenizerBase, *, option: str) -> None:
        """`policy` is the policy's tokenizer. Raises ConfigError naming `option` (`reward.0.model`)."""
        try:
            self._tokenizer = load_tokenizer(config.as_model, writes=False)
            positions = read_model_facts(config.path).context
        except ConfigError as error:
            raise ConfigError(problems=[replace(problem, subject=f"{option}.path") for problem in error.problems]) from error
        if config.chat and not self._tokenizer.chat_template:
            need, found = "the model's tokenizer must have a chat template", f"none in {config.path}"
            raise ConfigError.one(f"{option}.chat", need, found, "Leave it out, or add chat_template.jinja to the tokenizer")
        known = self._tokenizer.get_vocab() == policy.get_vocab()
        self.chat = bool(self._tokenizer.chat_template) and not known if config.chat is None else config.chat
        self.same_tokens = known and not self.chat
        """The policy's token ids are read as they are."""
        limits = [limit for limit in (positions, self._tokenizer.model_max_length) if 0 < limit < NO_LIMIT]
        if config.max_tokens is not None and limits and config.max_tokens > min(limits):
            need = f"must be at most {min(limits)}, which is what the model takes"
            raise ConfigError.one(f"{option}.max_tokens", need, str(config.max_tokens), "Lower it, or leave it out")
        self._limit = config.max_tokens or min(limits, default=NO_LIMIT)
        self._overlong, self._option = config.overlong, option

    def encode(self, prompt: str, messages: str | None, answer: str, *, ended: bool) -> list[int]:
        """Ids of texts. `messages` is JSON of the chat messages that the prompt was made of, where it was; `ended` says that the policy
        ended the answer itself. Raises UnreadableSample for what the chat template refuses."""
        if self.chat:
            turns = json.loads(messages) if messages is not None else [{"role": "user", "content": prompt}]
            return self._encode_chat([*turns, {"role": "assistant", "content": answer}])
        ids: list[int] = self._tokenizer(prompt + answer)["input_ids"]
        end = self._tokenizer.eos_token_id
        return [*ids, end] if ended and end is not None and ids[-1:] != [end] else ids

    def _encode_chat(self, conversation: Sequence[Any]) -> list[int]:
        try:
            text = str(self._tokenizer.apply_chat_template(list(conversation), tokenize=False))
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise UnreadableSample(f"the chat template of {self._tokenizer.name_or_path} refuses it: {error}") from error
        return encode_rendered(self._tokenizer, text)

    def fit(self, ids: Sequence[int]) -> list[int]:
        """At most as many ids as the model reads: cut on the left (a BOS stays) or right. Raises UnreadableSample for too many where
        they are not to be cut, and for none."""
        if not ids:
            raise UnreadableSample("no tokens")
        if len(ids) <= self._limit or self._overlong == "right":
            return list(ids[: self._limit])
        if self._overlong == "error":
            raise UnreadableSample(f"{len(ids)} tokens, and the model reads at most {self._limit}; {self._option}.overlong=left cuts them")
        head = list(ids[:1]) if ids[0] == self._tokenizer.bos_token_id else []
        return head + list(ids[len(ids) - (self._limit - len(head)) :])
