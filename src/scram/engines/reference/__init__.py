"""The specification in torch: any device, any float dtype, ranks 1 to 4. Short and obvious, not fast."""

import torch

from .. import EngineSpec

SPEC = EngineSpec(
    name="reference",
    package=None,
    devices=None,
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    callable_scores=True,
    plain_torch=True,
)
