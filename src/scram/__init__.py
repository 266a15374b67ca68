"""SCRAM, Spatially Coherent Randomized Attention Maps: attention over grids in O(n log n).

Public names are imported when first used, so the command line starts without torch. Where torch is already imported,
`import scram` imports them all, and with them the operators `torch.ops.scram`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import nn
    from .core.exact import exact_attention, exact_search, merge
    from .core.tails.clusters import Clusters
    from .core.tails.codebook import Codebook
    from .core.tails.drawn import Hybrid
    from .core.tails.estimate import Estimate
    from .core.tails.sampled import MetropolisHastings, Snis
    from .engines import dispatch
    from .explorer import Explorer, explore
    from .functional import attend, attention, clear_caches, cluster, estimate, explain, local, search
    from .integrations import patch, sdpa
    from .integrations.layers import Plans
    from .integrations.patch import patch_sdpa, survey
    from .integrations.sdpa import scaled_dot_product_attention
    from .quality import measure
    from .quality.judge import Judgement, judge
    from .quality.plan import Plan
    from .quality.trust import Trust, trust
    from .quality.tune import tune
    from .results import Attended, Matches
    from .settings import Search

__version__ = "0.2.0"
__all__ = [
    "Attended",
    "Clusters",
    "Codebook",
    "Estimate",
    "Explorer",
    "Hybrid",
    "Judgement",
    "Matches",
    "MetropolisHastings",
    "Plan",
    "Plans",
    "Search",
    "Snis",
    "Trust",
    "attend",
    "attention",
    "clear_caches",
    "cluster",
    "dispatch",
    "estimate",
    "exact_attention",
    "exact_search",
    "explain",
    "explore",
    "judge",
    "local",
    "measure",
    "merge",
    "nn",
    "patch",
    "patch_sdpa",
    "scaled_dot_product_attention",
    "sdpa",
    "search",
    "survey",
    "trust",
    "tune",
]
# The names that each module defines; every other public name is a module itself.
_DEFINED = {
    "functional": ("attend", "attention", "clear_caches", "cluster", "estimate", "explain", "local", "search"),
    "codebook": ("Codebook",),
    "estimators": ("Estimate",),
    "tails.clusters": ("Clusters",),
    "tails.drawn": ("Hybrid",),
    "tails.sampled": ("MetropolisHastings", "Snis"),
    "exact": ("exact_attention", "exact_search", "merge"),
    "explorer": ("Explorer", "explore"),
    "judge": ("Judgement", "judge"),
    "layers": ("Plans",),
    "patch": ("patch_sdpa", "survey"),
    "plan": ("Plan",),
    "sdpa": ("scaled_dot_product_attention",),
    "trust": ("Trust", "trust"),
    "tune": ("tune",),
    "types": ("Attended", "Matches", "Search"),
}


class _Package(ModuleType):
    """Imports a public name when it is first used and keeps it."""

    def __getattr__(self, name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = next((module for module, names in _DEFINED.items() if name in names), name)
        module = import_module(f".{home}", __name__)
        setattr(self, name, getattr(module, name, module))
        return self.__dict__[name]

    def __setattr__(self, name: str, value: object) -> None:
        # Python stores an imported submodule in its package; a function stays before the module of its name.
        super().__setattr__(name, getattr(value, name, value) if name in ("judge", "trust", "tune") else value)

    def __dir__(self) -> list[str]:
        return sorted({*__all__, *(name for name in super().__dir__() if name.startswith("__"))})


sys.modules[__name__].__class__ = _Package
if "torch" in sys.modules:
    for _name in __all__:
        getattr(sys.modules[__name__], _name)
