"""Trained generators, tested with other attentions in the place of their own: what a search leaves out of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from store import Store

import scram
from scram.nn import GridAttention

from .models import Block
from .tasks import Task

WAYS: dict[str, dict[str, Any]] = {
    "dense": {"search": None},
    "default": {"search": scram.Search()},
    "windows only": {"search": scram.Search(), "tail": None},
    "twice the sweeps and gossip": {"search": scram.Search(sweeps=16, gossip=16)},
    "radius 2": {"search": scram.Search(), "radius": 2},
    "2048 drawn keys": {"search": scram.Search(), "tail": scram.DrawnKeys(samples=2048)},
    "4 matches": {"search": scram.Search(matches=4, separation=2)},
    "4 matches, 2048 drawn keys": {
        "search": scram.Search(matches=4, separation=2),
        "tail": scram.DrawnKeys(samples=2048),
    },
}


@torch.inference_mode()
def swap(task: Task, seed: int, weights: Path, count: int, folder: Path, commit: str | None) -> None:
    """Bits of `count` test pictures for each way, in float32."""
    device = task.data.x.device
    store = Store("learn_swap", folder)
    x, target = task.drawn(torch.Generator(device).manual_seed(1), count, True)
    for trained in ("dense", "tail"):
        name = f"{task.name}; {trained}; all; {seed}".replace("; ", "_").replace(" ", "-").replace(",", "")
        model = task.model(trained).to(device).eval()
        model.load_state_dict(torch.load(weights / f"{name}.pt", map_location=device, weights_only=True))
        for way, settings in WAYS.items():
            for block in model.blocks:
                assert isinstance(block, Block)
                layer = GridAttention(task.width, task.heads, causal=True, **settings).to(device).eval()
                layer.load_state_dict(block.attention.state_dict())
                block.attention = layer
            torch.manual_seed(0)
            parts = [task.loss(model(a), b) for a, b in zip(x.split(4), target.split(4), strict=True)]
            bits = float(torch.stack(parts).mean()) / math.log(2)
            store.put(
                f"{trained}; {way}",
                commit,
                task=task.name,
                trained=trained,
                seed=seed,
                attention=way,
                pictures=count,
                bits=bits,
            )
            print(f"trained with {trained}, tested with {way}: {bits:.3f}", flush=True)
