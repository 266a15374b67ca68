"""Keyword arguments under another name: those of torch's attention, and old names of this package."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_MASK = "use key_mask=, bool [B, *G'] or [B, H, *G'] with True = may be attended; there is no mask between queries"
_WEIGHTS = "no weights are kept: scram.search returns the keys, scram.attend the log of the normaliser"
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
    "samples": {"method": "use method=, such as scram.Hybrid(samples=512)"},
    "seed": {
        "method": "use method=, such as scram.Hybrid(samples=512, seed=0)",
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
    takes = [name for name in known if name != "self"]
    return TypeError(". ".join(f"{function}() has no argument {name}; {_way_out(name, takes)}" for name in names))


def _way_out(name: str, known: list[str]) -> str:
    from .types import Search

    ways = dict(ELSEWHERE.get(name, {}))
    if name in Search.__dataclass_fields__:
        ways.setdefault("search", f"use search=scram.Search({name}=...)")
        ways.setdefault("", f"use search=scram.Search({name}=...) where the search is chosen")
    for needs, way in ways.items():
        if needs in known or not needs:
            return way
    near = get_close_matches(name, known, 1)
    return f"use {near[0]}=" if near else f"it takes {', '.join(known)}"


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Takes old keyword arguments for the new ones, old=new, with a DeprecationWarning."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in [name for name in kwargs if name in names]:
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{function.__name__}() takes {new}= or its old name {old}=, not both")
                warnings.warn(_is_now(function.__name__, f"{old}=", f"{new}="), DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def renamed_attribute(new: str) -> Any:
    """A property by the old name of an attribute, with a DeprecationWarning."""

    class Old:
        def __set_name__(self, owner: type, name: str) -> None:
            self.owner, self.name = owner.__name__, name

        def __get__(self, instance: Any, owner: type) -> Any:
            if instance is None:
                return self
            warnings.warn(_is_now(self.owner, f".{self.name}", f".{new}"), DeprecationWarning, stacklevel=2)
            return getattr(instance, new)

    return Old()


def _is_now(owner: str, old: str, new: str) -> str:
    return f"{owner}: {old} is now {new}; the old name goes with the next version"
