"""Pictures: match, denoise, inpaint, retarget and generate them. Torch in, torch out; `reading` needs the extra `cli`.

>>> import torch, scram.images
>>> a = torch.rand(40, 50, 3)
>>> found = scram.images.match(a, a.roll(2, 1), patch=5)
>>> found.offset[20, 20]
tensor([0., 2.])
>>> picture, hole = torch.rand(24, 30, 1), torch.zeros(24, 30, dtype=torch.bool)
>>> hole[8:12, 9:14] = True
>>> scram.images.inpaint(picture, hole).shape
torch.Size([24, 30, 1])
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .denoising import denoise
    from .generation import generate
    from .inpainting import inpaint
    from .matching import match
    from .retargeting import retarget

__all__ = ["denoise", "generate", "inpaint", "match", "retarget"]


class _Package(ModuleType):
    """Imports a function when it is first used, so that the command line starts without torch."""

    def __getattr__(self, name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import_module(f".{name}", __name__)
        return self.__dict__[name]

    def __setattr__(self, name: str, value: object) -> None:
        # Python stores an imported submodule in its package; the function of that name stays before it.
        super().__setattr__(name, getattr(value, name) if name in __all__ else value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
