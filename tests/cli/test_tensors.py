"""Tensors of a user's file: how they lie is said by options or by the file; what is no tensor is refused in words."""

import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scram.cli.tensors import Layout, read

NAMES = ("q", "k", "v")


def grids(width=3):
    """q, k, v [2, 4, 5, 6, width], every number another."""
    return np.arange(3 * 240 * width, dtype=np.float32).reshape(3, 2, 4, 5, 6, width)


def stored(path, arrays, **more):
    if path.suffix == ".npz":
        np.savez(path, **dict(zip(NAMES, arrays, strict=True)), **more)
    else:
        tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in zip(NAMES, arrays, strict=True)}
        save_file(tensors, path, {name: str(value) for name, value in more.items()})
    return path


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x, Layout()),
        (lambda x: np.moveaxis(x, 1, 3), Layout(axes="byxhe")),
        (lambda x: np.moveaxis(x, (0, 1), (3, 2)), Layout(axes="yxhbe")),
        (lambda x: x.reshape(2, 4, 30, 3), Layout(grid=(5, 6))),
        (lambda x: np.swapaxes(x.reshape(2, 4, 30, 3), 1, 2), Layout(axes="bnhe", grid=(5, 6))),
    ],
)
def test_axes_are_put_in_order(kind, change, said, tmp_path):
    x = grids()
    path = stored(tmp_path / f"a.{kind}", [change(one) for one in x])
    *found, scale = read(path, NAMES, said)
    assert scale is None
    for mine, wanted in zip(found, x, strict=True):
        assert torch.equal(mine, torch.from_numpy(wanted))
        assert mine.is_contiguous()


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_the_file_may_say_it_and_options_go_first(kind, tmp_path):
    x = [one[0, 0].reshape(30, 3) for one in grids()]
    grid = [5, 6] if kind == "safetensors" else np.array([5, 6])
    path = stored(tmp_path / f"a.{kind}", x, axes="ne", grid=grid, scale=0.25)
    q, k, v, scale = read(path, NAMES, Layout())
    assert q.shape == k.shape == v.shape == (1, 1, 5, 6, 3)
    assert scale == 0.25
    q, *_, scale = read(path, ("q", "k", "k"), Layout(grid=(3, 10), scale=2.0))
    assert (q.shape, scale) == ((1, 1, 3, 10, 3), 2.0)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_grid_that_fits_is_used_and_another_is_refused(kind, tmp_path):
    """Also where the file stores the axes of a grid of its own."""
    path = stored(tmp_path / f"a.{kind}", grids())
    assert read(path, NAMES, Layout(grid=(5, 6)))[0].shape == (2, 4, 5, 6, 3)
    q = read(path, NAMES, Layout(grid=(1, 5, 6)))[0]
    assert torch.equal(q, torch.from_numpy(grids()[0]).reshape(2, 4, 1, 5, 6, 3))
    with pytest.raises(ValueError, match="q has 5 x 6 = 30 points, but the grid 9 x 9 has 81"):
        read(path, NAMES, Layout(grid=(9, 9)))


def test_axes_without_a_batch_and_a_line_of_points(tmp_path):
    path = stored(tmp_path / "a.npz", grids()[:, 0, :, 0])
    assert read(path, NAMES, Layout(axes="hxe"))[0].shape == (1, 4, 6, 3)
    assert read(path, NAMES, Layout(axes="hne"))[0].shape == (1, 4, 6, 3)


@pytest.mark.parametrize("kind", ["float16", ">f4", "float64", "int32"])
def test_kinds_of_numbers(kind, tmp_path):
    x = grids()[:, :, :, :2].astype(kind)
    q = read(stored(tmp_path / "a.npz", x), NAMES, Layout())[0]
    assert q.dtype == {"float16": torch.float16, "float64": torch.float64}.get(kind, torch.float32)
    assert np.array_equal(q.numpy(), x[0])


class Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("kind", ["npz of objects", "pickle", "torch", "npy", "text", "half", "stored"])
def test_pickles_and_broken_files_are_refused(kind, tmp_path):
    path, trap = tmp_path / "a.npz", tmp_path / "sprung"
    if kind == "npz of objects":
        np.savez(path, q=np.array([Trap(trap)], dtype=object), k=np.zeros(3), v=np.zeros(3))
    elif kind == "stored":
        stored(path, grids(), scale=np.array(Trap(trap), dtype=object))
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"q": Trap(trap)}))
    elif kind == "torch":
        torch.save({"q": Trap(trap)}, path)
    elif kind == "npy":
        np.save(tmp_path / "a.npy", np.zeros(3))
        (tmp_path / "a.npy").rename(path)
    elif kind == "text":
        path.write_text("q, k, v")
    else:
        stored(path, grids())
        path.write_bytes(path.read_bytes()[:3000])
    words = {"npz of objects": "q is a pickled object, which is never loaded", "torch": "holds no q and no k and no v",
             "stored": "scale is a pickled object"}  # fmt: skip
    with pytest.raises(ValueError, match=words.get(kind, r"a\.npz is not an \.npz file of arrays")):
        read(path, NAMES, Layout())
    assert not trap.exists()


def test_a_broken_safetensors_file_is_refused(tmp_path):
    path = stored(tmp_path / "a.safetensors", grids())
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"a\.safetensors is not a whole \.safetensors file"):
        read(path, NAMES, Layout())


@pytest.mark.parametrize(
    ("said", "names", "message"),
    [
        (Layout(), ("q", "key", "v"), r"holds no key, but q, k, v; .* --names q,k,k"),
        (Layout(axes="bhe"), NAMES, r"q has 5 axes \(2, 4, 5, 6, 3\), --axes must name each of them once, .* got bhe"),
        (Layout(axes="bhyxc"), NAMES, "with an e: got bhyxc"),
        (Layout(axes="bhxxe"), NAMES, "got bhxxe"),
    ],
)
def test_a_wrong_layout_is_refused(said, names, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(stored(tmp_path / "a.npz", grids()), names, said)


def test_ambiguous_axes_and_a_wrong_grid_are_refused(tmp_path):
    path = stored(tmp_path / "a.npz", grids()[:, 0])
    with pytest.raises(ValueError, match=r"q has 4 axes \(4, 5, 6, 3\): say what they are, for example --axes yxhe"):
        read(path, NAMES, Layout())
    with pytest.raises(ValueError, match="q has 6 points, but the grid 2 x 4 has 8"):
        read(path, NAMES, Layout(grid=(2, 4)))
    path = stored(tmp_path / "b.npz", grids(), grid=np.array(["a"]))
    with pytest.raises(ValueError, match="stored axes, grid and scale must be a text, whole numbers, a number"):
        read(path, NAMES, Layout())


@pytest.mark.parametrize(
    ("kind", "message"),
    [("complex64", "q must hold real numbers, got complex64"), ("bool", "q must hold real numbers, got bool"),
     ("U9", "tensors must hold real numbers, got <U9")],
)  # fmt: skip
def test_what_is_no_number_is_refused(kind, message, tmp_path):
    letters = np.full((3, 1, 1, 2, 2, 2), "no")
    x = letters if kind == "U9" else grids().astype(kind)
    with pytest.raises(ValueError, match=message.replace("<U9", "<U2")):
        read(stored(tmp_path / "a.npz", x), NAMES, Layout())
    if kind != "U9":
        with pytest.raises(ValueError, match=message):
            read(stored(tmp_path / "a.safetensors", x), NAMES, Layout())
