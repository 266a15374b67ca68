"""SCRAM, Spatially Coherent Randomized Attention Maps: attention over grids in O(n log n).

`import scram` loads no other module: a public name is imported when it is first used, and the command line starts
without torch. The operators `torch.ops.scram` are there once `scram.attention`, or another function, was used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import bias as bias
    from . import distributed as distributed
    from . import images as images
    from . import integrations as integrations
    from . import nn as nn
    from . import options as options
    from .core.correlation import correlation as correlation
    from .core.decoding import Cache as Cache
    from .core.exact import exact_attention as exact_attention
    from .core.exact import exact_search as exact_search
    from .core.first_call import AccuracyWarning as AccuracyWarning
    from .core.first_call import check_first_call as check_first_call
    from .core.layout_hints import LayoutWarning as LayoutWarning
    from .core.resolve import Explanation as Explanation
    from .core.statistics import Interval as Interval
    from .core.tails.clusters import Clusters as Clusters
    from .core.tails.clusters import Codebook as Codebook
    from .core.tails.drawn import DrawnKeys as DrawnKeys
    from .core.tails.estimate import Estimate as Estimate
    from .core.tails.sampled import MetropolisHastings as MetropolisHastings
    from .core.tails.sampled import Snis as Snis
    from .engines.dispatch import implementations as implementations
    from .explorer import Explorer as Explorer
    from .explorer import explore as explore
    from .functional import attend as attend
    from .functional import attention as attention
    from .functional import clear_caches as clear_caches
    from .functional import cluster as cluster
    from .functional import decode as decode
    from .functional import estimate as estimate
    from .functional import explain as explain
    from .functional import local as local
    from .functional import merge as merge
    from .functional import route as route
    from .functional import search as search
    from .functional import single_pool as single_pool
    from .integrations.layers import Layer as Layer
    from .integrations.layers import Plans as Plans
    from .integrations.patch import patch_sdpa as patch_sdpa
    from .integrations.patch import register_transformers as register_transformers
    from .integrations.patch import survey as survey
    from .integrations.sdpa import Report as Report
    from .integrations.sdpa import clear_plans as clear_plans
    from .integrations.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from .quality import measure as measure
    from .quality.judge import Judgment as Judgment
    from .quality.judge import judge as judge
    from .quality.plan import Check as Check
    from .quality.plan import Plan as Plan
    from .quality.plan import Rung as Rung
    from .quality.plan import Setting as Setting
    from .quality.trust import Trust as Trust
    from .quality.trust import trust as trust
    from .quality.tune import tune as tune
    from .results import Attended as Attended
    from .results import MatchedPoints as MatchedPoints
    from .results import Matches as Matches
    from .results import Routes as Routes
    from .settings import Search as Search

__version__ = "0.3.0"

# Where each public name is defined.
_HOMES = {
    "AccuracyWarning": "core.first_call",
    "Attended": "results",
    "Cache": "core.decoding",
    "Check": "quality.plan",
    "Clusters": "core.tails.clusters",
    "Codebook": "core.tails.clusters",
    "DrawnKeys": "core.tails.drawn",
    "Estimate": "core.tails.estimate",
    "Explanation": "core.resolve",
    "Explorer": "explorer",
    "Interval": "core.statistics",
    "Judgment": "quality.judge",
    "Layer": "integrations.layers",
    "LayoutWarning": "core.layout_hints",
    "MatchedPoints": "results",
    "Matches": "results",
    "MetropolisHastings": "core.tails.sampled",
    "Plan": "quality.plan",
    "Plans": "integrations.layers",
    "Report": "integrations.sdpa",
    "Routes": "results",
    "Rung": "quality.plan",
    "Search": "settings",
    "Setting": "quality.plan",
    "Snis": "core.tails.sampled",
    "Trust": "quality.trust",
    "attend": "functional",
    "attention": "functional",
    "check_first_call": "core.first_call",
    "clear_caches": "functional",
    "clear_plans": "integrations.sdpa",
    "cluster": "functional",
    "correlation": "core.correlation",
    "decode": "functional",
    "estimate": "functional",
    "exact_attention": "core.exact",
    "exact_search": "core.exact",
    "explain": "functional",
    "explore": "explorer",
    "implementations": "engines.dispatch",
    "judge": "quality.judge",
    "local": "functional",
    "merge": "functional",
    "patch_sdpa": "integrations.patch",
    "register_transformers": "integrations.patch",
    "route": "functional",
    "scaled_dot_product_attention": "integrations.sdpa",
    "search": "functional",
    "single_pool": "functional",
    "survey": "integrations.patch",
    "trust": "quality.trust",
    "tune": "quality.tune",
}
# Modules with public names of their own.
_MODULES = {
    "bias": "bias",
    "distributed": "distributed",
    "images": "images",
    "integrations": "integrations",
    "measure": "quality.measure",
    "nn": "nn",
    "options": "options",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"{__name__}.{_MODULES[name]}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    own = [name for name in globals() if name.startswith("__") and name.endswith("__")]
    return sorted({*own, *_HOMES, *_MODULES})
