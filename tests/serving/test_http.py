"""The HTTP endpoint over answers that are written down: shapes, refusals, limits, clients that misbehave. Real sockets, no model."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.config import load_config
from rolemesh.config.schema import ServeConfig
from rolemesh.errors import ConfigError, DeadlineExceeded, Overloaded, RequestFailed, RequestRefused, RolemeshError, Unavailable, WorkerDied
from rolemesh.models import encode_prompt, load_tokenizer
from rolemesh.protocols.engine import Sampling, WeightSpan
from rolemesh.protocols.requests import Answer, Growing
from rolemesh.serving import Served, Server, connections, server
from rolemesh.serving.requests import ChatBody, CompletionBody
from rolemesh.serving.text import Reading

CONFIG = load_config("demo", ["data.max_prompt_tokens=40", "data.max_response_tokens=24"])
TOKENIZER = load_tokenizer(CONFIG.model)
TOKENIZER.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}="
END = TOKENIZER.eos_token_id
assert isinstance(END, int)
TOKEN = "rm-secret"
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {{}}\r\n\r\n"
KEY = {"Authorization": f"Bearer {TOKEN}"}


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


class Scripted:
    """Answers every prompt with one text, a token at a time; the second half of it by weights of the next version."""

    def __init__(self, text: str = "1 + 2 = 3", *, pause: float = 0.0, error: RolemeshError | None = None, after: int = 0) -> None:
        self.tokens = [*ids(text), END]
        self.pause, self.error, self.after = pause, error, after
        self.asked: list[tuple[list[int], Sampling, int, float]] = []
        self.open = self.most = self.closed = 0

    async def answer(self, prompt_ids: Sequence[int], sampling: Sampling, *, count: int = 1, deadline: float) -> Growing:
        self.asked.append((list(prompt_ids), sampling, count, deadline))
        answers = [Answer() for _ in range(count)]
        tokens = self.tokens[: sampling.max_new_tokens]
        half = len(tokens) // 2
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            for number, token in enumerate(tokens):
                if self.error is not None and number == self.after:
                    raise self.error
                await asyncio.sleep(self.pause)
                for answer in answers:
                    answer.token_ids.append(token)
                    answer.logprobs.append(-(number + 1) / 4)
                    spans = [(4, 0, min(number + 1, half)), (5, half, number + 1)]
                    answer.spans = tuple(WeightSpan(*span) for span in spans if span[1] < span[2])
                    if number + 1 == len(tokens):
                        answer.finish_reason = "stop" if token == END else "length"
                yield answers
        finally:
            self.open -= 1
            self.closed += 1


class Client:
    """Of one server."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self.address, self.session = address, session

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], Any]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.session.post(self.address + path, data=data, headers=KEY | headers) as answer:
            return answer.status, json.loads(await answer.read()), answer.headers

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, told, _ = await self.post("/completions", body)
        assert status == 200, told
        return told

    async def chat(self, **body: Any) -> dict[str, Any]:
        status, told, _ = await self.post("/chat/completions", {"messages": [{"role": "user", "content": "3"}], **body})
        assert status == 200, told
        return told

    async def events(self, path: str, **body: Any) -> list[Any]:
        async with self.session.post(self.address + path, json=body | {"stream": True}, headers=KEY) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            lines = (await answer.text()).split("\n\n")
        assert lines[-1] == ""
        assert all(line.startswith("data: ") for line in lines[:-1])
        return [line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]) for line in lines[:-1]]


@asynccontextmanager
async def serving(policy: Any, **serve: Any) -> AsyncIterator[Client]:
    settings = ServeConfig(**serve)
    served = Served(model="demo", tokenizer=TOKENIZER, stop_token_ids=[END], answering=policy)
    async with Server(served, CONFIG, settings, TOKEN).listening() as address, aiohttp.ClientSession() as session:
        yield Client(address, session)


def port_of(client: Client) -> int:
    return int(client.address.rpartition(":")[2].partition("/")[0])


async def connect(client: Client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port_of(client))


