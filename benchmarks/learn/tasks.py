"""What is learned: each task makes batches, a loss and a score."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .boxes import average_precision, box_loss, canvases, found_boxes
from .data import Set, unit
from .models import Patches, Transformer, Values


@dataclass(frozen=True)
class Task:
    """Settings of a task, and how long it is trained."""

    name: str
    data: Set
    width: int = 64
    heads: int = 2
    depth: int = 3
    batch: int = 128
    steps: int = 1500
    rate: float = 1e-3
    size: int = 32  # pixels on a side
    score: str = "accuracy"  # what is told of the test pictures; higher is better but for "bits"
    tested: int = 10_000
    test_batch: int | None = None  # None: `batch`

    def model(self, attention: str) -> Transformer:
        raise NotImplementedError

    def drawn(self, generator: torch.Generator, count: int, test: bool) -> tuple[Tensor, Any]:
        """A batch: inputs and targets."""
        raise NotImplementedError

    def loss(self, out: Tensor, target: Any) -> Tensor:
        raise NotImplementedError

    def _transformer(self, attention: str, embed: nn.Module, grid: tuple[int, ...], outputs: int, **more: Any):
        shape = {"width": self.width, "heads": self.heads, "depth": self.depth}
        return Transformer(embed, grid, outputs, name=attention, **shape, **more)

    def _chosen(self, generator: torch.Generator, count: int, test: bool) -> tuple[Tensor, Tensor]:
        x, y = (self.data.test_x, self.data.test_y) if test else (self.data.x, self.data.y)
        numbers = torch.randint(len(x), (count,), generator=generator, device=x.device)
        return x[numbers], y[numbers]

    @torch.inference_mode()
    def tested_by(self, model: nn.Module, test: bool = True) -> dict[str, float]:
        """Scores on test pictures, or on training ones, that are the same for every model."""
        device, parts, batch = self.data.x.device, [], self.test_batch or self.batch
        generator = torch.Generator(device).manual_seed(1)
        count = max(1, self.tested // batch)
        for _ in range(count):
            x, target = self.drawn(generator, batch, test)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                out = model(x)
            parts.append(self.judged(out.float(), target))
        return self.summed(parts)

    def judged(self, out: Tensor, target: Any) -> Any:
        right = (out.argmax(-1) == target).float().mean()
        return {"accuracy": 100 * right, "loss": self.loss(out, target)}

    def summed(self, parts: list[Any]) -> dict[str, float]:
        return {name: float(torch.stack([part[name] for part in parts]).mean()) for name in parts[0]}


class Classify(Task):
    """CIFAR-10, a token a pixel."""

    def model(self, attention: str) -> Transformer:
        colors, grid = self.data.x.shape[-1], (self.size, self.size)
        cells = (self.size // self.data.x.shape[1],) * 2
        return self._transformer(attention, Patches(colors, self.width, (1, 1)), grid, 10, pool=cells)

    def drawn(self, generator: torch.Generator, count: int, test: bool) -> tuple[Tensor, Tensor]:
        """Canvases of some pictures on a side: [n, size, size, colors] and [n, cells, cells]."""
        side = self.data.x.shape[1]
        cells = self.size // side
        x, y = self._chosen(generator, count * cells * cells, test)
        x = unit(x)
        if not test:
            x = _moved(x, generator)
        x = x.view(count, cells, cells, side, side, -1).transpose(2, 3).reshape(count, self.size, self.size, -1)
        return x, y.view(count, cells, cells)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, -2), target.flatten())


class Plain(Classify):
    """The same without moving and flipping pictures: what is asked is how much is learnt by heart."""

    def drawn(self, generator: torch.Generator, count: int, test: bool) -> tuple[Tensor, Tensor]:
        x, y = self._chosen(generator, count, test)
        return unit(x), y.view(count, 1, 1)

    def tested_by(self, model: nn.Module, test: bool = True) -> dict[str, float]:
        """Also the scores on training pictures, by the model as it is tested: without dropout."""
        learnt = super().tested_by(model, False)
        return super().tested_by(model) | {f"training {name}": x for name, x in learnt.items()}


def _moved(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture flipped or not, and moved by up to four pixels."""
    flips = torch.rand(len(x), 1, 1, 1, generator=generator, device=x.device) < 0.5
    x = torch.where(flips, x.flip(2), x)
    offsets = torch.randint(9, (2, len(x), 1), generator=generator, device=x.device)
    height, width = x.shape[1:3]
    padded = F.pad(x, (0, 0, 4, 4, 4, 4))
    rows = offsets[0] + torch.arange(height, device=x.device)
    columns = offsets[1] + torch.arange(width, device=x.device)
    each = torch.arange(len(x), device=x.device)
    return padded[each[:, None, None], rows[:, :, None], columns[:, None, :]]


