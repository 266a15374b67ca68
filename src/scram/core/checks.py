"""Checks of arguments. Every user-facing error says what was expected, what came, and the way out.

Imports nothing of the package.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_RANK = 4
SEARCH_FIELDS: set[str] = set()  # the names of the fields of `Search`, which fills it
MOST_MATCHES = 4096  # more than this must not exceed the number of keys


def whole(name: str, value: Any, least: int, hint: str = "") -> int:
    """An int (not a bool) that is at least `least`; NumPy's integers become ints."""
    value = _int(value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):  # an extent while torch exports
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}{hint}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}{hint}")
    return value  # type: ignore[return-value]


def count(name: str, value: Any, least: int = 0) -> int:
    """A whole number that engines take, in 32 bits."""
    number = whole(name, value, least)
    if isinstance(number, int) and number >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {number}; more is never needed")
    return number


def whole_fields(settings: Any, **least: int) -> None:
    """Fields of a frozen dataclass that are ints, each at least that."""
    for name, low in least.items():
        object.__setattr__(settings, name, count(name, getattr(settings, name), low))


def _int(value: Any) -> Any:
    """An int from anything that converts to one without loss; a tensor does not, since that would synchronize."""
    if isinstance(value, (int, Tensor, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def one_of(name: str, value: Any, allowed: Collection[str], hint: str = "") -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")
    return value


def instance(name: str, value: Any, wanted: type, words: str, hint: str = "") -> None:
    """A value of the type `wanted`, which the message calls `words`."""
    if not isinstance(value, wanted):
        raise TypeError(f"{name} must be a {words}, got {type(value).__name__}{hint}")


def enough_keys(q: Any, k: Any, matches: int) -> None:
    """Matches beyond the number of keys are -1; thousands of them are a mistake that fits no memory."""
    if matches > MOST_MATCHES:
        queries_keys(q, k)
        keys = math.prod(k.shape[2:-1])
        if matches > keys:
            raise ValueError(f"matches must be at most the number of keys, {keys}, got {matches}")


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__} {value!r}")
    return value


def seed(value: Any) -> Tensor | None:
    """None, an int that fits 64 bits, or a 0-d int64 tensor. Returns a tensor: an input of compiled graphs."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dtype != torch.int64 or value.ndim != 0:
            raise TypeError(
                f"seed as a tensor must be 0-d int64, got {value.dtype} of shape {tuple(value.shape)}; "
                "use torch.tensor(7) or a plain int"
            )
        return value
    value = _int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"seed must be None, an int or a 0-d int64 tensor, got {type(value).__name__} {value!r}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"seed must fit a signed 64-bit integer, got {value}; take it modulo 2**63")
    return torch.tensor(value, dtype=torch.int64, device="cpu")


def _float(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = f"; use float({name})" if hasattr(value, "__float__") and not isinstance(value, bool) else ""
        raise TypeError(f"{name} must be a float, got {type(value).__name__} {value!r}{hint}")
    try:
        float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit a float, got an int of {int(value).bit_length()} bits") from None


def real(name: str, value: Any, low: float, high: float, bounds: str, hint: str = "") -> None:
    """A float in the half-open interval [low, high)."""
    _float(name, value)
    if not low <= value < high:
        raise ValueError(f"{name} must be in {bounds}, got {value}{hint}")


def not_negative(name: str, value: Any) -> None:
    """A float that is at least 0, or infinite."""
    _float(name, value)
    if not value >= 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def share(name: str, value: Any) -> None:
    """A float in [0, 1]."""
    _float(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def bandwidth(value: Any) -> None:
    """Positive and finite; below the smallest normal float a division by it overflows."""
    real("bandwidth", value, 1e-30, math.inf, "(0, inf)")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def jumps(value: Any) -> tuple[int, ...]:
    if not _is_sequence(value):
        raise TypeError(f"jumps must be a sequence of ints such as (8, 4, 2, 1), got {value!r}")
    # No grid is wider than 2**31.
    return tuple(min(whole(f"jumps[{n}]", jump, 1), 2**31) for n, jump in enumerate(value))


def _tensor(name: str, value: Any, axes: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor {axes}, got {type(value).__name__}; use torch.as_tensor")
    if value.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one; pad it with torch.nested.to_padded_tensor")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}; call .to_dense()")


def queries_keys(q: Any, k: Any) -> None:
    """q [B, H, *G, E] and k [B, Hk, *G', E] fit each other."""
    _tensor("q", q, "[B, H, *G, E]")
    _tensor("k", k, "[B, Hk, *G', E]")
    queries, keys = q.shape, k.shape  # each time made anew by torch
    rank = len(queries) - 3
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(
            f"q must be [B, H, *G, E] with a grid of rank 1 to {MAX_RANK}, got {q.ndim} axes {tuple(queries)}; "
            "for [B, H, N, E] tensors of a picture use q.unflatten(2, (height, width))"
        )
    if len(keys) != len(queries):
        raise ValueError(
            f"k must have as many axes as q ({q.ndim}), got {k.ndim} axes {tuple(keys)}; "
            "query grid and key grid have the same rank, extents may differ"
        )
    if keys[0] != queries[0]:
        raise ValueError(f"k must have the batch size of q, {queries[0]}, got {keys[0]}; use k.expand")
    if keys[1] == 0 or queries[1] % keys[1]:
        raise ValueError(
            f"the key heads must divide the query heads, got q with {queries[1]} and k with {keys[1]} heads"
        )
    if keys[-1] != queries[-1] or queries[-1] < 1:
        raise ValueError(f"q and k must share their last axis (width >= 1), got {queries[-1]} and {keys[-1]}")
    grid, key_grid = queries[2:-1], keys[2:-1]
    if min(grid) < 1 or min(key_grid) < 1:
        raise ValueError(f"grid extents must be at least 1, got q {tuple(grid)} and k {tuple(key_grid)}")
    if math.prod(key_grid) >= 2**31 or math.prod(grid) >= 2**31:
        raise ValueError("a grid must have fewer than 2**31 points: keys are named by int32")
    _same("k", k, q)
    if q.dtype not in DTYPES:
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}; use q.float()")


def _same(name: str, x: Tensor, q: Tensor, like: str = "q", wide: bool = False) -> None:
    """x lies where q (or v, which messages call `like`) does and has its dtype; `wide`: or float32 beside 16 bits."""
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}; use {name}.to(q.device)")
    wide = wide and q.dtype.itemsize == 2
    if x.dtype != q.dtype and not (wide and x.dtype == torch.float32):
        want = f"{like}'s dtype {q.dtype}{' or float32' if wide else ''}"
        raise TypeError(f"{name} must have {want}, got {x.dtype}; use {name}.to({like}.dtype)")


