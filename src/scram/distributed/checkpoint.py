"""Kept matches in a checkpoint of torch.distributed: ranks save those of their batches, any number of ranks load."""

from __future__ import annotations

import json
import os
import warnings
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..core import files
from ..core.tails.clusters import NEEDED, OPTIONAL, TENSORS, from_settings, settings_of
from ..nn.searching import Searching
from ..results import Matches
from .mesh import Ranks

MARK = "scram.kept"  # begins every name in a checkpoint: MARK/rank/layer/field
MATCHES = ("index", "score")
BOOK = tuple(f"book_{name}" for name in NEEDED)
FIELDS = (*MATCHES, *BOOK, *(f"book_{name}" for name in OPTIONAL))


State = dict[str, Any]  # as torch.distributed.checkpoint has it: tensors and text by name
Saved = str | os.PathLike[str] | StorageReader


class Piece(NamedTuple):
    """What one rank saved of one layer: tensors with these shapes and dtypes."""

    rank: int
    layer: str
    fields: dict[str, tuple[torch.Size, torch.dtype]]

    def check(self) -> None:
        """It has all tensors of matches, all or none of a codebook, each with the same batch."""
        names = set(self.fields)
        needed = MATCHES if names <= set(MATCHES) else MATCHES + BOOK
        wrong = (set(needed) - names) | (names - set(FIELDS))
        if wrong:
            raise ValueError(f"tensors missing or unknown: {', '.join(sorted(wrong))}")
        shapes = {name: tuple(shape) for name, (shape, _) in self.fields.items()}
        if len({shape[:1] for shape in shapes.values()}) > 1 or () in shapes.values():
            raise ValueError(f"tensors must share their batch, got {shapes}")

    @property
    def batch(self) -> int:
        return self.fields["index"][0][0]


