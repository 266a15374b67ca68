"""Pictures: match, denoise, inpaint, retarget and generate them. Torch in, torch out; `reading` needs the extra `cli`.

>>> import torch, scram.images
>>> a = torch.rand(40, 50, 3)
>>> found = scram.images.match(a, a.roll(2, 1), patch=5)
>>> found.flow[20, 20].round()
tensor([2., 0.])
>>> picture, hole = torch.rand(24, 30, 1), torch.zeros(24, 30, dtype=torch.bool)
>>> hole[8:12, 9:14] = True
>>> scram.images.inpaint(picture, hole).shape
torch.Size([24, 30, 1])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .colmap import save_colmap as save_colmap
    from .denoising import denoise as denoise
    from .generation import generate as generate
    from .inpainting import inpaint as inpaint
    from .matching import Matching as Matching
    from .matching import match as match
    from .retargeting import retarget as retarget

# Imported when they are first used, so that the command line starts without torch.
_HOMES = {
    "Matching": "matching",
    "denoise": "denoising",
    "generate": "generation",
    "inpaint": "inpainting",
    "match": "matching",
    "retarget": "retargeting",
    "save_colmap": "colmap",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    own = [name for name in globals() if name.startswith("__") and name.endswith("__")]
    return sorted({*own, *_HOMES})
