"""The lookup of RAFT without its volume, against the volume."""

import re

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.core.correlation import box_scores

interpreted = pytest.mark.interpreted


def volume_lookup(q, k, coords, radius, levels):
    """As the paper has it, for pictures of one head: all scores, averaged, then sampled around coords (y, x)."""
    volume = torch.einsum("bijxe,bmnxe->bijmn", q.movedim(1, 3), k.movedim(1, 3)) / q.shape[-1] ** 0.5
    volume = volume.flatten(0, 2).unsqueeze(1)  # [B * N, 1, h2, w2]
    place = coords.reshape(-1, 2).flip(-1)
    found = []
    for level in range(levels):
        extents = torch.tensor([volume.shape[3] - 1, volume.shape[2] - 1], dtype=coords.dtype)
        for dx in range(-radius, radius + 1):
            for dy in range(-radius, radius + 1):
                at = place / 2**level + torch.tensor([dx, dy], dtype=coords.dtype)
                at = (2 * at / extents - 1).reshape(-1, 1, 1, 2)
                found.append(F.grid_sample(volume, at, align_corners=True).reshape(coords.shape[:-1]))
        volume = F.avg_pool2d(volume, 2, stride=2)
    return torch.stack(found, -1)


def leaves(dtype=torch.float64, grid=(3, 4), key_grid=(9, 8), width=5):
    """q, k, and places of which some lie beside the grid of keys."""
    q = torch.randn(2, 1, *grid, width, dtype=dtype)
    k = torch.randn(2, 1, *key_grid, width, dtype=dtype)
    coords = torch.rand(2, 1, *grid, len(grid), dtype=dtype) * 14 - 3
    return [x.requires_grad_() for x in (q, k, coords)]


@interpreted
@pytest.mark.parametrize(("radius", "levels"), [(2, 3), (0, 1)])
def test_equals_the_lookup_in_a_volume(impl, widest, radius, levels):
    near = {"atol": 1e-10, "rtol": 1e-8} if widest == torch.float64 else {"atol": 3e-5, "rtol": 1e-4}
    given = leaves(widest)
    want = volume_lookup(*given, radius, levels)
    ours = scram.correlation(*given, radius, levels=levels, impl=impl)
    torch.testing.assert_close(ours, want, **near)
    above = torch.randn_like(want)
    grads = torch.autograd.grad((ours * above).sum(), given)
    for grad, wanted in zip(grads, torch.autograd.grad((want * above).sum(), given), strict=True):
        torch.testing.assert_close(grad, wanted, **near)


def test_gradients_are_derivatives():
    q, k, coords = leaves(grid=(2, 2), key_grid=(4, 4), width=2)
    assert torch.autograd.gradcheck(lambda *x: scram.correlation(*x, 1, levels=2), (q, k, coords))


def test_the_order_of_steps_and_levels():
    """The step along rows changes fastest; each level halves the places."""
    k = torch.zeros(1, 1, 8, 8, 1)
    k[0, 0, 3, 4] = 1
    coords = torch.tensor([4.0, 4.0]).expand(1, 1, 1, 1, 2)
    found = scram.correlation(torch.ones(1, 1, 1, 1, 1), k, coords, 1, levels=2)[0, 0, 0, 0]
    assert found[:9].nonzero().tolist() == [[3]]  # one row up, the same column
    torch.testing.assert_close(found[9:].reshape(3, 3), torch.tensor([[0, 0, 0], [0.25, 0, 0], [0, 0, 0]]))


def test_boxes_hold_the_products_of_their_keys():
    q, k, _ = (x.detach() for x in leaves(torch.float32))
    corner = torch.tensor([7, -1]).expand(2, 1, 3, 4, 2)
    found = box_scores(q, k, corner, (3, 2))
    want = torch.zeros_like(found)  # rows 7, 8 and one below the grid; one column beside it, column 0
    for n, row in ((1, 7), (3, 8)):
        want[..., n] = (q * k[:, :, row, 0][:, :, None, None]).sum(-1)
    torch.testing.assert_close(found, want)


def test_no_tensor_is_as_large_as_the_volume():
    q, k, coords = leaves(torch.float32, grid=(40, 40), key_grid=(40, 40))
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x))
            return out

    with Sizes():
        scram.correlation(q, k, coords, 2, levels=2).sum().backward()
    assert max(sizes) <= 2 * 1600 * 50


BAD = [
    ({"levels": 5}, ValueError, r"levels must be at most 4 for a key grid of (9, 8), got 5"),
    ({"levels": 0}, ValueError, "levels must be at least 1, got 0"),
    ({"radius": 1.5}, TypeError, "radius must be an int, got float 1.5"),
    ({"coords": torch.zeros(2, 1, 3, 4, 3)}, ValueError, "coords must be [B, H, *G, rank] = (2, 1, 3, 4, 2)"),
    ({"coords": torch.zeros(2, 1, 3, 4, 2).half()}, TypeError, "use coords.float(): 16 bits cannot hold places"),
    ({"coords": torch.zeros(2, 1, 3, 4, 2).long()}, TypeError, "must be float32 or float64, got torch.int64"),
    ({"coords": None}, TypeError, "coords must be a torch.Tensor"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=lambda x: str(x)[:30])
def test_bad_arguments(change, error, words):
    q, k, coords = leaves()
    with pytest.raises(error, match=re.escape(words)):
        scram.correlation(**{"q": q, "k": k, "coords": coords, "radius": 1, **change})
