"""The specification in torch: any device, any float dtype, ranks 1 to 4. Short and obvious, not fast."""

from .attend import attend
from .draw import snis
from .drawn_tail import tail
from .search import search
from .tile_attend import tile_attend
from .tile_search import tile_search
from .walk import metropolis

__all__ = ["attend", "metropolis", "search", "snis", "tail", "tile_attend", "tile_search"]
