"""What has two names in torch.distributed: both are public, the first new in torch 2.13, where the second warns.

Run on torch 2.13; the old names are those of torch 2.11 and 2.12. Loaded by `scram.distributed` alone.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def _either(new: str, old: str) -> Any:
    """The function by its new name where torch has it."""
    return getattr(dist, new, None) or getattr(dist, old)


all_gather_single = _either("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _either("reduce_scatter_single", "reduce_scatter_tensor")