async def test_a_completion_has_the_documented_shape_and_the_weights_of_its_tokens() -> None:
    policy = Scripted()
    async with serving(policy) as client:
        told = await client.complete(
            model="demo", prompt="3", n=2, logprobs=0, seed=-1, temperature=0.5, top_p=0.9, top_k=7, max_tokens=20, return_token_ids=True
        )
    tokens, half = policy.tokens, len(policy.tokens) // 2
    prompt = encode_prompt(TOKENIZER, "3", chat=False)
    names = [TOKENIZER.decode([token]) for token in tokens]
    expected = {
        "index": 0, "text": "1 + 2 = 3", "finish_reason": "stop", "weight_version": 4,
        "weight_spans": [[4, 0, half], [5, half, len(tokens)]], "token_ids": tokens, "prompt_token_ids": prompt,
        "logprobs": {
            "tokens": names, "token_logprobs": [-(number + 1) / 4 for number in range(len(tokens))], "top_logprobs": None,
            "text_offset": [sum(map(len, names[:place])) for place in range(len(names))],
        },
    }  # fmt: skip
    assert told["id"].startswith("cmpl-")
    assert isinstance(told["created"], int)
    assert {name: told[name] for name in ("object", "model")} == {"object": "text_completion", "model": "demo"}
    assert told["choices"] == [expected, expected | {"index": 1}]
    count = len(prompt), 2 * len(tokens)
    assert told["usage"] == {"prompt_tokens": count[0], "completion_tokens": count[1], "total_tokens": sum(count)}
    assert policy.asked == [
        (prompt, Sampling(temperature=0.5, max_new_tokens=20, stop_token_ids=(END,), seed=2**64 - 1, top_p=0.9, top_k=7), 2, 600.0)
    ]


async def test_prompts_are_text_or_token_ids_one_or_several() -> None:
    policy = Scripted()
    async with serving(policy) as client:
        for prompt in ("12", ["12", "3"], ids("12"), [ids("12"), ids("3")]):
            told = await client.complete(prompt=prompt, max_tokens=3, n=2)
            several = isinstance(prompt, list) and not isinstance(prompt[0], int)
            assert [choice["index"] for choice in told["choices"]] == list(range(4 if several else 2))
            assert {choice["finish_reason"] for choice in told["choices"]} == {"length"}
            found = sorted(asked[0] for asked in policy.asked)
            given = [prompt] if not several else prompt
            assert found == sorted(encode_prompt(TOKENIZER, one, chat=False) if isinstance(one, str) else one for one in given)
            policy.asked.clear()
        first, second = [(await client.complete(prompt="1"), policy.asked[-1][1])[1] for _ in range(2)]
        assert first.seed != second.seed  # without a seed answers differ from time to time
        assert (first.temperature, first.max_new_tokens) == (1.0, 16)