def places(q: Tensor, coords: Any) -> None:
    """coords [B, H, *G, rank], places on the key grid."""
    _places("coords", coords, q, (*q.shape[:-1], q.ndim - 3), "[B, H, *G, rank]")


def flow_coords(q: Tensor, coords: Any) -> None:
    """coords [B, 2, h, w] of queries [B, 1, h, w, E]."""
    _places("coords", coords, q, (q.shape[0], 2, *q.shape[2:-1]), "[B, 2, h1, w1]")


def _places(name: str, coords: Any, q: Tensor, want: tuple[int, ...], axes: str) -> None:
    _tensor(name, coords, axes)
    if coords.dtype not in (torch.float32, torch.float64):
        hint = "16 bits cannot hold places on a large grid" if coords.is_floating_point() else "places may be fractions"
        raise TypeError(f"{name} must be float32 or float64, got {coords.dtype}; use {name}.float(): {hint}")
    if tuple(coords.shape) != want:
        raise ValueError(f"{name} must be {axes} = {want}, got {tuple(coords.shape)}: one place for every query")
    if coords.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {coords.device}; use {name}.to(q.device)")


def feature_maps(fmap1: Any, fmap2: Any) -> None:
    """Features [B, E, h1, w1] and [B, E, h2, w2] of two pictures."""
    for name, x in (("fmap1", fmap1), ("fmap2", fmap2)):
        _tensor(name, x, "[B, E, h, w]")
        if x.ndim != 4 or min(x.shape[1:]) < 1:
            raise ValueError(f"{name} must be [B, E, h, w] with E, h, w >= 1, got {tuple(x.shape)}")
    if fmap1.shape[:2] != fmap2.shape[:2]:
        raise ValueError(f"fmap2 must have fmap1's B, E = {tuple(fmap1.shape[:2])}, got {tuple(fmap2.shape[:2])}")
    if fmap1.dtype not in DTYPES:
        raise TypeError(f"fmap1 must be float16, bfloat16, float32 or float64, got {fmap1.dtype}; use fmap1.float()")
    _same("fmap2", fmap2, fmap1, "fmap1")


