"""The specification in torch: any device, any float dtype, ranks 1 to 4. Short and obvious, not fast."""

from .attend import attend
from .hybrid import tail
from .metropolis import metropolis
from .search import search
from .snis import snis
from .tile import tile_search
from .tile_attend import tile_attend

__all__ = ["attend", "metropolis", "search", "snis", "tail", "tile_attend", "tile_search"]