async def test_a_chat_completion_has_the_documented_shape() -> None:
    policy = Scripted()
    async with serving(policy) as client:
        told = await client.chat(logprobs=True, return_token_ids=True, max_completion_tokens=20)
        parts = [{"role": "user", "content": [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 2"}]}]
        await client.chat(messages=parts)
    (choice,) = told["choices"]
    assert told["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "1 + 2 = 3", "refusal": None}
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-(place + 1) / 4 for place in range(len(policy.tokens))]
    first = choice["logprobs"]["content"][0]
    assert first == {"token": "1", "logprob": -0.25, "bytes": [49], "top_logprobs": []}
    assert (choice["finish_reason"], choice["weight_version"], choice["token_ids"]) == ("stop", 4, policy.tokens)
    prompts = [encode_prompt(TOKENIZER, text, chat=True) for text in ("3", "1 + 2")]
    assert told["prompt_token_ids"] == prompts[0]
    assert [asked[0] for asked in policy.asked] == prompts
    assert [asked[1].max_new_tokens for asked in policy.asked] == [20, 24]


async def test_messages_as_evaluation_harnesses_write_them_are_taken() -> None:
    policy = Scripted()
    async with serving(policy) as client:  # lm-eval's local-chat-completions puts a type beside the role
        told = await client.chat(messages=[{"role": "user", "content": "1 + 2", "type": "text"}], temperature=0, stop=["\n"], seed=1234)
    assert told["choices"][0]["message"]["content"] == "1 + 2 = 3"
    assert [asked[0] for asked in policy.asked] == [encode_prompt(TOKENIZER, "1 + 2", chat=True)]


async def test_a_piece_of_a_character_has_no_bytes_of_its_own() -> None:
    policy = Scripted("é")
    assert len(policy.tokens) == 3  # two of one byte, and the end
    async with serving(policy) as client:
        told = await client.chat(logprobs=True)
    (choice,) = told["choices"]
    assert choice["message"]["content"] == "é"
    assert [one["bytes"] for one in choice["logprobs"]["content"]][:2] == [None, None]


async def test_streams_add_up_to_what_is_answered_at_once() -> None:
    async with serving(Scripted()) as client:
        asked = {"prompt": ["3", "4"], "n": 2, "logprobs": 0, "return_token_ids": True, "max_tokens": 20}
        whole = await client.complete(**asked)
        *events, usage, done = await client.events("/completions", **asked, stream_options={"include_usage": True})
        assert done == "[DONE]"
        assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
        assert {event["usage"] for event in events} == {None}
        assert len({event["id"] for event in events}) == 1
        for expected in whole["choices"]:
            mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == expected["index"]]
            assert len(mine) > 3
            assert "".join(one["text"] for one in mine) == expected["text"]
            assert [token for one in mine for token in one["token_ids"]] == expected["token_ids"]
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [item for one in mine for item in one["logprobs"][name]] == expected["logprobs"][name]
            assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["stop"]
            assert mine[-1]["weight_spans"] == expected["weight_spans"]
            assert [one.get("prompt_token_ids") for one in mine] == [expected["prompt_token_ids"]] + [None] * (len(mine) - 1)
        opening, *events, done = await client.events("/chat/completions", messages=[{"role": "user", "content": "3"}])
        assert (opening["object"], opening["choices"][0]["delta"]) == ("chat.completion.chunk", {"role": "assistant", "content": ""})
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "1 + 2 = 3"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_text_ends_the_answer_and_the_work_for_it() -> None:
    policy = Scripted(pause=0.01)
    async with serving(policy) as client:
        for stop in (" = ", ["nowhere", "2 =", "="]):
            cut = "1 + 2" if stop == " = " else "1 + "
            told = await client.complete(prompt="3", stop=stop, return_token_ids=True, max_tokens=20)
            (choice,) = told["choices"]
            assert (choice["text"], choice["finish_reason"]) == (cut, "stop")
            kept = len(choice["token_ids"])
            assert choice["token_ids"] == policy.tokens[:kept]
            text = TOKENIZER.decode(policy.tokens[:kept])
            assert any(one in text for one in ([stop] if isinstance(stop, str) else stop))
            assert not any(one in TOKENIZER.decode(policy.tokens[: kept - 1]) for one in ([stop] if isinstance(stop, str) else stop))
            events = await client.events("/completions", prompt="3", stop=stop, max_tokens=20)
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == cut
        assert policy.closed == 4
        assert (await client.complete(prompt="3", stop=["zzz"], max_tokens=20))["choices"][0]["text"] == "1 + 2 = 3"


def read_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def test_text_that_may_still_change_is_held_back() -> None:
    tokens = "aébéEND.".encode()
    reading = Reading(read_bytes, ["END", "xx"], live=True)
    shown = []
    for count in range(1, len(tokens) + 1):
        reading.read(tokens[:count], finished=False)
        shown.append(reading.text)
    assert shown == ["a", "a", "aé", "aéb", "aéb", *["aébé"] * 5]
    assert (reading.stopped, reading.tokens) == (True, 9)
    reading = Reading(read_bytes, ["END", "xx"], live=False)
    reading.read(tokens[:2], finished=False)
    reading.read(tokens, finished=True)  # much at a time
    assert (reading.text, reading.stopped, reading.tokens) == ("aébé", True, 9)
    for live in (True, False):
        reading = Reading(read_bytes, [], live=live)
        reading.read(tokens[:8], finished=False)
        assert reading.text == ("aébéEN" if live else "")
        reading.read(tokens[:9] + b"\xff", finished=True)
        assert (reading.text, reading.stopped, reading.tokens) == ("aébéEND\ufffd", False, 10)


@pytest.mark.parametrize("at_once", [True, False])
def test_the_work_for_a_stop_text_grows_with_the_answer_and_not_with_its_square(at_once: bool) -> None:
    tokens, decoded = b"ab" * 1000 + b"END", 0

    def counting(piece: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(piece)
        return read_bytes(piece)

    reading = Reading(counting, ["END"], live=True)
    for count in [len(tokens)] if at_once else range(1, len(tokens) + 1):
        reading.read(tokens[:count], finished=count == len(tokens))
    assert (reading.text, reading.stopped, reading.tokens) == ("ab" * 1000, True, len(tokens))
    assert decoded <= 10 * len(tokens)


@given(st.text(alphabet="abé🙂 ", max_size=30), st.lists(st.text(alphabet="abé🙂 ", min_size=1, max_size=4), max_size=3), st.data())
def test_however_text_comes_it_ends_at_the_first_stop_and_never_shrinks(text: str, stops: list[str], data: st.DataObject) -> None:
    tokens = text.encode()
    reading, shown, count = Reading(read_bytes, stops, live=data.draw(st.booleans())), "", 0
    while count < len(tokens) and not reading.stopped:
        count = data.draw(st.integers(count + 1, len(tokens)))
        reading.read(tokens[:count], finished=count == len(tokens))
        assert reading.text.startswith(shown)
        shown = reading.text
    ends = [n for n in range(1, len(tokens) + 1) if any(stop in read_bytes(tokens[:n]) for stop in stops)]
    assert reading.stopped == bool(ends)
    assert reading.tokens == (ends or [len(tokens)])[0]
    whole = read_bytes(tokens[: reading.tokens])
    assert reading.text == whole[: min((whole.find(stop) for stop in stops if stop in whole), default=None)]


async def test_only_who_has_the_token_learns_anything() -> None:
    policy = Scripted()
    async with serving(policy) as client:
        wrong = ("Bearer rm-secrez", TOKEN, "Bearer ", "Bearer \xff", f"Basic {TOKEN}")
        for header in ({}, *({"Authorization": value} for value in wrong)):
            for path in ("/models", "/completions", "/nothing"):
                method = client.session.get if path == "/models" else client.session.post
                async with method(client.address + path, headers=header, data=None if path == "/models" else b"{") as answer:
                    assert answer.status == 401
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    assert (await answer.json())["error"]["code"] == "invalid_api_key"
        async with client.session.get(client.address + "/models", headers=KEY) as answer:
            (model,) = (await answer.json())["data"]
            assert (model["id"], model["object"], model["max_prompt_tokens"]) == ("demo", "model", 40)
        async with client.session.get(client.address + "/models/other", headers=KEY) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")
        async with client.session.get(client.address + "/completions", headers=KEY) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
    assert policy.asked == []


LONG = [[0] * 41]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("/completions", b"{", 400, None, "must be JSON"),
        ("/completions", b"[" * 100_000, 400, None, "must be JSON"),
        ("/completions", b'{"prompt": "\\ud800"}', 400, None, "must be JSON"),
        ("/completions", b'{"prompt": "a", "temperature": NaN}', 400, None, "must be JSON"),
        ("/completions", b"\xff", 400, None, "must be JSON"),
        ("/completions", b"[]", 400, None, "JSON object"),
        ("/completions", {}, 400, "prompt", "required"),
        ("/completions", {"prompt": []}, 400, "prompt", "1 to 256 answers"),
        ("/completions", {"prompt": [[]]}, 400, "prompt", "got 0"),
        ("/completions", {"prompt": [True]}, 400, "prompt", "must be a text"),
        ("/completions", {"prompt": [1.5]}, 400, "prompt", "must be a text"),
        ("/completions", {"prompt": LONG}, 400, "prompt", "1 to 40 tokens (data.max_prompt_tokens), got 41"),
        ("/completions", {"prompt": "1 " * 500_000}, 400, "prompt", "1 to 40 tokens"),
        ("/completions", {"prompt": "1", "max_tokens": 25}, 400, "max_tokens", "at most 24 (data.max_response_tokens)"),
        ("/completions", {"prompt": "1", "max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ("/completions", {"prompt": "1", "n": 257}, 400, "prompt", "257 answers each"),
        ("/completions", {"prompt": "1", "n": True}, 400, "n", "integer"),
        ("/completions", {"prompt": "1", "temperature": "hot"}, 400, "temperature", "number"),
        ("/completions", {"prompt": "1", "temperature": 1e-9}, 400, "temperature", "0 (greedy) or within 1e-06 to 1e+06, got 1e-09"),
        ("/completions", {"prompt": "1", "top_p": 0}, 400, "top_p", "greater than 0"),
        ("/completions", {"prompt": "1", "logprobs": 5}, 400, "logprobs", "less than or equal to 0"),
        ("/completions", {"prompt": "1", "echo": True}, 400, "echo", "False"),
        ("/completions", {"prompt": "1", "best_of": 3}, 400, "best_of", "must be n"),
        ("/completions", {"prompt": "1", "seed": 2**64}, 400, "seed", "less than"),
        ("/completions", {"prompt": "1", "stop": ["a"] * 17}, 400, "stop", "16"),
        ("/completions", {"prompt": "1", "stop": "a" * 1025}, 400, "stop", "at most 1024 characters"),
        ("/completions", {"prompt": "1", "stop": ["a", ""]}, 400, "stop", "at least 1 character"),
        ("/completions", {"prompt": "1", "frequency_penalty": 0.5}, 400, "frequency_penalty", "less than or equal to 0"),
        ("/completions", {"prompt": "1", "tempreature": 1}, 400, "tempreature", "no parameter 'tempreature'"),
        ("/completions", {"prompt": "1", "model": "gpt-4"}, 404, "model", "only 'demo'"),
        ("/chat/completions", {"messages": []}, 400, "messages", "at least 1"),
        ("/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages", "0"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "1", "type": "image"}]}, 400, "messages", "'text'"),
        ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "0"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "1"}], "tools": []}, 400, "tools", "no parameter"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "1" * 500_000}]}, 400, "messages", "1 to 40 tokens"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused_by_name(path: str, body: Any, status: int, param: str | None, message: str) -> None:
    policy = Scripted()
    async with serving(policy) as client:
        found, told, _ = await client.post(path, body)
    assert (found, told["error"]["param"]) == (status, param)
    assert message in told["error"]["message"]
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert policy.asked == []