def values(q: Tensor, k: Tensor, v: Any) -> None:
    """v [B, Hk, *G', F] belongs to k."""
    _tensor("v", v, "[B, Hk, *G', F]")
    if v.shape[:-1] != k.shape[:-1] or v.ndim != k.ndim or v.shape[-1] < 1:
        want = (*k.shape[:-1], "F >= 1")
        raise ValueError(f"v must be [B, Hk, *G', F] = {want} like k, got {tuple(v.shape)}")
    _same("v", v, q, wide=True)


def order(q: Tensor, k: Tensor, causal: Any) -> None:
    if flag("causal", causal) and q.shape[2:-1] != k.shape[2:-1]:
        raise ValueError(
            f"causal needs equal grids, got queries {tuple(q.shape[2:-1])} and keys {tuple(k.shape[2:-1])}; "
            "pad the smaller grid and mask the padding with key_mask"
        )


def search_order(method: str, causal: bool) -> None:
    if causal and method == "tile":
        raise ValueError(
            "method must be 'query' or 'auto' under causal order, got 'tile': the queries of a tile share their "
            "candidates, so later ones would decide what earlier ones attend; pass search=scram.Search(method='query')"
        )


def key_mask(q: Tensor, k: Tensor, mask: Any) -> None:
    """None or bool [B, *G'] or [B, H, *G'], True = may be attended."""
    if mask is None:
        return
    _tensor("key_mask", mask, "[B, *G']")
    if mask.dtype != torch.bool:
        bias = "a float mask is a bias: pass its factors as bias=, which scram.bias makes"
        hint = bias if mask.is_floating_point() else "use key_mask.bool()"
        raise TypeError(f"key_mask must be bool (True = may be attended), got {mask.dtype}; {hint}")
    batch, heads, grid = q.shape[0], q.shape[1], tuple(k.shape[2:-1])
    want = (batch, *grid), (batch, heads, *grid)
    if tuple(mask.shape) not in want:
        hint = "; add the batch axis" if tuple(mask.shape) == grid else ""
        raise ValueError(
            f"key_mask must be [B, *G'] = {want[0]} or [B, H, *G'] = {want[1]}, got {tuple(mask.shape)}{hint}"
        )
    if mask.device != q.device:
        raise ValueError(f"key_mask must be on q's device {q.device}, got {mask.device}; use key_mask.to(q.device)")


def scale(value: Any) -> None:
    if value is None:
        return
    _float("scale", value)
    if not (0 < value < math.inf):
        raise ValueError(f"scale must be positive and finite, got {value}; to seek low scores negate q")


def grid_rank(name: str, value: Sequence[Any]) -> None:
    """One value for each axis of some grid."""
    if not 1 <= len(value) <= MAX_RANK:
        raise ValueError(f"{name} must be an int or have 1 to {MAX_RANK} values, one per grid axis, got {value!r}")


def radius(value: Any, rank: int, name: str = "radius") -> tuple[int, ...]:
    """One radius per axis, from an int or a sequence of them."""
    if _is_sequence(value):
        if len(value) != rank:
            raise ValueError(f"{name} must be an int or one int per grid axis ({rank}), got {len(value)} values")
        return tuple(min(whole(f"{name}[{axis}]", b, 0), 2**31) for axis, b in enumerate(value))
    return (min(whole(name, value, 0, ", or one int per grid axis"), 2**31),) * rank  # no grid is wider


