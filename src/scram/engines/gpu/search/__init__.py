"""The stage `search`: each query on its own, or tiles of queries together."""
