"""Attention on many machines, by torch.distributed: every rank holds a shard of the queries and of the keys.

`import scram` does not load this package; `import scram.distributed` does.
"""

from .api import attention
from .model import H200, Link, Machine, Prediction, predict
from .traffic import Traffic, traffic

__all__ = ["H200", "Link", "Machine", "Prediction", "Traffic", "attention", "predict", "traffic"]
