"""Answers in OpenAI's shapes. Called by `server.py`.

Beyond these every choice has `weight_version`, the oldest weights that made a token of it, and `weight_spans`, `[version, start, stop]` for
the tokens from start to stop - 1; with `return_token_ids` also `token_ids`, and `prompt_token_ids` beside.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from rolemesh.protocols.requests import Answer
from rolemesh.serving.requests import ChatBody, CompletionBody, Questions
from rolemesh.serving.text import UNFINISHED, Decode, Reading


class Shape:
    """The frame of all that one request is answered with."""

    def __init__(self, body: CompletionBody | ChatBody, asked: Questions, *, model: str, decode: Decode, name_of: Decode) -> None:
        """`decode` makes text of an answer, `name_of` of single tokens, special ones too."""
        self._body, self._asked, self._decode, self._name_of = body, asked, decode, name_of
        self._chat = isinstance(body, ChatBody)
        kind = ("chat.completion" if self._chat else "text_completion") + (".chunk" if self._chat and body.stream else "")
        id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._frame = {"id": id, "object": kind, "created": int(time.time()), "model": model}

    def reading(self) -> Reading:
        return Reading(self._decode, self._body.stop, live=self._body.stream)

    def whole(self, rows: Sequence[tuple[Reading, Answer]]) -> dict[str, Any]:
        """The answer that is not streamed; rows of one prompt follow each other."""
        choices = []
        for index, (reading, answer) in enumerate(rows):
            text = {"message": {"role": "assistant", "content": reading.text, "refusal": None}} if self._chat else {"text": reading.text}
            choice = {"index": index, **text, **self._details(index, reading, answer, 0, 0), "finish_reason": finish(reading, answer)}
            choices.append(choice)
        told = self._frame | {"choices": choices, "usage": self.usage(sum(reading.tokens for reading, _ in rows))}
        if self._chat and self._body.return_token_ids:
            told["prompt_token_ids"] = self._asked.prompts[0]
        return told

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The chunk in front of all others of a choice, if there is one."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk(choice)] if self._chat else []

    def chunk(self, index: int, reading: Reading, answer: Answer, text_from: int, tokens_from: int) -> dict[str, Any]:
        """What is new of a choice."""
        text = reading.text[text_from:]
        delta: dict[str, Any] = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        details = self._details(index, reading, answer, tokens_from, text_from)
        return self._chunk({"index": index, **delta, **details, "finish_reason": finish(reading, answer)})

    def last(self, tokens: int) -> dict[str, Any]:
        """The chunk with the usage."""
        return self._frame | {"choices": [], "usage": self.usage(tokens)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._frame | {"choices": [choice]} | ({"usage": None} if self._body.usage_in_stream else {})

    def usage(self, tokens: int) -> dict[str, int]:
        prompt = self._asked.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _details(self, index: int, reading: Reading, answer: Answer, start: int, offset: int) -> dict[str, Any]:
        """Of the tokens from `start` on, whose text begins at `offset`."""
        spans = [(version, first, min(stop, reading.tokens)) for version, first, stop in answer.spans if first < reading.tokens]
        ids = answer.token_ids[start : reading.tokens]
        told: dict[str, Any] = {"logprobs": None}
        if self._body.wants_logprobs:
            told["logprobs"] = self._logprobs(ids, answer.logprobs[start : reading.tokens], offset)
        told["weight_version"] = min((span[0] for span in spans or answer.spans), default=None)
        told["weight_spans"] = [list(span) for span in spans]
        if self._body.return_token_ids:
            told["token_ids"] = ids
            if not self._chat and not start:
                told["prompt_token_ids"] = self._asked.prompts[index // self._body.n]
        return told

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float], offset: int) -> dict[str, Any]:
        names = [self._name_of([token]) for token in ids]
        if self._chat:
            pairs = zip(names, logprobs, strict=True)
            listed = [{"token": name, "logprob": number, "bytes": _bytes(name), "top_logprobs": []} for name, number in pairs]
            return {"content": listed, "refusal": None}
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {"tokens": names, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


def _bytes(name: str) -> list[int] | None:
    """Of a token's text; None for a piece of a character, whose own bytes a decoder does not tell."""
    return None if UNFINISHED in name else list(name.encode())


def finish(reading: Reading, answer: Answer) -> str | None:
    """Why a choice has ended, if it has: `abort` when it did by a change of weights."""
    return "stop" if reading.stopped else answer.finish_reason