async def test_what_the_engine_refuses_is_told_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Scripted(error=RequestRefused("token ids must be within [0, 8)"))) as client:
        for path, param, body, place in (
            ("/completions", "prompt", {"prompt": [9]}, "prompt"),
            ("/completions", "prompt", {"prompt": [[9], [9]]}, r"prompt[0]"),
            ("/chat/completions", "messages", {"messages": [{"role": "user", "content": "1"}]}, "messages"),
        ):
            for stream in (False, True):
                found, told, _ = await client.post(path, body | {"stream": stream})
                assert (found, told["error"]["param"], told["error"]["type"]) == (400, param, "invalid_request_error")
                assert told["error"]["message"] == f"{place}: token ids must be within [0, 8)"
        monkeypatch.setattr(TOKENIZER, "chat_template", None)
        found, told, _ = await client.post("/chat/completions", {"messages": [{"role": "user", "content": "1"}]})
    assert (found, told["error"]["param"]) == (400, "messages")
    assert told["error"]["message"] == "the model has no chat template; use /v1/completions"


async def test_null_and_neutral_values_are_as_if_left_out() -> None:
    async with serving(Scripted()) as client:
        await client.complete(
            prompt="1",
            stop=None,
            seed=None,
            logprobs=None,
            n=None,
            best_of=1,
            echo=False,
            presence_penalty=0,
            frequency_penalty=0.0,
            user="me",
        )


