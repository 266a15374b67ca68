"""What `grid="auto"` means: the grid of a layer whose queries come from a picture, and why another layer has none.

The evidence is the call of the model: a config that declares patches, a picture among its arguments whose patches are
the tokens. A square number of tokens is no evidence: object queries and text are not pictures.
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

MOST_PREFIX = 16  # tokens before a grid whose patches are known
MOST_STRIDE = 64  # of the feature maps of a backbone of convolutions
FEW_CHANNELS = 4  # of a picture; a tensor of more channels is cut into patches only by what the model declares
SIZES = ("image_size", "sample_size")
MEMORY = ("memory", "encoder_hidden_states")  # what torch, transformers and diffusers call the keys of cross-attention
PASS_IT = "pass grid=(height, width) and prefix= if they are a grid"
CAUSAL = f"causal order, as of text; {PASS_IT}"
TEXT = f"tokens of text: a module around the call was given their numbers; {PASS_IT}"
OBJECTS = f"queries that are not the picture: their layer reads its tokens beside them (object queries); {PASS_IT}"
COMPILED = "compiled before its grid was seen; call the model once before it is compiled, or pass grid= and prefix="
GRAPH = f"a call in a graph of torch.fx, whose layers are not seen; {PASS_IT}"
Grid = tuple[int, ...]


@dataclass(frozen=True)
class ModuleCall:
    """A module that is running, and the tensors it was called with.

    Args:
        module: the module.
        tensors: its arguments that are tensors.
        memory: the argument that is called so, None for none.
    """

    module: nn.Module
    tensors: tuple[Tensor, ...] = ()
    memory: Tensor | None = None

    @property
    def pictures(self) -> Iterator[Tensor]:
        return (x for x in self.tensors if x.ndim == 4 and x.is_floating_point())


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
    for name in names:
        value = frame.f_locals.get(name)
        values += value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else [value]
    memory = call.memory
    for name in MEMORY:
        if memory is None and name in names and isinstance(frame.f_locals.get(name), Tensor):
            memory = frame.f_locals[name]
    tensors = tuple(x for x in values if isinstance(x, Tensor))
    return ModuleCall(call.module, tensors or call.tensors, memory)


@dataclass(eq=False)
class AutoGrids:
    """Finds grids; keeps how the convolutions of a module cut pictures."""

    _cuts: WeakKeyDictionary[nn.Module, dict[int, set[tuple[int, int, bool]]]] = field(
        default_factory=WeakKeyDictionary
    )

    def find(self, query: Tensor, causal: bool, calls: Sequence[ModuleCall]) -> tuple[Grid, int] | str:
        """The grid of the queries of self-attention and the tokens before it, or why there is none.

        Args:
            query: [B, H, N, E] or [B, N, E].
            causal: whether the call is.
            calls: the modules around it, the innermost first.
        """
        if causal or (calls and getattr(calls[0].module, "is_causal", False) is True):
            return CAUSAL
        if calls and isinstance(calls[0].module, torch.fx.GraphModule):
            return GRAPH
        total = int(query.shape[-2])
        patch = next((one for one in (_patch(call.module) for call in calls) if one is not None), None)
        any_picture = False
        for number, call in enumerate(calls):
            if any(_are_numbers(x, total) for x in call.tensors):
                return TEXT
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
                    return cut
        declared = None if any_picture else self._declared(calls, total)
        return no_picture(total) if declared is None else declared

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
        """The grid of the picture's patches that leaves few of the tokens, and how many; None where none does."""
        channels, *size = (int(n) for n in picture.shape[1:])
        candidates: list[tuple[Grid, Sequence[int]]] = [
            ((size[0], size[1]), PREFIXES),  # [B, C, *grid]
            ((channels, size[0]), PREFIXES),  # [B, *grid, C]
        ]
        cuts = self._convolutions(module).get(channels)
        few = range(MOST_PREFIX + 1)
        if patch is not None:
            candidates.append(((size[0] // patch[0], size[1] // patch[1]), few))
        elif cuts:
            for tall, wide, patches in sorted(cuts):
                if patches:
                    candidates.append(((size[0] // tall, size[1] // wide), few))
                    continue
                stride = max(tall, wide)
                while stride <= MOST_STRIDE:
                    candidates.append(((-(-size[0] // stride), -(-size[1] // stride)), PREFIXES))
                    stride *= 2
        elif channels <= FEW_CHANNELS:
            both = math.gcd(*size)
            sides = (side for side in range(2, both + 1) if both % side == 0)
            candidates += [((size[0] // side, size[1] // side), PREFIXES) for side in sides]
        fitting = [
            (total - math.prod(grid), grid)
            for grid, prefixes in candidates
            if min(grid) > 1 and total - math.prod(grid) in prefixes
        ]
        prefix, nearest = min(fitting, default=(0, None))
        return None if nearest is None else (nearest, prefix)

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


def compiled_grid(total: int) -> tuple[Grid, int, str]:
    """Grid, tokens before it and why not, while a graph is traced: by the call of the compiled model alone.

    Its inner modules are not seen, so that a model with cross-attention has no grid.
    """
    calls = module_calls()
    for call in calls:
        if any(_reads_memory(kind) for kind in {type(one) for one in call.module.modules()}):
            return (), 0, COMPILED
    result = AutoGrids().find(torch.empty(1, total, 1, dtype=torch.float32, device="cpu"), False, calls)
    if isinstance(result, str):
        return (), 0, COMPILED
    return *result, ""


def _reads_memory(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and any(name in code.co_varnames for name in MEMORY)


def no_picture(total: int) -> str:
    return f"{total} tokens, and no picture is known that they are patches of; {PASS_IT}"


def _are_numbers(x: Tensor, total: int) -> bool:
    return x.ndim == 2 and x.shape[-1] == total and x.dtype in (torch.int32, torch.int64)


def _pair(config: Any, name: str) -> tuple[int, int] | None:
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
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
