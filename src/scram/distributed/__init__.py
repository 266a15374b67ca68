"""Attention on many machines, by torch.distributed: every rank holds a shard of the queries and of the keys.

`import scram` does not load this package; `import scram.distributed` does.
"""

from .api import attention
from .rules import register

__all__ = ["attention"]

register()
