"""What pictures are refused, by every function that takes one, and in which words."""

import numpy as np
import pytest
import torch

from scram import images
from scram.images.checks import MOST_PIXELS, check_extents


def hole():
    made = torch.zeros(24, 32, dtype=torch.bool)
    made[8:12, 8:12] = True
    return made


TAKERS = {
    "inpaint": lambda picture: images.inpaint(picture, hole()),
    "retarget": lambda picture: images.retarget(picture, (24, 28)),
    "generate": lambda picture: images.generate(picture),
    "denoise": lambda picture: images.denoise(picture, 0.1),
    "match": lambda picture: images.match(picture, torch.rand(24, 32, 3)).rebuilt,
}


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(24, 32, 3, dtype=torch.uint8),
        torch.zeros(24, 32),
        torch.zeros(0, 32, 3),
        torch.zeros(24, 32, 0),
        np.zeros((24, 32, 3)),
        None,
    ],
    ids=["uint8", "two axes", "no rows", "no channels", "numpy", "None"],
)
def test_what_is_no_picture_is_refused(name, bad):
    with pytest.raises(ValueError, match=r"must be a tensor of floats \[H, W, "):
        TAKERS[name](bad)


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(name, value):
    picture = torch.rand(24, 32, 3)
    picture[0, 0, 1] = value
    with pytest.raises(ValueError, match="must be finite, 1 of its 2304 values are not"):
        TAKERS[name](picture)


@pytest.mark.parametrize("name", ["inpaint", "retarget", "generate"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype):
    picture = torch.rand(24, 32, 3).to(dtype)
    out = TAKERS[name](picture)
    assert out.dtype == dtype
    assert torch.equal(out, TAKERS[name](picture.float()).to(dtype))


@pytest.mark.parametrize("size", [40, (40,), (40.5, 40), (0, 40), "ab", (True, 40)], ids=str)
def test_a_size_is_two_whole_numbers(size):
    for function in (images.retarget, images.generate):
        with pytest.raises(ValueError, match=r"size must be \(height, width\)"):
            function(torch.rand(24, 32, 3), size)


def test_a_size_fits_into_memory():
    assert check_extents((2**12, 2**13)) == (2**12, 2**13)
    for function in (images.retarget, images.generate):
        with pytest.raises(ValueError, match=f"size must be {MOST_PIXELS} pixels at most, got 99999 x 99999"):
            function(torch.rand(24, 32, 3), (99999, 99999))
