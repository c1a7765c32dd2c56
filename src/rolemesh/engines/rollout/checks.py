"""Refusing what an engine could not serve exactly as asked. Called by the engines' `add` and `load_weights`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rolemesh.config.rollout_schema import COOLEST, HOTTEST
from rolemesh.protocols.engine import InFlight, Request, Sampling


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a setting of an engine (slots, most tokens of a prompt, of an answer) that is not at least 1."""
    for setting, value in sizes.items():
        if value < 1:
            raise ValueError(f"{setting} must be at least 1, got {value}")


def check_requests(
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    held: Collection[tuple[int, int]],
    vocabulary: int,
    max_prompt_tokens: int,
    max_response_tokens: int,
    context: int,
) -> None:
    """Raises ValueError for the first thing that cannot be served. `held` are the ids already in the engine, `context` the most tokens
    that a prompt and its answer may have together."""
    _check_sampling(sampling, vocabulary, max_response_tokens)
    seen: set[tuple[int, int]] = set()
    for request in requests:
        if request.id in seen or request.id in held:
            raise ValueError(f"request {request.id} is already in the engine; ids must be distinct, they decide the random numbers")
        for name, (draw, sample) in (("", request.id), ("counter ", request.counter or request.id)):
            if not (0 <= draw < 2**64 and 0 <= sample < 2**32):
                found = f"got {(draw, sample)}"
                raise ValueError(f"request {request.id}: {name}draw must be within [0, 2**64) and sample within [0, 2**32), {found}")
        seen.add(request.id)
        length = len(request.prompt_ids)
        if not 0 <= request.start < max_response_tokens:
            raise ValueError(f"request {request.id}: start must be within 0 to {max_response_tokens - 1}, got {request.start}")
        if not 1 <= length - request.start <= max_prompt_tokens:
            raise ValueError(
                f"request {request.id}: a prompt has 1 to {max_prompt_tokens} tokens (max_prompt_tokens), got {length - request.start}"
            )
        if length >= context:
            raise ValueError(f"request {request.id}: a prompt of {length} tokens leaves no room in the model's context of {context}")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
            raise ValueError(f"request {request.id}: token ids must be within [0, {vocabulary})")


def check_load(version: int, *, holds: int, running: int, in_flight: InFlight, able: Collection[InFlight], asleep: bool) -> None:
    """Raises ValueError when weights may not change now. `able` are the values of `in_flight` that the engine has."""
    if version < 0:
        raise ValueError(f"a weight version is at least 0, got {version}")
    if asleep:
        raise ValueError(f"the engine is asleep; wake it before loading version {version}")
    if in_flight not in able:
        raise ValueError(f"this engine's in_flight must be one of {', '.join(sorted(able))}, got {in_flight!r}")
    if running and in_flight == "refuse":
        raise ValueError(
            f"{running} requests of weight version {holds} are running; drain or abort them before loading version {version}, "
            "or say with in_flight what becomes of them"
        )


def _check_sampling(sampling: Sampling, vocabulary: int, max_response_tokens: int) -> None:
    if not 1 <= sampling.max_new_tokens <= max_response_tokens:
        raise ValueError(f"max_new_tokens must be within 1 to {max_response_tokens} (max_response_tokens), got {sampling.max_new_tokens}")
    if not (sampling.temperature == 0 or COOLEST <= sampling.temperature <= HOTTEST):
        raise ValueError(f"temperature must be 0 (greedy) or within {COOLEST:g} to {HOTTEST:g}, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {sampling.top_p}")
    if sampling.top_k < 0:
        raise ValueError(f"top_k must be 0 (off) or positive, got {sampling.top_k}")
    if not 0 <= sampling.seed < 2**64:
        raise ValueError(f"seed must be within [0, 2**64), got {sampling.seed}")
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < vocabulary]
    if outside:
        raise ValueError(f"stop token ids must be within [0, {vocabulary}), got {outside}")