class Detect(Task):
    """Several digits of any size among pieces of digits; a token for each 2 x 2 pixels says class and box."""

    def model(self, attention: str) -> Transformer:
        side = self.size // 2
        made = self._transformer(attention, Patches(1, self.width, (2, 2), stem=2), (side, side), 14)
        made.head.bias.data[:10] = -4.6  # few tokens are digits
        return made

    def drawn(self, generator: torch.Generator, count: int, test: bool) -> tuple[Tensor, Any]:
        most = max(2, round(6 * (self.size / 128) ** 2))
        digits = self._chosen(generator, count * most, test)
        pieces, _ = self._chosen(generator, count * 2 * most, test)
        return canvases(digits, pieces, count, self.size, generator)

    def loss(self, out: Tensor, target: Any) -> Tensor:
        return box_loss(out.float(), target, self.size)

    def judged(self, out: Tensor, target: Any) -> Any:
        found = found_boxes(out, self.size)
        return type(found)(*(x.cpu() for x in found)), type(target)(*(x.cpu() for x in target)), self.loss(out, target)

    def summed(self, parts: list[Any]) -> dict[str, float]:
        losses = torch.stack([part[2] for part in parts]).mean()
        return {"mAP": 100 * average_precision([part[:2] for part in parts]), "loss": float(losses)}


