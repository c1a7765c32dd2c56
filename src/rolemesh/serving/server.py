"""The HTTP server: who may ask, how much, and how long; the rest is in the other files here. Runs on the controller's loop.

Every request needs the token. A client that goes away ends its requests; one that reads slowly holds up nobody, and its connection ends
with its deadline. `connections.py` bounds how many there are.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from rolemesh.config.schema import Config, ServeConfig
from rolemesh.errors import ConfigError, DeadlineExceeded, Overloaded, RequestFailed, RequestRefused, RolemeshError, Unavailable
from rolemesh.models import encode_prompt
from rolemesh.protocols.requests import Answer, Answering
from rolemesh.serving.answers import Shape, finish
from rolemesh.serving.connections import cannot_listen, listen, log, most_connections
from rolemesh.serving.requests import ChatBody, CompletionBody, Questions, Refused, check_length, parse, questions
from rolemesh.serving.text import Reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = list[tuple[Reading, Answer]]
Take = Callable[[int, Rows], Awaitable[None]]
"""Called with the number of a prompt and all answers to it so far."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BODY_BYTES: Final = 4 * 2**20
"""Most of a request's body."""
IDLE_SECONDS: Final = 30.0
"""A connection on which no whole header has come for so long is closed."""
BODY_SECONDS: Final = 30.0
"""For the body to come."""
END_SECONDS: Final = 2.0
"""For answers to be written when the server ends, and for the rest of a body that nobody wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Whose answers are served: the name of the model, its tokenizer, the ids that end an answer, and who answers."""

    model: str
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]
    answering: Answering


