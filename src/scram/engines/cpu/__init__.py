"""The CPU engine, in Numba. `engine` implements the protocol."""

import torch

from .. import EngineSpec

SPEC = EngineSpec(
    name="numba",
    package="numba",
    devices=("cpu",),
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    most_tile_matches=0,
    wide_inputs=True,
)