def some_queries(q: Tensor) -> None:
    if q.numel() == 0:
        raise ValueError(f"q must hold at least one query, got {tuple(q.shape)}; skip an empty batch")


def finite(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        bad = int((~x.detach().isfinite()).sum())
        if bad:
            raise ValueError(f"{name} must be finite, {bad} of its {x.numel()} values are NaN or infinite")


def finite_but_for_masked(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """A masked key may be anything."""
    finite(q=q, **({} if key_mask is not None else {"k": k, "v": v}))


def grid(value: Any, name: str = "grid", example: str = " such as (14, 14)") -> tuple[int, ...]:
    """Extents of a grid of rank 1 to 4."""
    if not _is_sequence(value) or not 1 <= len(value) <= MAX_RANK:
        raise ValueError(f"{name} must be a sequence of 1 to {MAX_RANK} extents{example}, got {value!r}")
    return tuple(whole(f"{name}[{axis}]", extent, 1) for axis, extent in enumerate(value))


def extra(q: Tensor, k: Tensor, v: Tensor, pair: Any) -> None:
    """None or (k_extra [B, Hk, X, E], v_extra [B, Hk, X, F])."""
    if pair is None:
        return
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        hint = "; a third tensor belongs beside a bias" if isinstance(pair, (tuple, list)) and len(pair) == 3 else ""
        raise TypeError(f"extra must be a pair (k_extra, v_extra), got {type(pair).__name__}{hint}")
    for name, x, like, of in (("k_extra", pair[0], k, "q"), ("v_extra", pair[1], v, "v")):
        _tensor(name, x, "[B, Hk, X, E|F]")
        batch, heads, width = like.shape[0], like.shape[1], like.shape[-1]
        if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (batch, heads, width):
            raise ValueError(f"{name} must be [B, Hk, X, width] = ({batch}, {heads}, X, {width}), got {tuple(x.shape)}")
        _same(name, x, like, of)
    if pair[0].shape[2] != pair[1].shape[2]:
        raise ValueError(f"k_extra and v_extra must hold as many keys, got {pair[0].shape[2]} and {pair[1].shape[2]}")


def extra_mask(q: Tensor, pair: Any, mask: Any, weight: str, score: Any) -> None:
    """None or bool [B, X], beside extra keys."""
    if mask is None:
        return
    if pair is None:
        raise ValueError(
            "extra_mask masks extra keys, and there are none; pass extra=(k_extra, v_extra), or leave it out"
        )
    _tensor("extra_mask", mask, "[B, X]")
    want = (pair[0].shape[0], pair[0].shape[2])
    if tuple(mask.shape) != want:
        raise ValueError(f"extra_mask must be [B, X] = {want}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        raise TypeError(f"extra_mask must be bool, True = may be attended, got {mask.dtype}; use extra_mask.bool()")
    if mask.device != q.device:
        raise ValueError(f"extra_mask must be on the device of q, {q.device}, got {mask.device}; use .to(q.device)")
    if weight != "softmax" or callable(score):
        raise ValueError("extra_mask needs weight='softmax' and a score by name; leave masked keys out of extra")


def dropout(value: Any) -> None:
    real("dropout_p", value, 0.0, 1.0, "[0, 1)")


def matches_fields(index: Any, score: Any, key_grid: Any) -> tuple[int, ...]:
    """The fields of a Matches value fit each other."""
    _tensor("index", index, "[B, H, *G, kappa]")
    _tensor("score", score, "[B, H, *G, kappa]")
    if index.dtype != torch.int32:
        raise TypeError(f"index must be int32, got {index.dtype}; use index.to(torch.int32)")
    if score.dtype != torch.float32:
        raise TypeError(f"score must be float32, got {score.dtype}; use score.float()")
    if index.shape != score.shape or index.device != score.device:
        raise ValueError(
            f"index and score must share shape and device, got {tuple(index.shape)} on {index.device} "
            f"and {tuple(score.shape)} on {score.device}"
        )
    extents = grid(key_grid, "key_grid", "")
    if math.prod(extents) >= 2**31:
        raise ValueError(f"key_grid must have fewer than 2**31 points, got {extents}: keys are named by int32")
    if index.ndim != len(extents) + 3:
        raise ValueError(
            f"index must be [B, H, *G, kappa] with {len(extents)} grid axes like key_grid, got {tuple(index.shape)}"
        )
    if index.shape[-1] < 1:
        raise ValueError(f"index must hold at least one match per query, kappa >= 1, got {tuple(index.shape)}")
    return extents


def query_sample(queries: Any, points: int) -> None:
    """Flat query indices [n] into the query grid, or None for all."""
    if queries is None:
        return
    _tensor("queries", queries, "[n]")
    if queries.ndim != 1 or queries.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"queries must be int64 [n], got {queries.dtype} {tuple(queries.shape)}")
    if queries.numel() and not (int(queries.min()) >= 0 and int(queries.max()) < points):
        raise ValueError(f"queries must lie in 0..{points - 1}, the flat indices of the query grid")


def score_result(value: Any, want: tuple[int, ...]) -> Tensor:
    """What a user's score callable returned."""
    if not isinstance(value, Tensor) or tuple(value.shape) != want:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the score callable must return a tensor of shape {want} (inputs less their last axis), got {got}"
        )
    return value


def reverse_mode_only(impl: str) -> NotImplementedError:
    lacks = "has no forward-mode derivative (torch.func.jvp, forward_ad)"
    return NotImplementedError(f"impl={impl!r} {lacks}; use impl='reference'")


def first_order_only(impl: str) -> NotImplementedError:
    return NotImplementedError(f"impl={impl!r} has no second derivative; use impl='reference'")


def no_engine(impl: str, reasons: dict[str, list[str]]) -> ValueError:
    """No engine can run: every reason of every one."""
    lines = [f"  {name}: {'; '.join(why)}" for name, why in reasons.items()]
    return ValueError(f"impl={impl!r} cannot run this call:\n" + "\n".join(lines))


def torch_arguments(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> None:
    """What `torch.nn.functional.scaled_dot_product_attention` takes, for dense tensors."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        _dense_tensor(name, x, "[B, H, N, E]")
        if x.ndim < 3:
            raise ValueError(f"{name} must be [B, H, N, E] or [B, N, E], got {tuple(x.shape)}; add the missing axes")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}; use {name}.float()")
    if attn_mask is not None:
        _dense_tensor("attn_mask", attn_mask, "[..., N, M]")
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(f"attn_mask must be bool or floating point, got {attn_mask.dtype}; use attn_mask.bool()")
        shape = (*query.shape[:-1], key.shape[-2])
        ends = zip(reversed(attn_mask.shape), reversed(shape), strict=False)
        if not 2 <= attn_mask.ndim <= len(shape) or not all(own in (1, wanted) for own, wanted in ends):
            raise ValueError(f"attn_mask must broadcast to [..., N, M] = {shape}, got {tuple(attn_mask.shape)}")
    _float("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    flag("is_causal", is_causal)
    flag("enable_gqa", enable_gqa)
    if scale is not None:
        _float("scale", scale)
        if not -math.inf < scale < math.inf:
            raise ValueError(f"scale must be finite, got {scale}; None is 1 / sqrt(E)")


def _dense_tensor(name: str, value: Any, axes: str) -> None:
    if isinstance(value, Tensor) and value.is_nested:
        padded = "pad it with torch.nested.to_padded_tensor and mask the padding by attn_mask"
        raise TypeError(f"{name} must be a dense tensor, got a nested one; {padded}")
    _tensor(name, value, axes)


# --- keyword arguments under another name, such as those of torch's attention ---

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
    if name in SEARCH_FIELDS:
        use = f"use search=scram.Search({name}=...)"
        ways = {"search": use, "": f"{use} where the search is chosen", **ways}
    way = next((ways[needs] for needs in (*known, "") if needs in ways), "")
    near = get_close_matches(name, known, 1)
    return way or (f"use {near[0]}=" if near else f"it takes {', '.join(known)}")
