"""What `grid="auto"` means: the grid of a layer whose queries come from a picture or a film, and why another has none.

The evidence is the call of the model: a config that declares patches, a picture [B, C, H, W], a film or latents
[B, C, T, H, W] among its arguments whose patches are the tokens, numbers of rows and columns, ids of places. A square
number of tokens is no evidence: object queries and text are not pictures.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.fx
from torch import Tensor, nn

from ..core.layout_hints import PREFIXES
from .layers import NO_TOKENS, Tokens

MOST_PREFIX = 16  # tokens before a grid whose patches are known
MOST_STRIDE = 64  # of the feature maps of a backbone of convolutions
FEW_CHANNELS = 4  # of a picture; a tensor of more channels is cut into patches only by what the model declares
SIZES = ("image_size", "sample_size")
MEMORY = ("memory", "encoder_hidden_states")  # what torch, transformers and diffusers call the keys of cross-attention
SIDES = ("num_frames", "height", "width")  # what a model may be told in numbers; frames may be left out
PLACES = ("img_ids", "img_shapes", "timestep")  # the last says when
CHANNELS = ("in_channels", "num_channels", "in_chans")
# Where a model of diffusers puts the tokens of its text. Its code says it, no argument does.
TEXT_BEFORE = {"FluxTransformer2DModel", "CogVideoXTransformer3DModel", "QwenImageTransformer2DModel"}
TEXT_AFTER = {"SD3Transformer2DModel", "HunyuanVideoTransformer3DModel"}
PASS_IT = "pass grid=(height, width) and before= or after= if they are a grid"
CAUSAL = f"causal order, as of text; {PASS_IT}"
TEXT = f"tokens of text: a module around the call was given their numbers; {PASS_IT}"
OBJECTS = f"queries that are not the picture: their layer reads its tokens beside them (object queries); {PASS_IT}"
COMPILED = "compiled before its grid was seen; call the model once before it is compiled, or pass grid= and before="
GRAPH = f"a call in a graph of torch.fx, whose layers are not seen; {PASS_IT}"
Grid = tuple[int, ...]


@dataclass(frozen=True)
class ModuleCall:
    """A module that is running, and the tensors it was called with.

    Args:
        module: the module.
        tensors: its arguments that are tensors.
        memory: the argument that is called so, None for none.
        places: arguments of `SIDES` and `PLACES`, by name.
    """

    module: nn.Module
    tensors: tuple[Tensor, ...] = ()
    memory: Tensor | None = None
    places: dict[str, Any] = field(default_factory=dict)

    @property
    def pictures(self) -> Iterator[Tensor]:
        return (x for x in self.tensors if x.ndim == 4 and x.is_floating_point())

    @property
    def films(self) -> Iterator[Tensor]:
        return (x for x in self.tensors if x.ndim == 5 and x.is_floating_point())


def module_calls() -> list[ModuleCall]:
    """The modules whose methods are running in this thread, the innermost first."""
    calls: list[ModuleCall] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        own = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(own, nn.Module):
            module = getattr(own, "_orig_mod", own)  # of what torch.compile returns
            same = calls.pop() if calls and calls[-1].module is module else ModuleCall(module)
            calls.append(_with_arguments(same, frame))
        frame = frame.f_back
    return calls


def _with_arguments(call: ModuleCall, frame: FrameType) -> ModuleCall:
    """The call with the arguments of another frame of the same module, which are nearer to what the caller passed.

    `forward` may bind its names to other tensors. `nn.Module.__call__` around it keeps what it was given.
    """
    code = frame.f_code
    starred = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount + starred]
    values: list[Any] = []
    places: dict[str, Any] = {}
    for name in names:
        value = frame.f_locals.get(name)
        given = value if isinstance(value, dict) else {name: value}
        places |= {one: given[one] for one in (*SIDES, *PLACES) if given.get(one) is not None}
        values += value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else [value]
    memory = call.memory
    for name in MEMORY:
        if memory is None and name in names and isinstance(frame.f_locals.get(name), Tensor):
            memory = frame.f_locals[name]
    tensors = tuple(x for x in values if isinstance(x, Tensor))
    return ModuleCall(call.module, tensors or call.tensors, memory, {**call.places, **places})


@dataclass(eq=False)
class AutoGrids:
    """Finds grids; keeps how the convolutions of a module cut pictures, and what was found for each layer."""

    _cuts: WeakKeyDictionary[nn.Module, dict[int, set[tuple[int, int, bool]]]] = field(
        default_factory=WeakKeyDictionary
    )
    _found: WeakKeyDictionary[nn.Module, dict[tuple[int, int, bool], Tokens | str]] = field(
        default_factory=WeakKeyDictionary
    )

    def found_before(self, query: Tensor, keys: int, causal: bool, calls: Sequence[ModuleCall]) -> Tokens | str | None:
        """What the layer's last call of as many tokens had: for a checkpoint, which computes a layer alone."""
        return self._found.get(calls[0].module, {}).get((int(query.shape[-2]), keys, causal)) if calls else None

    def find(self, query: Tensor, keys: int, causal: bool, calls: Sequence[ModuleCall]) -> Tokens | str:
        """What the tokens of self-attention are, or why they are no grid; arguments as of `_find`."""
        found = self._find(query, keys, causal, calls)
        if calls:
            self._found.setdefault(calls[0].module, {})[int(query.shape[-2]), keys, causal] = found
        return found

    def _find(self, query: Tensor, keys: int, causal: bool, calls: Sequence[ModuleCall]) -> Tokens | str:
        """What the tokens of self-attention are, or why they are no grid.

        Args:
            query: [B, H, N, E] or [B, N, E].
            keys: how many there are; fewer than queries where a layer reduces its own.
            causal: whether the call is.
            calls: the modules around it, the innermost first.
        """
        if causal or (calls and getattr(calls[0].module, "is_causal", False) is True):
            return CAUSAL
        if calls and isinstance(calls[0].module, torch.fx.GraphModule):
            return GRAPH
        total = int(query.shape[-2])
        if keys != total:
            return self._reduced(total, keys, calls)
        patch = next((one for one in (_patch(call.module) for call in calls) if one is not None), None)
        any_picture = False
        for number, call in enumerate(calls):
            if any(_are_numbers(x, total) for x in call.tensors):
                return TEXT
            known = placed(call, total)
            if known is not None:
                return known
            for picture in call.pictures:
                if picture.shape == query.shape:
                    continue  # [B, H, N, E]
                any_picture = True
                cut = self._cut(call.module, picture, patch, total)
                if cut is not None:
                    inner = calls[:number]
                    points = {total, total - cut[1]}
                    if any(self._reads_picture(one, call.module, picture, patch, total, points) for one in inner):
                        return OBJECTS
                    return Tokens(*cut)
        declared = None if any_picture else self._declared(calls, total)
        return no_picture(total) if declared is None else Tokens(*declared)

    def _reduced(self, total: int, keys: int, calls: Sequence[ModuleCall]) -> Tokens | str:
        """A layer that was told its height and width, and whose own convolution reduces its keys."""
        for call in calls:
            grid = next((one for one in _told(call) if math.prod(one) == total), None)
            if grid is None:
                continue
            for one in calls[0].module.modules():
                if isinstance(one, nn.Conv2d) and max(one.stride) > 1 and len(grid) == 2:
                    key_grid = _convolved(one, grid)
                    if math.prod(key_grid) == keys:
                        return Tokens(grid, key_grid=key_grid)
        return f"{total} queries and {keys} keys, which are not the same grid (cross-attention)"

    def _declared(self, calls: Sequence[ModuleCall], total: int) -> tuple[Grid, int] | None:
        """The grid of the size that a config declares, where the model was given no picture."""
        for call in calls:
            size = _size(call.module)
            patch = _patch(call.module)
            if size is not None and patch is not None:
                grid = (size[0] // patch[0], size[1] // patch[1])
                whole = size == (grid[0] * patch[0], grid[1] * patch[1])
                if whole and min(grid) > 0 and 0 <= total - math.prod(grid) <= MOST_PREFIX:
                    return grid, total - math.prod(grid)
        return None

    def _reads_picture(
        self,
        call: ModuleCall,
        around: nn.Module,
        picture: Tensor,
        patch: tuple[int, int] | None,
        total: int,
        points: set[int],
    ) -> bool:
        """Whether a module was given tokens of the picture beside the queries."""

        def of_picture(length: int) -> bool:
            return self._cut(around, picture, patch, length) is not None

        tokens = [x for x in call.tensors if x.ndim == 3 and x.is_floating_point()]
        memory = () if call.memory is None or call.memory.ndim != 3 else call.memory.shape[:2]
        if any(of_picture(int(length)) for length in memory):
            return True
        for axis in (0, 1):  # sequences come first or second
            lengths = {int(x.shape[axis]) for x in tokens}
            if lengths & points and any(of_picture(length) for length in lengths - points):
                return True
        return False

    def _cut(
        self, module: nn.Module, picture: Tensor, patch: tuple[int, int] | None, total: int
    ) -> tuple[Grid, int] | None:
        """The grid of the picture's patches that leaves few of the tokens, and how many; None where none does.

        Of a tensor that has as many channels as patches are cut from, the patches come first: 3 x 768 points of a
        picture are as many as 48 x 48 patches.
        """
        channels, *size = (int(n) for n in picture.shape[1:])
        cuts = self._convolutions(module).get(channels)
        points = ((size[0], size[1]), PREFIXES)  # [B, C, *grid]
        last = ((channels, size[0]), PREFIXES)  # [B, *grid, C]
        few = range(MOST_PREFIX + 1)
        patches: list[tuple[Grid, Sequence[int]]] = []
        if patch is not None:
            patches.append(((size[0] // patch[0], size[1] // patch[1]), few))
        elif cuts:
            for tall, wide, whole in sorted(cuts):
                if whole:
                    patches.append(((size[0] // tall, size[1] // wide), few))
                    continue
                stride = max(tall, wide)
                while stride <= MOST_STRIDE:
                    patches.append(((-(-size[0] // stride), -(-size[1] // stride)), PREFIXES))
                    stride *= 2
        elif channels <= FEW_CHANNELS:
            both = math.gcd(*size)
            sides = (side for side in range(2, both + 1) if both % side == 0)
            patches += [((size[0] // side, size[1] // side), PREFIXES) for side in sides]
        config = getattr(module, "config", None)
        is_picture = bool(cuts) or channels in (*range(1, FEW_CHANNELS + 1), *(_number(config, n) for n in CHANNELS))
        for candidates in ([*patches, points], [last]) if is_picture else ([points], [last], patches):
            fitting = [
                (total - math.prod(grid), grid)
                for grid, prefixes in candidates
                if min(grid) > 1 and total - math.prod(grid) in prefixes
            ]
            if fitting:
                prefix, nearest = min(fitting)
                return nearest, prefix
        return None

    def _convolutions(self, module: nn.Module) -> dict[int, set[tuple[int, int, bool]]]:
        """By channels of their input: strides of the strided convolutions, and whether these are patches."""
        known = self._cuts.get(module)
        if known is None:
            known = {}
            for one in module.modules():
                if isinstance(one, nn.Conv2d) and max(one.stride) > 1:
                    tall, wide = (int(n) for n in one.stride)
                    patches = tuple(one.kernel_size) == (tall, wide)
                    known.setdefault(one.in_channels, set()).add((tall, wide, patches))
            self._cuts[module] = known
        return known


def placed(call: ModuleCall, total: int) -> Tokens | str | None:
    """The tokens of a call that says where they are, or why they are none; None where it does not say it."""
    for grid in (*_told(call), *_of_ids(call), *_of_films(call), *_of_patches(call)):
        off = total - math.prod(grid)
        if not off:
            return Tokens(grid)
        if off == _text(call):
            kinds = {kind.__name__ for kind in type(call.module).__mro__}
            if kinds & TEXT_BEFORE:
                return Tokens(grid, before=off)
            if kinds & TEXT_AFTER:
                return Tokens(grid, after=off)
            size = ", ".join(map(str, grid))
            return f"{off} tokens of text beside a grid; pass grid=({size}) and before={off} or after={off}"
    return None


def _text(call: ModuleCall) -> int:
    """How many tokens of text the model was given; 0 for none."""
    return 0 if call.memory is None or call.memory.ndim != 3 else int(call.memory.shape[1])


def _told(call: ModuleCall) -> list[Grid]:
    """What a module was told in numbers."""
    told = (call.places.get(name) for name in SIDES)
    frames, *sides = (n if isinstance(n, int) and not isinstance(n, bool) else 0 for n in told)
    if min(sides) < 1:
        return []
    return [(frames, *sides)] * (frames > 1) + [tuple(sides)]


def _of_ids(call: ModuleCall) -> list[Grid]:
    """The grid of ids of places [N, A] or [B, N, A] that run over it row by row; of shapes [[(T, H, W)]]."""
    shapes = call.places.get("img_shapes")
    while isinstance(shapes, (list, tuple)) and len(shapes) > 0 and not isinstance(shapes[0], int):
        if any(one != shapes[0] for one in shapes) or (isinstance(shapes[0], list) and len(shapes[0]) > 1):
            return []
        shapes = shapes[0]
    if isinstance(shapes, (list, tuple)) and len(shapes) == 3:
        return [_without_ones(shapes)]
    ids = call.places.get("img_ids")
    if not isinstance(ids, Tensor) or ids.ndim not in (2, 3) or not ids.numel():
        return []
    places = ids.flatten(0, -2) if ids.shape[:-2].numel() == 1 else ids[0]
    places = places - places.amin(0)
    grid = tuple(int(n) + 1 for n in places.amax(0).tolist())
    if math.prod(grid) != len(places):
        return []
    axes = [torch.arange(n, device=places.device, dtype=places.dtype) for n in grid]
    expected = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    return [_without_ones(grid)] if bool((places == expected).all()) else []


def _of_films(call: ModuleCall) -> list[Grid]:
    """The patches of films and latents [B, C, T, H, W] or [B, T, C, H, W]; without patches their points."""
    config = getattr(call.module, "config", None)
    patch = film_patch(config)
    grids = []
    for film in call.films:
        first, second, *size = (int(n) for n in film.shape[1:])
        sizes = [(second, *size), (first, *size)]
        channels = next((n for n in (_number(config, name) for name in CHANNELS) if n), 0)
        if patch is None or first == channels:
            sizes = sizes[:1]
        elif second == channels:
            sizes = sizes[1:]
        else:
            continue  # which axis the frames are is not known
        for grid in sizes:
            if patch is not None:
                grid = tuple(n // each for n, each in zip(grid, patch, strict=True))
            if min(grid) > 0:
                grids += [_without_ones(grid)] + ([grid[1:]] if patch is None else [])
    return grids


def _of_patches(call: ModuleCall) -> list[Grid]:
    """The patches of latents [B, C, H, W] of a model that was given text too."""
    patch = _patch(call.module)
    if patch is None or not _text(call):
        return []
    return [
        (int(picture.shape[2]) // patch[0], int(picture.shape[3]) // patch[1])
        for picture in call.pictures
        if min(int(picture.shape[2]) // patch[0], int(picture.shape[3]) // patch[1]) > 0
    ]


def _without_ones(grid: Sequence[int]) -> Grid:
    """Without a single frame."""
    return tuple(grid[1:]) if len(grid) > 1 and grid[0] == 1 else tuple(grid)


def film_patch(config: Any) -> tuple[int, int, int] | None:
    """Extents of a patch over frames, rows and columns, as a config of diffusers or transformers declares them."""
    value = _declared_value(config, "patch_size")
    if isinstance(value, (tuple, list)) and len(value) == 3 and all(isinstance(n, int) and n > 0 for n in value):
        return value[0], value[1], value[2]
    pair = _pair(config, "patch_size")
    if pair is None:
        return None
    frames = _number(config, "patch_size_t") or _number(config, "tubelet_size") or 1
    return frames, *pair


def _convolved(conv: nn.Conv2d, grid: Grid) -> Grid:
    """The grid that a convolution leaves; () of a padding that is a word."""
    if isinstance(conv.padding, str):
        return ()
    axes = zip(grid, conv.kernel_size, conv.stride, conv.padding, conv.dilation, strict=True)
    return tuple((n + 2 * pad - wide * (kernel - 1) - 1) // step + 1 for n, kernel, step, pad, wide in axes)


def compiled_grid(total: int, keys: int) -> tuple[Tokens, str]:
    """What the tokens are and why not, while a graph is traced: by the call of the compiled model alone.

    Its inner modules are not seen, so that a model with cross-attention has no grid.
    """
    calls = module_calls()
    for call in calls:
        if any(_reads_memory(kind) for kind in {type(one) for one in call.module.modules()}):
            return NO_TOKENS, COMPILED
    result = AutoGrids().find(torch.empty(1, total, 1, dtype=torch.float32, device="cpu"), keys, False, calls)
    return (NO_TOKENS, COMPILED) if isinstance(result, str) else (result, "")


def _reads_memory(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and any(name in code.co_varnames for name in MEMORY)


def no_picture(total: int) -> str:
    return f"{total} tokens, and no picture is known that they are patches of; {PASS_IT}"


def _are_numbers(x: Tensor, total: int) -> bool:
    return x.ndim == 2 and x.shape[-1] == total and x.dtype in (torch.int32, torch.int64)


def _declared_value(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _number(config: Any, name: str) -> int:
    """A number that a config declares; 0 for none."""
    value = _declared_value(config, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _pair(config: Any, name: str) -> tuple[int, int] | None:
    value = _declared_value(config, name)
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    whole = len(numbers) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers)
    return (numbers[0], numbers[1]) if whole else None


def _patch(module: nn.Module) -> tuple[int, int] | None:
    """The patches that a config of transformers or diffusers declares."""
    return _pair(getattr(module, "config", None), "patch_size")


def _size(module: nn.Module) -> tuple[int, int] | None:
    """The size of the pictures that a config of transformers or diffusers declares."""
    config = getattr(module, "config", None)
    return next((size for size in (_pair(config, name) for name in SIZES) if size is not None), None)
