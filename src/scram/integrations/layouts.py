"""Which tokens of a call are a grid, which stand off it, and what a mask masks: from torch's signature to a grid's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from .. import _compat
from ..core import checks
from ..core.bias import Bias, Extra
from ..core.dense import in_order
from ..core.resolve import Request
from .float_masks import FloatMasks
from .layers import Tokens

Grids = Sequence[int] | Sequence[Sequence[int]]  # one grid, or several
BETWEEN_QUERIES = "a mask that differs between queries"
BETWEEN_HEADS = "a mask of tokens off the grid that differs between heads"
COMPILED_MASK = "a mask with a row for each query, which compiled code cannot look at; pass one row for all"


def given_tokens(grid: Any, before: Any, after: Any, key_grid: Any) -> tuple[Tokens, ...] | None:
    """The tokens that a user names; None for "auto"."""
    checks.whole("before", before, 0)
    checks.whole("after", after, 0)
    if isinstance(grid, str):
        checks.one_of("grid", grid, ("auto",))
        for name, value in {"before": before, "after": after, "key_grid": key_grid}.items():
            if value:
                raise ValueError(f'{name} is found with grid="auto", got {value}; pass the grid too')
        return None
    several = isinstance(grid, Sequence) and len(grid) > 0 and all(isinstance(one, Sequence) for one in grid)
    grids = [checks.grid(one) for one in (grid if several else (grid,))]
    keys = () if key_grid is None else checks.grid(key_grid)
    for one in grids:
        if keys and len(keys) != len(one):
            raise ValueError(f"key_grid must have the rank of grid, {len(one)}, got {keys}")
        named = {"before": before, "after": after, **{f"grid[{axis}]": extent for axis, extent in enumerate(one)}}
        for name, number in named.items():
            if number >= 2**63:
                raise ValueError(f"{name} must be below 2**63, got {number}; no tensor has more tokens")
    if len({math.prod(one) for one in grids}) < len(grids):
        raise ValueError(f"grids must differ in their number of tokens, by which they are told apart, got {grids}")
    return tuple(Tokens(one, before, after, keys) for one in grids)


class KeyMasks(NamedTuple):
    """What a mask says of keys on the grid and off it; None where it masks nothing, and adds nothing."""

    grid: Tensor | None = None  # bool [B, H, *G']
    off: Tensor | None = None  # bool [B, X]
    bias: Bias | None = None
    b_extra: Tensor | None = None  # [1, 1, X, r], that of keys off the grid


class MaskReader:
    """Reads masks that hide the same keys from all queries of the grid. In eager code it looks at what they hold, once.

    A mask that masks nothing on the grid is none, as that of padded text. Compiled code cannot know it: there a mask
    stays one. A float mask is a bias besides.

    Args:
        error: the budget of the calls, of which factors of a bias take a share; None: none.
    """

    def __init__(self, error: float | None = None) -> None:
        self.error = error
        self.floats = FloatMasks()
        self._last: tuple[ReferenceType[Tensor], int, Tokens, KeyMasks | str] | None = None

    def read(self, mask: Tensor | None, query: Tensor, tokens: Tokens) -> KeyMasks | str:
        """The masks, or why the call is left to torch.

        Args:
            mask: bool or float, broadcast to [B, H, N, M], or [B, N, M] beside three axes.
            query: [B, H, N, E] or [B, N, E].
            tokens: what the call has.
        """
        if mask is None:
            return KeyMasks()
        looks = not torch.compiler.is_compiling() and not mask.is_inference()
        if looks and self._last is not None:
            known, version, of, masks = self._last
            if known() is mask and version == mask._version and of == tokens:
                return masks
        if mask.dtype == torch.bool:
            masks = _masks(mask, query, tokens)
        else:
            masks = _of_floats(self.floats, mask, query, tokens, self.error)
            looks = looks and not mask.requires_grad
        if looks:
            self._last = (ref(mask), mask._version, tokens, masks)
        return masks


def _of_four_axes(mask: Tensor, query: Tensor) -> Tensor | str:
    """The mask as [B or 1, H or 1, N or 1, M or 1]."""
    if not 2 <= mask.ndim <= query.ndim:
        return f"a mask of {mask.ndim} axes"
    if query.ndim == 3 and mask.ndim == 3:
        mask = mask.unsqueeze(1)
    return mask[(None,) * (4 - mask.ndim)]


def _of_floats(floats: FloatMasks, given: Tensor, query: Tensor, tokens: Tokens, error: float | None) -> KeyMasks | str:
    mask = _of_four_axes(given, query)
    if isinstance(mask, str):
        return mask
    key_grid = tokens.key_grid or tokens.grid
    meaning = floats.read(mask, tokens.grid, key_grid, tokens.before, tokens.after, error)
    if isinstance(meaning, str):
        return meaning
    batch = query.shape[0]
    heads = query.shape[1] if query.ndim == 4 else 1
    return KeyMasks(
        None if meaning.key_mask is None else meaning.key_mask.expand(batch, heads, *key_grid),
        None if meaning.off is None else meaning.off.expand(batch, -1).contiguous(),
        meaning.bias,
        meaning.b_extra,
    )


def _masks(given: Tensor, query: Tensor, tokens: Tokens) -> KeyMasks | str:
    mask = _of_four_axes(given, query)
    if isinstance(mask, str):
        return mask
    compiling = torch.compiler.is_compiling()
    if mask.shape[2] != 1:
        if compiling:
            return COMPILED_MASK
        mask = mask[:, :, tokens.before : mask.shape[2] - tokens.after]
        first = mask[:, :, :1]
        if not bool((mask == first).all()):
            return BETWEEN_QUERIES
        mask = first
    batch = query.shape[0]
    heads = query.shape[1] if query.ndim == 4 else 1
    key_grid = tokens.key_grid or tokens.grid
    row = mask[:, :, 0].expand(-1, -1, tokens.keys)  # [B or 1, H or 1, M]
    on_grid = row[..., tokens.before : tokens.keys - tokens.after]
    off = without_grid(row.unsqueeze(-1), tokens).squeeze(-1)  # [B or 1, H or 1, X]
    if off.shape[1] > 1 and tokens.off:
        if compiling or not bool((off == off[:, :1]).all()):
            return BETWEEN_HEADS
        off = off[:, :1]
    masks = KeyMasks(
        on_grid.expand(batch, heads, -1).reshape(batch, heads, *key_grid),
        off[:, 0].expand(batch, -1).contiguous() if tokens.off else None,
    )
    if compiling:
        return masks
    return KeyMasks(_hiding(masks.grid), _hiding(masks.off))


def _hiding(mask: Tensor | None) -> Tensor | None:
    """The mask, where it hides anything."""
    return None if mask is None or bool(mask.all()) else mask


def on_the_grid(x: Tensor, tokens: Tokens) -> Tensor:
    """Of [.., T, E] the tokens on the grid."""
    return x[..., tokens.before : x.shape[-2] - tokens.after, :]


def without_grid(x: Tensor, tokens: Tokens) -> Tensor:
    """Of [.., T, E] the tokens off the grid."""
    first = x[..., : tokens.before, :]
    return torch.cat([first, x[..., x.shape[-2] - tokens.after :, :]], -2) if tokens.after else first


class TorchOptions(NamedTuple):
    """The options of a call of `F.scaled_dot_product_attention`, besides its mask."""

    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """The call, by torch."""
        out: Tensor = _compat.SDPA(
            query,
            key,
            value,
            attn_mask,
            dropout_p=self.dropout_p,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )
        return out


Attend = Callable[[Tensor, Tensor, Tensor, Request], Tensor | None]


def attend_on_grid(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    options: TorchOptions,
    tokens: Tokens,
    masks: KeyMasks,
    attend: Attend,
) -> Tensor:
    """`attend` answers on the grid, torch for the tokens off it; torch alone where `attend` returns None.

    Queries on the grid attend keys off it as extra keys; queries off it attend every key.
    """
    heads = [x if x.ndim == 4 else x.unsqueeze(1) for x in (query, key, value)]
    grids = tokens.grid, tokens.key_grid or tokens.grid, tokens.key_grid or tokens.grid
    pairs = zip(heads, grids, strict=True)
    q, k, v = (on_the_grid(x, tokens).reshape(*x.shape[:2], *grid, x.shape[-1]) for x, grid in pairs)
    before_grid = tokens._replace(after=0) if options.is_causal else tokens  # what stands after it comes later
    seen = heads if before_grid is tokens else [x[:, :, : x.shape[2] - tokens.after] for x in heads]
    extra: Extra | None = None
    if before_grid.off:
        extra = without_grid(seen[1], before_grid), without_grid(seen[2], before_grid)
        extra = extra if masks.b_extra is None else (*extra, masks.b_extra)
    call = Request(
        causal=options.is_causal,
        key_mask=masks.grid,
        scale=options.scale,
        extra=extra,
        extra_mask=None if extra is None else masks.off,
        dropout_p=options.dropout_p,
        bias=masks.bias,
    )
    out = attend(q, k, v, call)
    if out is None:
        return options.attend(query, key, value, attn_mask)
    out = out.flatten(2, -2)
    if tokens.off:
        mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.ndim == query.ndim == 3 else attn_mask
        off = _attend_off_grid(heads, mask, options, tokens)
        before, after = off[:, :, : tokens.before], off[:, :, tokens.before :]
        out = torch.cat([before, out, after] if tokens.after else [before, out], 2)
    return out if query.ndim == 4 else out.squeeze(1)


def _attend_off_grid(
    heads: Sequence[Tensor], attn_mask: Tensor | None, options: TorchOptions, tokens: Tokens
) -> Tensor:
    """The queries off the grid [B, H, X, E] over every key, by torch."""
    query, key, value = heads
    mask = attn_mask
    spoiled = None
    if options.is_causal:
        key, value, spoiled = in_order(query, key, value)
        place = torch.arange(tokens.total, device=query.device).unsqueeze(1)  # [T, 1]
        mask = without_grid(place, tokens) >= place.T
        options = options._replace(is_causal=False)
    elif mask is not None:
        mask = without_grid(mask, tokens) if mask.shape[-2] != 1 else mask
    out = options.attend(without_grid(query, tokens), key, value, mask)
    return out if spoiled is None else out + without_grid(spoiled, tokens)