class KeptMatches:
    """The matches and clusters that the layers of a model keep (`keep_matches=True`), as a part of a checkpoint.

    They are no part of `model.state_dict()`, which stays that of `nn.MultiheadAttention`. This object has the two
    methods that `torch.distributed.checkpoint` looks for. Each rank saves what it keeps, of its share of the batch;
    shares may differ. Any number of ranks load: the batch is cut as `Shard(0)` cuts it. A rank without a share keeps
    nothing.

        dcp.save({"model": get_model_state_dict(model), "kept": KeptMatches(model, mesh=mesh)}, checkpoint_id=folder)
        dcp.load({"model": ..., "kept": KeptMatches(model, mesh=mesh, saved=folder)}, checkpoint_id=folder)

    Args:
        model: what holds the layers; under DistributedDataParallel or `fully_shard`, or neither.
        mesh: a DeviceMesh of one dimension, along which the batch is cut; None: all ranks keep the same.
        saved: the checkpoint that will be loaded, a folder or a `StorageReader`: shapes are read from it.
    """

    def __init__(self, model: nn.Module, *, mesh: DeviceMesh | None = None, saved: Saved | None = None) -> None:
        ranks = None if mesh is None else Ranks(mesh)
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.layers = {name: one for name, one in inner.named_modules() if isinstance(one, Searching)}
        self.pieces = None if saved is None else _pieces(saved)
        unknown = {piece.layer for piece in self.pieces or ()} - set(self.layers)
        if unknown:
            raise ValueError(
                f"{saved} has kept matches of {sorted(unknown)}, which are no searching layers of the model"
            )

    def state_dict(self) -> State:
        """What this rank keeps; before loading from `saved`, empty tensors for the pieces that this rank needs."""
        state: State = {f"{MARK}/version": 1}
        if self.pieces is None:
            for name, layer in self.layers.items():
                state |= {_key(self.rank, name, field): x for field, x in _kept(layer).items()}
            return state
        for piece in [piece for name in self.layers for piece, _, _ in self._cut(name)]:
            device = next(self.layers[piece.layer].parameters()).device
            for field, (shape, dtype) in piece.fields.items():
                state[_key(piece.rank, piece.layer, field)] = torch.empty(shape, dtype=dtype, device=device)
            state[_key(piece.rank, piece.layer, "settings")] = ""
        return state

    def load_state_dict(self, state_dict: State) -> None:
        """Layers keep what was loaded, and forget what they had."""
        if self.pieces is None:
            raise ValueError(
                "to load kept matches, pass saved=, the checkpoint's folder: their shapes are read from it"
            )
        for name, layer in self.layers.items():
            layer.reset()
            states = []
            for piece, begin, end in self._cut(name):
                read = {field: state_dict[_key(piece.rank, name, field)] for field in (*piece.fields, "settings")}
                states.append({field: x if field == "settings" else x[begin:end] for field, x in read.items()})
            if states and layer.keep_matches:
                _keep(name, layer, states)
        self.pieces = None

    def _cut(self, name: str) -> list[tuple[Piece, int, int]]:
        """The pieces of a layer that hold rows of this rank's batch, and which of their rows those are."""
        pieces = [piece for piece in self.pieces or () if piece.layer == name]
        ends = list(accumulate(piece.batch for piece in pieces))
        share = -(-ends[-1] // self.size) if ends else 0
        low = self.rank * share
        high = (self.rank + 1) * share
        cuts = [
            (piece, max(low - end + piece.batch, 0), min(high - end + piece.batch, piece.batch))
            for piece, end in zip(pieces, ends, strict=True)
        ]
        return [(piece, begin, end) for piece, begin, end in cuts if begin < end]


def _key(rank: int, layer: str, field: str) -> str:
    return f"{MARK}/{rank}/{layer}/{field}"


def _pieces(saved: Saved) -> list[Piece]:
    """What a checkpoint holds, in the order of ranks."""
    reader = saved if isinstance(saved, StorageReader) else FileSystemReader(saved)
    entries = reader.read_metadata().state_dict_metadata
    layers: dict[tuple[int, str], dict[str, tuple[torch.Size, torch.dtype]]] = {}
    marked = [(name.partition(f"{MARK}/")[2], entry) for name, entry in entries.items() if f"{MARK}/" in name]
    if not marked:
        raise ValueError(f"{saved} holds no kept matches; save it with KeptMatches(model), or load without them")
    for name, entry in marked:
        if isinstance(entry, TensorStorageMetadata):
            rank, _, rest = name.partition("/")
            layer, _, field = rest.rpartition("/")
            if not rank.isdecimal() or not layer:
                raise ValueError(f"{saved} has kept matches under the name {name!r}, want rank/layer/field")
            layers.setdefault((int(rank), layer), {})[field] = (entry.size, entry.properties.dtype)
    pieces = [Piece(*key, fields) for key, fields in sorted(layers.items())]
    for piece in pieces:
        with files.malformed(f"{saved} has no kept matches of layer {piece.layer!r} that KeptMatches saved"):
            piece.check()
    return pieces


def _kept(layer: Searching) -> State:
    """Tensors that a layer keeps, and settings as JSON; nothing where it keeps nothing."""
    matches = layer.matches
    book = layer.codebook
    if matches is None:
        return {}
    state: State = {"index": matches.index, "score": matches.score}
    settings: dict[str, object] = {"key_grid": matches.key_grid}
    if book is not None:
        state |= {f"book_{name}": x for name in TENSORS if (x := getattr(book, name)) is not None}
        settings |= {"book": settings_of(book)}
    return {**state, "settings": json.dumps(settings)}


def _keep(name: str, layer: Searching, states: list[State]) -> None:
    """Join what ranks had; where their calls differed in shape or settings the layer starts afresh."""
    described = {(x["settings"], tuple((field, t.shape[1:]) for field, t in _tensors(x).items())) for x in states}
    if len(described) > 1:
        warnings.warn(f"ranks kept matches of unlike calls in layer {name!r}: it starts without", stacklevel=4)
        return
    tensors = {field: torch.cat([x[field] for x in states]) for field in _tensors(states[0])}
    with files.malformed(f"the checkpoint has no kept matches of layer {name!r} that KeptMatches saved"):
        settings = json.loads(states[0]["settings"])
        matches = Matches(tensors.pop("index"), tensors.pop("score"), tuple(settings["key_grid"]))
        book = None
        if "book" in settings or tensors:
            book = from_settings({field.removeprefix("book_"): x for field, x in tensors.items()}, settings["book"])
    layer.kept_index = matches.index
    layer.kept_score = matches.score
    layer.kept_grid = matches.key_grid
    layer.codebook = book


def _tensors(state: State) -> dict[str, Tensor]:
    return {field: x for field, x in state.items() if field != "settings"}
