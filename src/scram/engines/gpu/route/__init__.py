"""The stages `route` and `routed_start`: which clusters a tile attends key by key, and the best of their keys."""
