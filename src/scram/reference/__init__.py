"""The specification in torch: any device, any float dtype, ranks 1 to 4. Short and obvious, not fast."""

from .attend import attend
from .hybrid import tail
from .metropolis import metropolis
from .search import search
from .snis import snis

__all__ = ["attend", "metropolis", "search", "snis", "tail"]
