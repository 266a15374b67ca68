"""The engine for CUDA, in Triton: ranks 1 to 4. `engine` implements the protocol."""

import torch

from ...settings import MOST_IN_TILES
from .. import EngineSpec

SPEC = EngineSpec(
    name="triton",
    package="triton",
    devices=("cuda",),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    most_tile_matches=MOST_IN_TILES,
    interpreter="TRITON_INTERPRET",
)
