"""The stage `attend`: the windows of each query."""