async def test_what_goes_wrong_behind_it_has_its_status() -> None:
    died = WorkerDied(group="rollout", rank=0, node="n", pid=1, method="go_on", original_type="Killed", original_message="secret path")
    late = DeadlineExceeded(waiter="a request", subject="1 answers", seconds=3)
    for error, status, kind in (
        (Overloaded("too many", retry_after=7), 429, "rate_limit_error"),
        (Unavailable("the run has ended"), 503, "server_error"),
        (late, 503, "server_error"),
        (died, 500, "server_error"),
        (RequestFailed("the engine raised KeyError: secret", exception="KeyError"), 500, "server_error"),
    ):
        async with serving(Scripted(error=error)) as client:
            for stream in (False, True):
                found, told, headers = await client.post("/completions", {"prompt": "1", "stream": stream})
                assert (found, told["error"]["type"]) == (status, kind)
                assert headers.get("Retry-After") == ("7" if status == 429 else None)
                assert ("secret" not in told["error"]["message"]) or status != 500
                assert ("raised KeyError with this request" in told["error"]["message"]) == isinstance(error, RequestFailed)
    async with serving(Scripted(error=late, after=2)) as client:
        first, *_, last = await client.events("/completions", prompt="1")
        assert first["choices"]
        assert last["error"]["code"] == "unavailable"  # the status was sent long ago


