"""Environments: what happens between the turns of a model. Called by the rollout role, which plays episodes, and by checks before a run.

A user's own environment is a class with the three methods of `protocols.environment.Environment`; `ToolEnvironment` is a good base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolemesh.lazy import lazy_names

if TYPE_CHECKING:
    from rolemesh.environments.episodes import Episode, EpisodeLoop
    from rolemesh.environments.parsers import TOOL_PARSERS, BadCall, ToolCall
    from rolemesh.environments.table import ENVIRONMENTS, check_environment_section, environment_maker, tool_schemas
    from rolemesh.environments.threads import in_thread
    from rolemesh.environments.tool_use import ToolEnvironment
    from rolemesh.environments.tools import BUILTIN_TOOLS, Tool, ToolResult
    from rolemesh.environments.turns import TurnEncoder

__all__ = [
    "BUILTIN_TOOLS",
    "ENVIRONMENTS",
    "TOOL_PARSERS",
    "BadCall",
    "Episode",
    "EpisodeLoop",
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "ToolResult",
    "TurnEncoder",
    "check_environment_section",
    "environment_maker",
    "in_thread",
    "tool_schemas",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "episodes": ("Episode", "EpisodeLoop"),
            "parsers": ("TOOL_PARSERS", "BadCall", "ToolCall"),
            "table": ("ENVIRONMENTS", "check_environment_section", "environment_maker", "tool_schemas"),
            "threads": ("in_thread",),
            "tool_use": ("ToolEnvironment",),
            "tools": ("BUILTIN_TOOLS", "Tool", "ToolResult"),
            "turns": ("TurnEncoder",),
        },
    )
