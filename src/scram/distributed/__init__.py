"""Attention on many machines, by torch.distributed: every rank holds a shard of the queries and of the keys.

`import scram` does not load this package; `import scram.distributed` does.
"""

from typing import TYPE_CHECKING, Any

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError(
        "scram.distributed needs torch.distributed, which this build of torch lacks: torch.distributed.is_available() "
        "is False; use scram.attention on one machine, or install a torch that was built with USE_DISTRIBUTED=1"
    )

from .api import attention
from .rules import register
from .traffic import Traffic, traffic

if TYPE_CHECKING:
    from .checkpoint import KeptMatches

__all__ = ["KeptMatches", "Traffic", "attention", "traffic"]

register()


def __getattr__(name: str) -> Any:
    if name == "KeptMatches":  # importing torch.distributed.checkpoint takes longer than all the rest
        from .checkpoint import KeptMatches

        return KeptMatches
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
