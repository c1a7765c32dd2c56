"""The environment `textarena`: games of the library of this name for one player, or against an opponent that answers by itself."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rolemesh.errors import ConfigError
from rolemesh.protocols.environment import Message, Start, Step, Turn
from rolemesh.registry import did_you_mean

_lock: Final = threading.Lock()
PLAYER: Final = 0


class TextArenaEnvironment:
    """The game `game` (`GuessTheNumber-v0`), with `options` of its own; a row's prompt stands before what the game says.

    Games draw from Python's own random numbers. Each has its own state of these here, made from the episode's seed, so that a repeated
    episode is the same whatever others do. An invalid move is told to the model as the game tells it; the reward is the game's at its
    end."""

    def __init__(self, *, game: str, **options: Any) -> None:
        """Raises ConfigError without textarena and for a game that it does not have."""
        self._env = _make(game, options)
        self._random: Any = None

    async def reset(self, start: Start) -> Sequence[Message]:
        with self._own_random(start.seed):
            self._env.reset(num_players=1, seed=start.seed)
            return self._observe()

    async def step(self, turn: Turn) -> Step:
        with self._own_random():
            done, _ = self._env.step(turn.text)
            if not done:
                return Step(messages=self._observe())
            rewards, told = self._env.close()
        invalid = bool(told[PLAYER].get("invalid_move"))
        return Step(reward=float(rewards[PLAYER]), done=True, counts={"games_lost_by_invalid_moves": invalid})

    async def close(self) -> None:
        """Nothing to give back."""

    def _observe(self) -> list[Message]:
        """What is new for the player, without its own moves, which it wrote itself."""
        player, told = self._env.get_observation()
        if player != PLAYER:
            raise RuntimeError(f"the game waits for player {player}; it must be one for a single player")
        text = told if isinstance(told, str) else "\n".join(message for sender, message, *_ in told if sender != PLAYER)
        return [Message(content=text, role="user")]

    @contextmanager
    def _own_random(self, seed: int | None = None) -> Iterator[None]:
        with _lock:
            before = random.getstate()
            if seed is None:
                random.setstate(self._random)
            else:
                random.seed(seed)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(before)


def _make(game: str, options: dict[str, Any]) -> Any:
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError.one("environment.name", "textarena must be installed", found, "pip install 'rolemesh[textarena]'") from error
    raw = f"{game}-raw"  # without wrappers, which repeat the whole conversation in each observation
    if raw not in ENV_REGISTRY:
        remedy = did_you_mean(game, [name for name in ENV_REGISTRY if not name.endswith(("-raw", "-train"))]).rstrip()
        raise ConfigError.one("environment.options.game", "must name a game of textarena", repr(game), remedy)
    return textarena.make(raw, **options)
