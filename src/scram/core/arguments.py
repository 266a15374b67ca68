"""Keyword arguments under another name, such as those of torch's attention: what to use instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from ..settings import Search

P = ParamSpec("P")
R = TypeVar("R")

_MASK = "use key_mask=, bool [B, *G'] or [B, H, *G'] with True = may be attended; there is no mask between queries"
_WEIGHTS = "no weights are kept: scram.search returns the keys, scram.attend the log of the normalizer"
# Names used elsewhere: what to do in a function that takes the argument named first, "" in every other.
ELSEWHERE = {
    "attn_mask": {"key_mask": _MASK},
    "mask": {"key_mask": _MASK},
    "key_padding_mask": {"key_mask": "use key_mask=~key_padding_mask: there True = may be attended"},
    "is_causal": {"causal": "use causal=", "": "use causal=True where the module is made"},
    "dropout": {"dropout_p": "use dropout_p="},
    "enable_gqa": {"": "k and v may have fewer heads than q without it"},
    "need_weights": {"": _WEIGHTS},
    "average_attn_weights": {"": _WEIGHTS},
    "samples": {"method": "use method=, such as scram.DrawnKeys(samples=512)"},
    "seed": {
        "method": "use method=, such as scram.DrawnKeys(samples=512, seed=0)",
        "search": "use search=scram.Search(seed=...)",
        "dropout_p": "torch.manual_seed governs dropout, scram.Search(seed=...) the search",
    },
}


def explains(function: Callable[P, R]) -> Callable[P, R]:
    """Explains an unknown keyword argument; a call without one costs nothing more."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            known = inspect.signature(function).parameters
            unknown = [name for name in kwargs if name not in known]
            if unknown:
                raise unknown_arguments(function.__qualname__.removesuffix(".__init__"), unknown, known) from None
            raise

    return call


def unknown_arguments(function: str, names: Iterable[str], known: Iterable[str]) -> TypeError:
    """The error for keyword arguments `names` that `function` does not take; it takes `known`."""
    takes = [name for name in known if name != "self" and not name.startswith("_")]
    return TypeError(". ".join(f"{function}() has no argument {name}; {_way_out(name, takes)}" for name in names))


def _way_out(name: str, known: list[str]) -> str:
    ways = ELSEWHERE.get(name, {})
    if name in Search.__dataclass_fields__:
        use = f"use search=scram.Search({name}=...)"
        ways = {"search": use, "": f"{use} where the search is chosen", **ways}
    way = next((ways[needs] for needs in (*known, "") if needs in ways), "")
    near = get_close_matches(name, known, 1)
    return way or (f"use {near[0]}=" if near else f"it takes {', '.join(known)}")
