"""Self-normalized importance sampling: keys drawn near the modes or anywhere, weighed by the whole mixture."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.calls import SampleCall
from ...spec.grid import AllowedKeys, coordinates, flat, grid_of
from ...spec.noise import below, noise, numbered
from ...spec.scoring import accumulator
from .visited import Visit, Visited


def draws_of(call: SampleCall) -> Visit:
    """The keys that points draw.

    The noise of sample t is noise(seed, row, query, t, draw): draw 0 chooses the part of the mixture, 1 the mode or the
    uniform key, 2 + axis the step from the mode.
    """
    key_grid = grid_of(call.k)
    queries = math.prod(grid_of(call.q))
    samples = call.samples
    flat_modes = call.modes.reshape(-1, call.modes.shape[-1]).long()
    flat_count = call.count.reshape(-1)
    table = call.table.long()
    wide = accumulator(call.v.dtype)
    allowed = AllowedKeys.of(call.q, call.k, call.causal, call.key_mask)
    t = torch.arange(samples, device=call.q.device)

    def visit(at: Tensor) -> Visited:
        row = (at // queries).unsqueeze(-1)  # [C, 1]
        query = (at % queries).unsqueeze(-1)  # [C, 1]
        number = flat_count[at].unsqueeze(-1)  # [C, 1], of the modes
        choices = allowed.total(row, query)
        noise_row = numbered(row, call.rows)

        def bits(draw: int) -> Tensor:
            return noise(call.seed, noise_row, query, t, draw)

        local = (bits(0) < int(call.alpha * 2**32)) & (number > 0)
        uniform = allowed.nth(row, torch.where(choices > 0, below(bits(1), choices), 0))
        mode = flat_modes[at].gather(-1, below(bits(1), number.clamp(min=1)))
        center = coordinates(torch.where(local, mode, 0), key_grid)
        place = [c + step(table, bits(2 + axis), c, key_grid[axis]) for axis, c in enumerate(center)]
        key = torch.where(local, flat(place, key_grid), uniform)  # [C, T]
        some = (local | (choices > 0)) & allowed.allows(row, query, key)
        alpha = call.alpha * (number > 0).to(wide)
        r = alpha * closeness(key, flat_modes[at], number, table, key_grid, wide) + (1 - alpha) / choices.clamp(min=1)
        return key, torch.where(some, -(r * samples).log(), -torch.inf), None

    return visit


def step(table: Tensor, bits: Tensor, center: Tensor, extent: int) -> Tensor:
    """A step from a coordinate that stays on its axis, drawn from the weights of all such steps."""
    reach = len(table) // 2 - 1
    low = (-center).clamp(min=-reach)
    high = (extent - 1 - center).clamp(max=reach)
    below_low = table[low + reach]
    below_high = table[high + 1 + reach]
    target = below_low + below(bits, below_high - below_low)
    return torch.searchsorted(table, target, right=True) - 1 - reach


def closeness(
    key: Tensor, modes: Tensor, number: Tensor, table: Tensor, key_grid: tuple[int, ...], wide: torch.dtype
) -> Tensor:
    """The mean over the first `number` modes [C, kappa] of the density of a step from there to each key [C, T]."""
    reach = len(table) // 2 - 1
    total = torch.zeros(key.shape, dtype=wide, device=key.device)
    place = coordinates(key, key_grid)
    for m in range(modes.shape[1]):
        exists = m < number  # [C, 1]
        g = exists.to(wide)
        centers = coordinates(torch.where(exists, modes[:, m : m + 1], 0), key_grid)  # [C, 1] each
        for c, center, extent in zip(place, centers, key_grid, strict=True):
            d = c - center  # [C, T]
            low = (-center).clamp(min=-reach)
            high = (extent - 1 - center).clamp(max=reach)
            mass = (table[high + 1 + reach] - table[low + reach]).to(wide)
            safe = d.clamp(-reach, reach) + reach
            g = g * torch.where(d.abs() <= reach, (table[safe + 1] - table[safe]).to(wide) / mass, 0)
        total = total + g
    return total / number.clamp(min=1)
