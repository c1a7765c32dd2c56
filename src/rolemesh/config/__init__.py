"""Options: their declaration (`schema`), loading from YAML and `key=value` overrides, checks between fields, and their reference page.

Called by the command line, by sessions and by `plan`. Needs neither torch nor Ray.
"""

from rolemesh.config.checks import check_config
from rolemesh.config.load import RENAMED, dump_config, load_config, recipe_names
from rolemesh.config.model_files import BUILTIN_MODELS, ModelFacts, ModelFiles, model_files, read_model_facts
from rolemesh.config.schema import Config

__all__ = [
    "BUILTIN_MODELS",
    "RENAMED",
    "Config",
    "ModelFacts",
    "ModelFiles",
    "check_config",
    "dump_config",
    "load_config",
    "model_files",
    "read_model_facts",
    "recipe_names",
]
