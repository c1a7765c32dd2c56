"""The JSON schema of a Python function, as chat templates want it. Called where tools are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rolemesh.errors import ConfigError


def tool_schema(function: Callable[..., Any], *, subject: str) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "description", "parameters"}} from annotations and a docstring with a line for each
    argument (`Args:`, as Google writes it). Raises ConfigError naming `subject` for a function that does not say what it takes."""
    from transformers.utils import get_json_schema  # seconds
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError.one(
            subject,
            "a tool needs an annotation and a line of its docstring (Args: NAME: meaning) for each argument",
            str(error),
            "Write them: they are what the model reads of the tool",
        ) from error
    return schema
