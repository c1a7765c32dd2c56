"""Prompts: where problems come from, which are used, and in what order. Called by sessions, loops, `rolemesh sft` and `eval`."""

from rolemesh.data.filters import PromptReport
from rolemesh.data.held_out import EvalSet, open_prompts, open_sft_prompts
from rolemesh.data.mixture import PromptMixture
from rolemesh.data.prompts import PromptStream
from rolemesh.data.sft import sft_batch
from rolemesh.data.sources import Problem, ProblemSource, derive_seed, open_source

__all__ = [
    "EvalSet",
    "Problem",
    "ProblemSource",
    "PromptMixture",
    "PromptReport",
    "PromptStream",
    "derive_seed",
    "open_prompts",
    "open_sft_prompts",
    "open_source",
    "sft_batch",
]
