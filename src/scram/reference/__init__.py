"""The specification in torch: any device, any float dtype, ranks 1 to 4. Short and obvious, not fast."""

from .attend import attend
from .search import search
from .tile import tile_search

__all__ = ["attend", "search", "tile_search"]
