"""Forward and backward as one CUDA graph: the host launches a step at once, not kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scram.core.resolve import default_tail
from scram.core.tails.base import as_tail
from scram.nn import GridAttention

from .tasks import Task

WARM = 3  # steps before the capture: they compile


def backward(task: Task, model: nn.Module, x: Tensor, target: Any) -> Tensor:
    """The loss, whose gradients are added to those of the parameters."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        loss = task.loss(model(x), target)
    loss.backward()
    return loss.detach()


def seeds_on_device(model: nn.Module) -> None:
    """Let each search, and each tail, of a model read its seed from the device, where each call draws new ones.

    A graph holds what the host knew at its capture. A seed drawn by the host would be the same at each replay.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GridAttention) and layer.search is not None]
    layers = [layer for layer in layers if layer.search.seed is None]
    if not layers:
        return
    device = next(model.parameters()).device
    seeds = torch.zeros(len(layers), 2, 2, dtype=torch.int64, device=device)  # each starts at 16 bytes
    for layer, (one, two) in zip(layers, seeds[..., 0].unbind(), strict=True):
        layer.search = replace(layer.search, seed=one)
        tail = as_tail(layer.tail, default_tail(device.type, "softmax", layer.causal, layer.score))
        layer.tail = tail.of_part(two)

    def draw(*_: Any) -> None:
        seeds.random_()

    model.register_forward_pre_hook(draw)


class Captured:
    """`call(x, target)` -> loss: replays `backward` on other inputs; gradients replace those of the call before."""

    def __init__(self, task: Task, model: nn.Module, x: Tensor, target: Any) -> None:
        self.inputs = [part.clone() for part in _parts(x, target)]
        self.given = self.inputs[0], (type(target)(*self.inputs[1:]) if isinstance(target, tuple) else self.inputs[1])
        random = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                backward(task, model, *self.given)
                model.zero_grad()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = backward(task, model, *self.given)
        torch.cuda.set_rng_state(random)  # as if there had been no steps

    def __call__(self, x: Tensor, target: Any) -> Tensor:
        for held, given in zip(self.inputs, _parts(x, target), strict=True):
            held.copy_(given)
        self.graph.replay()
        return self.loss


def called(task: Task, model: nn.Module) -> Callable[[Tensor, Any], Tensor]:
    """The same by plain calls."""

    def call(x: Tensor, target: Any) -> Tensor:
        model.zero_grad()
        return backward(task, model, x, target)

    return call


def _parts(x: Tensor, target: Any) -> list[Tensor]:
    return [x, *(target if isinstance(target, tuple) else (target,))]