class Video(Task):
    """Sixteen frames: one digit moves through the first half, another through the second. Which, and where to?"""

    @property
    def frames(self) -> int:
        return 16 if self.size > 16 else 4

    def model(self, attention: str) -> Transformer:
        grid = (self.frames, self.size // 2, self.size // 2)
        return self._transformer(attention, Patches(1, self.width, (1, 2, 2), stem=2), grid, 36, pool=(1, 1, 1))

    def drawn(self, generator: torch.Generator, count: int, test: bool) -> tuple[Tensor, Tensor]:
        """Frames [n, 16, size, size, 1], and first digit, second digit, first direction, second direction [n, 4]."""
        digits, classes = self._chosen(generator, 2 * count, test)
        device, half = digits.device, self.frames // 2
        random = {"generator": generator, "device": device}
        direction = torch.randint(8, (2 * count,), **random)
        angle = direction * (math.pi / 4)
        speed = (1.5 + 1.5 * torch.rand(2 * count, **random)) * (2 / self.size)
        velocity = torch.stack([angle.cos(), angle.sin()], -1) * speed.unsqueeze(-1)
        middle = (torch.rand(2 * count, 2, **random) - 0.5) * 0.8
        time = torch.arange(half, device=device) - (half - 1) / 2
        place = middle[:, None] + velocity[:, None] * time[:, None]  # [2 n, half, 2], from -1 to 1
        scale = (26 + 8 * torch.rand(2 * count, 1, **random)) / self.size  # of 28 pixels
        theta = torch.zeros(2 * count, half, 2, 3, device=device)
        theta[..., 0, 0] = theta[..., 1, 1] = 1 / scale
        theta[..., 2] = -place / scale.unsqueeze(-1)
        pictures = digits.movedim(-1, 1).float().repeat_interleave(half, 0)
        grids = F.affine_grid(theta.flatten(0, 1), [len(pictures), 1, self.size, self.size], align_corners=False)
        frames = F.grid_sample(pictures, grids, align_corners=False)
        frames = frames.view(count, 2 * half, self.size, self.size, 1)
        noise = 30 * torch.randn(frames.shape, **random)
        target = torch.cat([classes.view(count, 2), direction.view(count, 2)], 1)
        return unit(frames + noise), target

    def _parts(self, out: Tensor) -> list[Tensor]:
        return list(out.flatten(1).split([10, 10, 8, 8], -1))

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        parts = zip(self._parts(out), target.unbind(1), strict=True)
        return torch.stack([F.cross_entropy(x, y) for x, y in parts]).mean()

    def judged(self, out: Tensor, target: Tensor) -> Any:
        right = [x.argmax(-1) == y for x, y in zip(self._parts(out), target.unbind(1), strict=True)]
        each = torch.stack(right).float()
        return {
            "accuracy": 100 * each.mean(),
            "digits": 100 * each[:2].mean(),
            "directions": 100 * each[2:].mean(),
            "loss": self.loss(out, target),
        }


class Generate(Task):
    """Pixels one after the other, each from those before it: bits for each."""

    @property
    def levels(self) -> int:
        return 256 if self.data.x.shape[-1] == 1 else 32  # CIFAR-10 is kept with five bits

    @property
    def grid(self) -> tuple[int, ...]:
        *sides, colors = self.data.x.shape[1:]
        return tuple(sides) if colors == 1 else (*sides, colors)

    def model(self, attention: str) -> Transformer:
        return self._transformer(attention, Values(self.levels, self.width), self.grid, self.levels, causal=True)

    def drawn(self, generator: torch.Generator, count: int, test: bool) -> tuple[Tensor, Tensor]:
        x, _ = self._chosen(generator, count, test)
        x = (x.long() // (256 // self.levels)).view(count, *self.grid)
        return x, x

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, -2), target.flatten())

    def judged(self, out: Tensor, target: Tensor) -> Any:
        loss = self.loss(out, target)
        return {"bits": loss / math.log(2), "loss": loss}

    @torch.inference_mode()
    def tested_by(self, model: nn.Module, test: bool = True) -> dict[str, float]:
        """Also the bits of some pixels with all later ones drawn at random: more, if a model looks ahead."""
        found = super().tested_by(model, test)
        device = self.data.x.device
        generator = torch.Generator(device).manual_seed(2)
        x, _ = self.drawn(generator, self.batch, True)
        flat, last, losses = x.flatten(1), math.prod(self.grid), []
        for cut in torch.linspace(last // 8, last - 1, 12).long().tolist():
            hidden = flat.clone()
            hidden[:, cut:] = torch.randint(self.levels, hidden[:, cut:].shape, generator=generator, device=device)
            pixels = slice(max(0, cut - 16), cut)
            for given in (flat, hidden):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    out = model(given.view(x.shape)).flatten(1, -2)[:, pixels]
                losses.append(self.loss(out.float(), flat[:, pixels]) / math.log(2))
        shown, unseen = torch.stack(losses).view(-1, 2).mean(0).tolist()
        return found | {"bits, later pixels shown": shown, "bits, later pixels hidden": unseen}

    @torch.no_grad()
    def decoded_by(self, model: Transformer, count: int) -> dict[str, float]:
        """Bits of some test pictures by the whole call, and position by position from caches, both in float32."""
        x, target = self.drawn(torch.Generator(self.data.x.device).manual_seed(3), count, True)
        whole = self.loss(model(x), target) / math.log(2)
        tokens = model.tokens(x).flatten(1, -2)  # [n, N, width], each of the level before
        caches = [block.attention.cache(self.grid) for block in model.blocks]
        parts = []
        for one in tokens.split(1, 1):
            for block, cache in zip(model.blocks, caches, strict=True):
                one = one + block.attention.decode(block.first(one), cache)
                one = one + block.layers(block.second(one))
            parts.append(model.head(model.norm(one)))
        decoded = self.loss(torch.cat(parts, 1), target.flatten(1)) / math.log(2)
        return {"pictures": count, "bits, whole": float(whole), "bits, decoded": float(decoded)}

    @torch.inference_mode()
    def samples(self, model: nn.Module, count: int, generator: torch.Generator) -> Tensor:
        """New pictures [n, *G] in levels, pixel by pixel."""
        device = self.data.x.device
        x = torch.zeros(count, math.prod(self.grid), dtype=torch.long, device=device)
        for n in range(x.shape[1]):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                out = model(x.view(count, *self.grid)).flatten(1, -2)[:, n]
            x[:, n] = torch.multinomial(out.float().softmax(-1), 1, generator=generator).squeeze(-1)
        return x.view(count, *self.grid)


def tasks(sets: dict[str, Set]) -> dict[str, Task]:
    """All tasks, by name."""
    cifar, mnist = sets["cifar"], sets["mnist"]
    short: dict[str, int] = {"depth": 2, "batch": 64, "steps": 600, "test_batch": 500}
    side = mnist.x.shape[1] // 2
    small: dict[str, Any] = {
        "width": 32,
        "depth": 2,
        "batch": 16,
        "steps": 400,
        "rate": 5e-3,
        "tested": 1200,
        "test_batch": 100,
    }
    every = [
        Classify("classify", cifar, steps=2500),
        Classify("classify, 128x128", cifar, size=128, batch=8, steps=2500, tested=640),
        Detect("detect, 128x128", mnist, size=128, batch=16, score="mAP", tested=1000),
        Detect("detect, 256x256", mnist, size=256, batch=8, score="mAP", tested=320),
        Video("video", mnist, size=64, batch=16, tested=2000),
        Generate("generate, MNIST", mnist, batch=64, score="bits", tested=5000),
        Generate("generate, CIFAR-10", cifar, batch=32, score="bits", tested=1000),
        Plain("plain", cifar, **short),
        Plain("plain, shuffled", cifar.shuffled(), **short),
        Plain("digits", mnist.halved(), size=side, **small),
        Plain("digits, shuffled", mnist.halved().shuffled(), size=side, **small),
    ]
    return {task.name: task for task in every}


def tiny(task: Task) -> Task:
    """The same in the smallest form, for a test."""
    size = task.data.x.shape[1] if isinstance(task, Classify) else 16 if isinstance(task, Video) else 32
    return replace(task, width=24, heads=2, depth=1, batch=4, steps=8, size=size, tested=8, test_batch=None, rate=3e-3)
