"""Speculative decoding in JAX: the target model's own text, in fewer calls of the target."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redrafter_jax.config import Grammar, MirrorConfig, SamplingConfig, TargetConfig, TreeConfig
    from redrafter_jax.drafters.lookup import PromptLookup
    from redrafter_jax.drafters.medusa import MedusaConfig
    from redrafter_jax.drafters.recurrent_head import RecurrentConfig
    from redrafter_jax.errors import InputError
    from redrafter_jax.files.drafter_files import load_drafter, save_drafter
    from redrafter_jax.files.real_models import fetch
    from redrafter_jax.files.target_files import load_target, load_tokenizer
    from redrafter_jax.files.target_weights import save_target
    from redrafter_jax.files.tree_table import load_tree, load_tree_table
    from redrafter_jax.generation import Generation, generate, generate_autoregressive
    from redrafter_jax.parallel.mesh import make_mesh
    from redrafter_jax.step_view import show_tree, trace_step
    from redrafter_jax.streaming import KeptCache, Update, stream

__all__ = [
    "Generation",
    "Grammar",
    "InputError",
    "KeptCache",
    "MedusaConfig",
    "MirrorConfig",
    "PromptLookup",
    "RecurrentConfig",
    "SamplingConfig",
    "TargetConfig",
    "TreeConfig",
    "Update",
    "fetch",
    "generate",
    "generate_autoregressive",
    "load_drafter",
    "load_target",
    "load_tokenizer",
    "load_tree",
    "load_tree_table",
    "make_mesh",
    "save_drafter",
    "save_target",
    "show_tree",
    "stream",
    "trace_step",
]

# The module of each public name, imported on first use, so that the help of a command needs no JAX.
# No module may have the name of a public object, because the module would hide the object.
_MODULES = {
    "files.drafter_files": ("load_drafter", "save_drafter"),
    "files.real_models": ("fetch",),
    "files.target_files": ("load_target", "load_tokenizer"),
    "files.target_weights": ("save_target",),
    "files.tree_table": ("load_tree", "load_tree_table"),
    "config": ("Grammar", "MirrorConfig", "TreeConfig", "SamplingConfig", "TargetConfig"),
    "drafters.lookup": ("PromptLookup",),
    "drafters.medusa": ("MedusaConfig",),
    "drafters.recurrent_head": ("RecurrentConfig",),
    "errors": ("InputError",),
    "generation": ("Generation", "generate", "generate_autoregressive"),
    "parallel.mesh": ("make_mesh",),
    "step_view": ("show_tree", "trace_step"),
    "streaming": ("KeptCache", "Update", "stream"),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
