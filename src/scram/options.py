"""Names of string options, each in one place: the types that signatures show, and the values that are checked.

>>> from typing import get_args
>>> get_args(Weight)
('softmax', 'mean', 'relu')
"""

from __future__ import annotations

from typing import Literal, get_args

Auto = Literal["auto"]
"""Of `search`, `tail` and `grid`: choose what fits the tensors."""

ScoreName = Literal["dot", "cosine", "l2"]
"""Scores that have a name; `score` takes a callable too."""

Weight = Literal["softmax", "mean", "relu"]
"""How scores become weights."""

Method = Literal["auto", "query", "tile"]
"""How a `Search` makes its candidates."""

Propagate = Literal["shift", "stay", "both", "turns"]
"""What a neighbor offers in a `Search`."""

How = Literal["searched", "clustered", "dense"]
"""SCRAM answers a call of a model."""

Start = Literal["auto", "drawn", "routed"]
"""Where the queries of a `Search` start."""

"""Whose windows a query attends: its own, or those of its tile."""

Impl = Literal["auto", "triton", "numba", "reference"]
"""Which implementation runs, in order of preference."""

Form = Literal["embedded_gaussian", "gaussian", "dot_product", "concatenation"]
"""Of a `NonLocalBlock`."""

Sampler = Literal["snis", "metropolis"]
"""How an estimator reaches keys of each query's own."""

JudgedLayout = Literal["grid", "sdpa"]
"""What a function takes that `judge` measures: [B, H, *G, E], or [B, H, N, E] as torch's own."""

Panes = Literal["auto", "one", "two"]
"""Of the page of `explore`: queries and keys in one picture, or each in its own."""

Mode = Literal["auto", "heads", "gather", "ring"]
"""How `scram.distributed.attention` shares keys."""

# The same as tuples, which arguments are checked against.
SCORES = get_args(ScoreName)
WEIGHTS = get_args(Weight)
METHODS = get_args(Method)
PROPAGATES = get_args(Propagate)
STARTS = get_args(Start)
IMPLS = get_args(Impl)
