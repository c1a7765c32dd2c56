"""What stands between two turns of a model, as token ids. Called by the rollout role and by checks before a run.

The ids that the model sampled are kept as they are. What comes behind them is found by rendering a conversation with and without the
new messages: the difference is the end of the model's turn, the messages in the form of the template, and the head of its next turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from jinja2 import TemplateError

from rolemesh.environments.answers import as_text
from rolemesh.errors import ConfigError
from rolemesh.models.prompts import defused, special_tokens
from rolemesh.protocols.environment import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "The answer so far."
"""Stands for what the model wrote. Templates do not touch it."""

_AHEAD: Final = 16
"""Characters for each token that are looked at first where a message has to be cut."""


class TurnEncoder:
    """Encodes messages behind a turn. Without `chat` they are plain text, each on a line of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._special = special_tokens(tokenizer)

    def encode(self, messages: Sequence[Message], last: int) -> list[int]:
        """Ids of the messages behind the token `last`, which is not repeated if the template puts it there, too. Raises ConfigError when
        the template refuses the messages."""
        text = self._render(messages) if self._chat else "\n" + "".join(f"{self._harmless(message.content)}\n" for message in messages)
        ids = self._ids(text)
        return ids[1:] if self._chat and ids and ids[0] == last else ids

    def shorten(self, message: Message, limit: int) -> Message:
        """The message with at most the first `limit` tokens of its content."""
        content, read = message.content, _AHEAD * limit
        if len(content.encode()) <= limit:  # a token has a byte or more
            return message
        while len(ids := self._ids(self._harmless(content[:read]))) <= 2 * limit and read < len(content):
            read *= 4  # tokens are long here
        return replace(message, content=self.decode(ids[:limit])) if len(ids) > limit else message

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def shows(self, mark: str) -> bool:
        """Whether the text of a turn keeps a mark that the model writes."""
        return mark in self.decode(self._ids(mark))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _render(self, messages: Sequence[Message]) -> str:
        before = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _MARK}]
        new = [
            {"role": message.role, "content": self._harmless(message.content)} | ({"name": message.name} if message.name else {})
            for message in messages
        ]
        template = f"the chat template of {self._tokenizer.name_or_path}"
        try:
            text = str(self._tokenizer.apply_chat_template(before + new, add_generation_prompt=True, tokenize=False))
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            need = f"{template} must accept messages of the environment"
            found = f"{error or type(error).__name__} (roles {', '.join(message.role for message in messages)})"
            raise ConfigError.one("data.chat", need, found, "Use another role, or set data.chat=false") from error
        _, mark, behind = text.partition(_MARK)
        if not mark:
            remedy = "Set data.chat=false, or change the chat_template.jinja of the tokenizer"
            raise ConfigError.one("data.chat", f"{template} must keep what the model wrote", "a conversation without it", remedy)
        return behind

    def _harmless(self, content: str) -> str:
        """Without special tokens, which only the template may write: a tool's text must not end its message or speak for the model."""
        return defused(as_text(content), self._special)