async def test_a_body_that_cannot_be_read_is_refused_and_what_is_no_http_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    policy = Scripted()
    async with serving(policy) as client:
        for encoding in ("gzip", "deflate"):
            status, told, _ = await client.post("/completions", b'{"prompt": "1"}', **{"Content-Encoding": encoding})
            assert (status, told["error"]["code"]) == (400, "invalid_body")
            assert encoding in told["error"]["message"]
        for sent in (
            b"hello\r\n\r\n",
            b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"GET / HTTP/1.1\r\nX: " + b"1" * 10_000 + b"\r\n\r\n",
        ):
            reader, writer = await connect(client)
            writer.write(sent)
            async with asyncio.timeout(5):
                assert (await reader.read()).startswith(b"HTTP/1.0 400")
            writer.close()
    assert caplog.records == []
    assert policy.asked == []


async def test_connections_are_bounded_whoever_opens_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_connections", lambda answers: 3)
    async with serving(Scripted()) as client:
        idle = [await connect(client) for _ in range(3)]
        async with asyncio.timeout(5):
            reader, writer = await connect(client)
            assert (await reader.read()).startswith(b"HTTP/1.1 503")  # and it is closed
            idle[0][1].close()
            await asyncio.sleep(0.2)
            assert (await client.complete(prompt="1"))["choices"]
        for _, open_ in (*idle, (reader, writer)):
            open_.close()
        await asyncio.sleep(0.1)


def test_connections_leave_half_of_the_files_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, answers, most in ((1024, 256, 448), (20_000, 256, 1024), (20_000, 2000, 4000), (-1, 256, 1024), (100, 256, 1)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _, files=files: (files, files))
        assert connections.most_connections(answers) == most


async def test_large_bodies_and_slow_clients_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(server, "END_SECONDS", 0.2)
    policy = Scripted()
    async with serving(policy) as client:
        status, told, _ = await client.post("/completions", b'{"prompt": "' + b"1" * server.BODY_BYTES + b'"}')
        assert (status, told["error"]["message"]) == (413, "the body is too large")
        monkeypatch.setattr(server, "BODY_SECONDS", 0.2)
        port = port_of(client)
        for sent, answer in ((b"POST /v1/comp", b""), (b"", b""), (HEAD.format(20).encode() + b"{", b"HTTP/1.1 408")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(5):
                assert (await reader.read()).startswith(answer)
            writer.close()
        assert (await client.complete(prompt="1"))["choices"]


async def test_a_client_that_goes_away_or_does_not_read_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "END_SECONDS", 0.2)
    policy = Scripted(pause=0.05)
    async with serving(policy, deadline=0.5) as client:
        for stream in (False, True):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.15):
                    await client.post("/completions", {"prompt": "1", "stream": stream, "max_tokens": 20})
            await asyncio.sleep(0.1)
            assert policy.open == 0
        assert policy.closed == 2

        class Endless(Scripted):
            async def answer(self, prompt_ids: Sequence[int], sampling: Sampling, *, count: int = 1, deadline: float) -> Growing:
                self.open += 1
                self.most = 1
                try:
                    answer = Answer()
                    while True:
                        answer.token_ids += [self.tokens[0]] * 20_000
                        answer.logprobs += [0.0] * 20_000
                        yield [answer]
                        await asyncio.sleep(0)
                finally:
                    self.open -= 1

        endless = Endless()
    async with serving(endless, deadline=0.5) as client:
        port = port_of(client)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
        body = json.dumps({"prompt": "1", "stream": True, "logprobs": 0, "return_token_ids": True}).encode()
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        writer.write(body)
        async with asyncio.timeout(20):  # nothing but the deadline ends it
            while not endless.most or endless.open:
                await asyncio.sleep(0.05)
        writer.close()
    del reader


