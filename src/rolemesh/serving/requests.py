"""What a client may ask for, checked: the bodies of /v1/completions and /v1/chat/completions. Called by `server.py`.

Names and defaults are OpenAI's; `top_k` and `return_token_ids` are extensions that other servers have too. What this server does not do is
refused, never passed over.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr, ValidationError
from pydantic_core import from_json

from rolemesh.config.rollout_schema import COOLEST, HOTTEST
from rolemesh.config.schema import DataConfig
from rolemesh.protocols.engine import Sampling

MOST_STOPS, STOP_CHARACTERS = 16, 1024
"""Of the stop texts, and of each: every piece of an answer is searched for all of them."""
Zero = Annotated[float, Field(ge=0, le=0)]
Stop = Annotated[StrictStr, Field(min_length=1, max_length=STOP_CHARACTERS)]
B = TypeVar("B", bound="Body")


class Refused(Exception):
    """An answer other than 200, in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict[str, str]()
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class Body(BaseModel):
    """What both kinds of request have in common. Fields that are null count as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[list[Stop], BeforeValidator(_as_list), Field(max_length=MOST_STOPS)] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    presence_penalty: Zero = 0.0
    frequency_penalty: Zero = 0.0
    user: Any = None
    metadata: Any = None
    store: Any = None

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _as_prompts(prompt: Any) -> Any:
    """One prompt as a list of one. Raises ValueError for anything that is neither text nor token ids."""
    listed = prompt if isinstance(prompt, list) else [prompt]
    if listed and all(type(token) is int for token in listed):
        return [listed]
    if all(type(one) is str for one in listed) or all(type(one) is list and all(type(token) is int for token in one) for one in listed):
        return listed
    raise ValueError("must be a text, a list of token ids, or a list of one kind of these")


class CompletionBody(Body):
    """Of /v1/completions."""

    prompts: Annotated[list[str] | list[list[int]], BeforeValidator(_as_prompts)] = Field(alias="prompt")
    """One or more, each text or token ids."""
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """0: those of the sampled tokens. Of others the engine keeps none."""
    best_of: int | None = None
    echo: Literal[False] = False

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class Part(BaseModel):
    """A piece of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Annotated[str, Field(min_length=1)]
    content: StrictStr | list[Part]
    name: str | None = None
    type: Literal["text"] = "text"
    """Evaluation harnesses write it here too."""

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name is not None else {})


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[int, Field(ge=0, le=0)] = 0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs


def parse(kind: type[B], raw: bytes) -> B:
    """The body of a request. Raises Refused, naming the parameter."""
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(400, f"the body must be JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise Refused(400, f"the body must be a JSON object, got {type(data).__name__}", code="invalid_json")
    try:
        return kind.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as error:
        raise _of_parameter(error) from error


def _of_parameter(error: ValidationError) -> Refused:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = str(first["loc"][0])
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return Refused(400, f"this server has no parameter {param!r}", param=param, code="unknown_parameter")
    where = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, int))
    return Refused(400, f"{param}{'.' + where if where else ''}: {first['msg']}", param=param, code="invalid_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """A request as the engine sees it: prompts, `n` answers to each."""

    prompts: list[list[int]]
    sampling: Sampling
    param: str
    """That has the prompts."""

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def questions(
    body: CompletionBody | ChatBody,
    data: DataConfig,
    most: int,
    stop_token_ids: Sequence[int],
    encode: Callable[[str | list[dict[str, str]]], list[int]],
) -> Questions:
    """Everything that the engine needs; `most` answers may be under way at a time. Raises Refused."""
    count, name = (1, "messages") if isinstance(body, ChatBody) else (len(body.prompts), "prompt")
    if not 1 <= count * body.n <= most:
        text = f"1 to {most} answers at a time (rollout.serve.requests), got {count} prompts, {body.n} answers each"
        raise Refused(400, text, param=name, code="invalid_value")
    longest = data.max_response_tokens
    if isinstance(body, ChatBody):
        asked = body.max_completion_tokens or body.max_tokens or longest
        prompts = [encode([message.plain() for message in body.messages])]
    else:
        asked = min(body.max_tokens, longest) if "max_tokens" not in body.model_fields_set else body.max_tokens
        if body.best_of not in (None, body.n):
            raise Refused(400, f"best_of must be n, got {body.best_of} and {body.n}", param="best_of", code="invalid_value")
        prompts = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
    if asked > longest:
        text = f"max_tokens must be at most {longest} (data.max_response_tokens), got {asked}"
        raise Refused(400, text, param="max_tokens", code="invalid_value")
    if body.temperature != 0 and not COOLEST <= body.temperature <= HOTTEST:
        text = f"temperature must be 0 (greedy) or within {COOLEST:g} to {HOTTEST:g}, got {body.temperature:g}"
        raise Refused(400, text, param="temperature", code="invalid_value")
    for prompt in prompts:
        check_length(len(prompt), data.max_prompt_tokens, name)
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    sampling = Sampling(
        temperature=body.temperature,
        max_new_tokens=asked,
        stop_token_ids=tuple(stop_token_ids),
        seed=seed,
        top_p=body.top_p,
        top_k=body.top_k,
    )
    return Questions(prompts=prompts, sampling=sampling, param=name)


def check_length(tokens: int, most: int, param: str) -> None:
    """Raises Refused for a prompt that is empty or too long."""
    if not 1 <= tokens <= most:
        text = f"a prompt must have 1 to {most} tokens (data.max_prompt_tokens), got {tokens}"
        raise Refused(400, text, param=param, code="context_length_exceeded" if tokens else "invalid_value")
