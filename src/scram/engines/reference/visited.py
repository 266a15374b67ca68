"""What the two samplers return for a chunk of points."""

from collections.abc import Callable

from torch import Tensor

# The keys visited [C, T], the logs of their weights [C, T] (-inf: none), and acceptance and rhat [C] of walks.
Visited = tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]
Visit = Callable[[Tensor], Visited]  # points [C] -> what they visit
