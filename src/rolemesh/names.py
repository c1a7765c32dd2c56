"""Names of the built-in roles. A role is a duty of the training system, not a process. Users may add their own names."""

from __future__ import annotations

from typing import Final

ACTOR: Final = "actor"
ROLLOUT: Final = "rollout"
REF: Final = "ref"
CRITIC: Final = "critic"
REWARD: Final = "reward"
TEACHER: Final = "teacher"

BUILTIN_ROLES: Final = (ACTOR, ROLLOUT, REF, CRITIC, REWARD, TEACHER)