class Server:
    """`async with server.listening() as address:` serves until the block ends."""

    def __init__(self, served: Served, config: Config, serve: ServeConfig, token: str) -> None:
        self._served, self._serve, self._token = served, serve, token.encode()
        self._data = config.data
        self._longest = max(map(len, served.tokenizer.get_vocab()))
        self._began = int(time.time())

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Yields the base URL. Raises ConfigError when the address cannot be had."""
        app = web.Application(middlewares=[self._guarded], client_max_size=BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=log,
            keepalive_timeout=IDLE_SECONDS, lingering_time=END_SECONDS, shutdown_timeout=END_SECONDS,
        )  # fmt: skip
        await runner.setup()
        assert runner.server is not None
        try:
            try:
                sockets = await listen(runner.server, self._serve.host, self._serve.port, most_connections(self._serve.requests))
            except OSError as error:
                raise cannot_listen(self._serve.host, self._serve.port, error) from error
            host, port = sockets.sockets[0].getsockname()[:2]
            try:
                yield f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
            finally:
                sockets.close()
        finally:
            await runner.cleanup()

    # -- every request --------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Only with the token; whatever goes wrong is told in OpenAI's shape. Writing it has a deadline."""
        try:
            self._check_token(request)
            response = await handler(request)
        except Refused as refused:
            response = web.json_response(refused.body, status=refused.status, headers=refused.headers)
        except web.HTTPException as error:
            text = "the body is too large" if error.status == 413 else f"{request.method} {request.path}: {error.reason}"
            body = Refused(error.status, text, code=str(error.reason).lower().replace(" ", "_")).body
            kept = {name: value for name, value in error.headers.items() if name == "Allow"}
            response = web.json_response(body, status=error.status, headers=kept)
        async with _writing_to(request, self._serve.deadline):  # what is not written yet
            await response.prepare(request)
            await response.write_eof()
        return response

    def _check_token(self, request: web.Request) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self._token):
            refused = Refused(401, "the header must be `Authorization: Bearer TOKEN` with the token of this run", code="invalid_api_key")
            refused.headers["WWW-Authenticate"] = "Bearer"
            raise refused

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._described()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        limits = {"max_prompt_tokens": self._data.max_prompt_tokens, "max_response_tokens": self._data.max_response_tokens}
        return {"id": self._served.model, "object": "model", "created": self._began, "owned_by": "rolemesh", **limits}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._served.model):
            raise Refused(404, f"there is no model {name!r}, only {self._served.model!r}", param="model", code="model_not_found")

    # -- answers --------------------------------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse(CompletionBody, await _body(request)))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse(ChatBody, await _body(request)))

    async def _answer(self, request: web.Request, body: CompletionBody | ChatBody) -> web.StreamResponse:
        self._check_model(body.model)
        asked = questions(body, self._data, self._serve.requests, self._served.stop_token_ids, self._encode)
        tokenizer = self._served.tokenizer
        shape = Shape(
            body, asked, model=self._served.model,
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), name_of=lambda ids: str(tokenizer.decode(ids)),
        )  # fmt: skip
        if body.stream:
            return await self._stream(request, body, asked, shape)
        rows: list[Rows] = [[] for _ in asked.prompts]

        async def keep(number: int, grown: Rows) -> None:
            rows[number] = grown

        await self._read(asked, body.n, shape, keep)
        return web.json_response(shape.whole([row for of_prompt in rows for row in of_prompt]))

    def _encode(self, prompt: str | list[dict[str, str]]) -> list[int]:
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        most = self._data.max_prompt_tokens
        param = "prompt" if isinstance(prompt, str) else "messages"
        if (length := sum(map(len, texts))) > self._longest * most:  # no token is longer; a text of megabytes would hold up the run
            check_length(max(most + 1, length // self._longest), most, param)
        if not (isinstance(prompt, str) or self._served.tokenizer.chat_template):
            raise Refused(400, "the model has no chat template; use /v1/completions", param=param, code="no_chat_template")
        try:
            return encode_prompt(self._served.tokenizer, prompt, chat=not isinstance(prompt, str))
        except ConfigError as error:
            raise Refused(400, str(error), param=param, code="invalid_value") from error

    async def _read(self, asked: Questions, count: int, shape: Shape, take: Take) -> None:
        """Have `take` see the answers to every prompt, side by side, as they grow; the first prompt that fails ends the others. Raises
        Refused."""
        tasks = [asyncio.ensure_future(self._read_one(asked, number, count, shape, take)) for number in range(len(asked.prompts))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_one(self, asked: Questions, number: int, count: int, shape: Shape, take: Take) -> None:
        readings = [shape.reading() for _ in range(count)]
        read: list[Answer | None] = [None] * count
        prompt, deadline = asked.prompts[number], self._serve.deadline
        try:
            async with aclosing(self._served.answering.answer(prompt, asked.sampling, count=count, deadline=deadline)) as growing:
                async for answers in growing:
                    for place, answer in enumerate(answers):
                        if read[place] is not answer:  # at first, or it has begun anew on another replica
                            read[place], readings[place] = answer, shape.reading()
                        readings[place].read(answer.token_ids, finished=answer.finish_reason is not None)
                    rows = list(zip(readings, answers, strict=True))
                    await take(number, rows)
                    if all(finish(reading, answer) for reading, answer in rows):
                        return
        except RequestRefused as error:
            index = f"[{number}]" if len(asked.prompts) > 1 else ""
            raise Refused(400, f"{asked.param}{index}: {error}", param=asked.param, code="invalid_value") from error
        except RolemeshError as error:
            raise _refused(error) from error

    async def _stream(self, request: web.Request, body: CompletionBody | ChatBody, asked: Questions, shape: Shape) -> web.StreamResponse:
        """As server-sent events. The header goes out with the first token, so that what is refused before has its own status."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        writing, sent = asyncio.Lock(), [_Sent() for _ in range(len(asked.prompts) * body.n)]

        async def send(told: dict[str, Any]) -> None:
            async with writing:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(f"data: {json.dumps(told)}\n\n".encode())

        async def send_new(number: int, grown: Rows) -> None:
            for index, (reading, answer) in enumerate(grown, number * body.n):
                for told in sent[index].new(shape, index, reading, answer):
                    await send(told)

        async with _writing_to(request, self._serve.deadline + END_SECONDS):
            try:
                await self._read(asked, body.n, shape, send_new)
                if body.usage_in_stream:
                    await send(shape.last(sum(len(one.token_ids) for one in sent)))
                await response.write(b"data: [DONE]\n\n")
            except Refused as refused:
                if not response.prepared:
                    raise
                await send(refused.body)
        return response


@dataclass(slots=True)
class _Sent:
    """What was sent of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    opened: bool = False
    ended: bool = False

    def new(self, shape: Shape, index: int, reading: Reading, answer: Answer) -> list[dict[str, Any]]:
        """Chunks to send now. Raises Refused when the answer is another than the one that was begun."""
        done = finish(reading, answer) is not None
        if self.ended or not (done or (len(reading.text) > len(self.text) and reading.tokens >= len(self.token_ids))):
            return []
        if answer.token_ids[: len(self.token_ids)] != self.token_ids or not reading.text.startswith(self.text):
            raise Refused(503, "a replica was lost, and the answer of another differs", kind="server_error", code="interrupted")
        opening = [] if self.opened else shape.opening(index)
        chunk = shape.chunk(index, reading, answer, len(self.text), len(self.token_ids))
        self.text, self.token_ids, self.opened, self.ended = reading.text, answer.token_ids[: reading.tokens], True, done
        return [*opening, chunk]


@asynccontextmanager
async def _writing_to(request: web.Request, seconds: float) -> AsyncIterator[None]:
    """For what a client is sent: the connection of one that does not read in time is cut, as nothing more can be told."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionResetError:
        pass  # the client has gone


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except web.RequestPayloadError as error:
        refused = Refused(400, f"the body cannot be read: {error.__cause__ or error}", code="invalid_body")
        refused.headers["Connection"] = "close"  # nobody knows where the next request begins
        raise refused from error
    except TimeoutError as error:
        raise Refused(408, f"the body did not come within {BODY_SECONDS:g} s", code="timeout") from error


def _refused(error: RolemeshError) -> Refused:
    """What an error of ours is to a client."""
    if isinstance(error, Overloaded):
        refused = Refused(429, str(error), kind="rate_limit_error", code="rate_limit_exceeded")
        refused.headers["Retry-After"] = str(error.retry_after)
        return refused
    if isinstance(error, RequestFailed):
        text = f"the engine raised {error.exception} with this request, also when it had no other; the run's log says more"
        return Refused(500, text, kind="server_error", code="internal_error")
    if isinstance(error, Unavailable | DeadlineExceeded):
        return Refused(503, str(error), kind="server_error", code="unavailable")
    return Refused(500, f"{type(error).__name__} in the run; its log says more", kind="server_error", code="internal_error")


def new_token() -> str:
    return f"rm-{secrets.token_urlsafe(32)}"
