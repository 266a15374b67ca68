"""The stage `attend`: the windows of each query, or the cells that the windows of a tile touch."""