async def test_a_prompt_that_fails_ends_the_others_of_its_request() -> None:
    class FirstFails(Scripted):
        async def answer(self, prompt_ids: Sequence[int], sampling: Sampling, *, count: int = 1, deadline: float) -> Growing:
            self.open += 1
            try:
                await asyncio.sleep(0.05 if list(prompt_ids) == [1] else 60.0)
                raise RequestRefused("not this one")
                yield []
            finally:
                self.open -= 1
                self.closed += 1

    policy = FirstFails()
    async with serving(policy) as client:
        for number, stream in enumerate((False, True), 1):
            found, told, _ = await client.post("/completions", {"prompt": [[1], [2]], "stream": stream})
            assert (found, told["error"]["message"]) == (400, "prompt[0]: not this one")
            assert (policy.open, policy.closed) == (0, 2 * number)


@pytest.mark.slow
async def test_a_client_that_does_not_read_its_whole_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[web.Server] = []
    tokens = 1_500_000  # 6 MB, more than the kernel keeps for a connection

    class Long(Scripted):
        async def answer(self, prompt_ids: Sequence[int], sampling: Sampling, *, count: int = 1, deadline: float) -> Growing:
            self.closed += 1
            yield [Answer([END] * tokens, [0.0] * tokens, (WeightSpan(1, 0, tokens),), "length")]

    def listen(inner: web.Server, host: str, port: int, most: int) -> Any:
        made.append(inner)
        return connections.listen(inner, host, port, most)

    monkeypatch.setattr(server, "listen", listen)
    policy, loop = Long(), asyncio.get_running_loop()
    async with serving(policy, deadline=0.5) as client, asyncio.timeout(20):
        with socket.socket() as bare:
            bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            bare.setblocking(False)
            await loop.sock_connect(bare, ("127.0.0.1", port_of(client)))
            body = json.dumps({"prompt": "1", "return_token_ids": True}).encode()
            await loop.sock_sendall(bare, HEAD.format(len(body)).encode() + body)
            while not policy.closed or made[0].connections:  # what is not read is never sent: only the server can end this
                await asyncio.sleep(0.05)


async def test_two_hundred_requests_at_a_time() -> None:
    policy = Scripted(pause=0.05)
    async with serving(policy) as client:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            many = Client(client.address, session)
            told = await asyncio.gather(*(many.complete(prompt=str(number % 10), max_tokens=20) for number in range(200)))
    assert {answer["choices"][0]["text"] for answer in told} == {"1 + 2 = 3"}
    assert policy.most > 100


async def test_an_answer_that_began_anew_elsewhere_is_whole_or_said_to_be_broken() -> None:
    first, same, other = ids("1 + 2 = 3"), ids("1 + 2 = 5"), ids("9 + 9 = 3")

    class Moving(Scripted):
        def __init__(self, then: list[int]) -> None:
            super().__init__()
            self.then = then

        async def answer(self, prompt_ids: Sequence[int], sampling: Sampling, *, count: int = 1, deadline: float) -> Growing:
            answers = [Answer()]
            for token in first[:4]:
                answers[0].token_ids.append(token)
                answers[0].logprobs.append(0.0)
                yield answers
            answers[0] = Answer()  # the replica was lost
            yield answers
            for place, token in enumerate(self.then, 1):
                answers[0].token_ids.append(token)
                answers[0].logprobs.append(0.0)
                answers[0].spans = (WeightSpan(1, 0, place),)
                if place == len(self.then):
                    answers[0].finish_reason = "length"
                yield answers

    for then, text in ((same, "1 + 2 = 5"), (other, None)):
        async with serving(Moving(then)) as client:
            assert (await client.complete(prompt="1"))["choices"][0]["text"] == (text or "9 + 9 = 3")
            *events, last = await client.events("/completions", prompt="1")
            if text is None:
                assert last["error"]["code"] == "interrupted"
            else:
                assert "".join(event["choices"][0]["text"] for event in events) == text


async def test_an_address_that_cannot_be_had_is_a_config_error() -> None:
    async with serving(Scripted()) as client:
        port = port_of(client)
        with pytest.raises(ConfigError, match=f"listen on 127.0.0.1:{port}"):
            async with serving(Scripted(), port=port):
                pass


def test_the_page_lists_every_parameter() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    fields = {name: field for body in (CompletionBody, ChatBody) for name, field in body.model_fields.items()}
    known = {field.alias or name for name, field in fields.items()} - {
        "best_of",
        "echo",
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
    }
    assert [name for name in sorted(known) if f"`{name}" not in page] == []
