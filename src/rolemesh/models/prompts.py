"""Turn a prompt into token ids. The one place where a BOS is added, so that every path has exactly one. Called by data and `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rolemesh.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Texts that the tokenizer takes for control tokens."""
    return tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)


def defused(text: str, special: Sequence[str]) -> str:
    """The text with a space in each special token, so that it stays text: only a template may write control tokens."""
    for token in special:
        if token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}" if len(token) > 1 else f"&#{ord(token)};")
    return text


def _without_control(message: Mapping[str, Any], special: Sequence[str]) -> Mapping[str, Any]:
    """A message whose text, alone or in parts, stays text. What a model wrote may have tokens of its own."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": defused(content, special)}
    if isinstance(content, list):
        parts = [{**part, "text": defused(part["text"], special)} if isinstance(part.get("text"), str) else part for part in content]
        return {**message, "content": parts}
    return message


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, *, chat: bool, tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Token ids of a text, or of chat messages through the tokenizer's template (with `chat`; a text is then one user message). The
    template is told of `tools`, schemas as of `tool_schema`. With `chat` only the template, and what the model itself wrote, has control
    tokens: in all other messages they are text.

    The ids begin with exactly one BOS if the tokenizer has one: whether the template, the text or the tokenizer itself writes none, one
    or several makes no difference. Raises ConfigError for messages without `chat`, for `chat` without a template, and for
    messages that the template refuses.
    """
    text = render_prompt(tokenizer, prompt, chat=chat, tools=tools)
    return encode_rendered(tokenizer, text)


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that has its special tokens, with exactly one BOS in front if the tokenizer has one."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    # Only the run at the start: a chat format may use its BOS as the mark of every message.
    start = next((place for place, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[start:]]


def as_messages(prompt: str | Messages) -> list[Mapping[str, Any]]:
    """A text as one user message; messages as they are."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, *, chat: bool, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The text that `encode_prompt` encodes. Raises ConfigError as it does."""
    if not chat:
        if isinstance(prompt, str):
            return prompt
        raise ConfigError.one("data.chat", "prompts must be text unless this is true", "a list of chat messages", "Set data.chat=true")
    if not tokenizer.chat_template:
        raise ConfigError.one(
            "data.chat",
            "the tokenizer must have a chat template",
            f"none in {tokenizer.name_or_path}",
            "Set data.chat=false and write the format into data.prompt_template, or add chat_template.jinja to the tokenizer",
        )
    special = special_tokens(tokenizer)
    messages = [message if message.get("role") == "assistant" else _without_control(message, special) for message in as_messages(prompt)]
    try:
        return str(tokenizer.apply_chat_template(messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=False))
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        # templates refuse what their model never saw, such as a system message or two turns of one role
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ConfigError.one(
            "data.chat",
            f"the chat template of {tokenizer.name_or_path} must accept the prompts",
            f"{error or type(error).__name__} (messages of {roles})",
            "Change these messages, or the chat_template.jinja of the tokenizer",
        ) from error
