"""Tensors of a user's file: how they lie is said by options or by the file; what is no tensor is refused in words."""

import io
import pickle
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scram.cli import memory
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
    words = {
        "npz of objects": "q is a pickled object, which is never loaded",
        "torch": "holds no q and no k and no v",
        "stored": "scale is a pickled object",
    }
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
    with pytest.raises(
        ValueError, match="stored axes, grid and scale must be a text, 1 to 4 whole numbers above 0, a number"
    ):
        read(path, NAMES, Layout())


def npy(shape, descr="<f4", data=b"\0" * 64):
    """An .npy file whose header says that shape, whatever follows."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


def zipped(path, members, kind=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", kind) as file:
        for name in NAMES:
            file.writestr(f"{name}.npy", members)
    return path


@pytest.mark.parametrize("shape", [(2, 4, 10**4, 10**4, 10**4), (1, 1, 4, 5, 3), (-1, 4), (1, 10**30)])
def test_a_header_that_says_more_than_the_file_holds_is_refused(shape, tmp_path):
    with pytest.raises(
        ValueError, match=r"q must be float32 of shape .*, but the file holds \d+ bytes of it|q cannot be read"
    ):
        read(zipped(tmp_path / "a.npz", npy(shape)), NAMES, Layout())


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_memory_is_known_before_it_is_taken(kind, tmp_path, monkeypatch):
    path = stored(tmp_path / f"a.{kind}", grids(30))
    monkeypatch.setattr(memory, "available", lambda: 150_000)
    with pytest.raises(ValueError, match=r"its tensors need about 0\.3 MB .* 0\.1 MB are free; cut the batch"):
        read(path, NAMES, Layout())


def test_an_archive_of_zeros_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    zeros = npy((1, 1, 1000, 1000, 4), data=bytes(16_000_000))
    path = zipped(tmp_path / "a.npz", zeros, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(memory, "available", lambda: 100_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="its tensors need about"):
            read(path, NAMES, Layout())
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grid", [-5, -6]),
        ("grid", [0, 6]),
        ("grid", []),
        ("grid", [2.5, 12]),
        ("grid", 30),
        ("grid", [1] * 70 + [30]),
        ("scale", [1.0, 2.0]),
        ("scale", "10" + "0" * 400),
    ],
)
def test_what_a_file_says_is_checked(kind, name, value, tmp_path):
    more = {name: value if kind == "safetensors" else np.array(value)}
    path = stored(tmp_path / f"a.{kind}", grids(), **more)
    with pytest.raises(ValueError, match="stored axes, grid and scale must be"):
        read(path, NAMES, Layout())


def test_deeply_nested_metadata_is_refused(tmp_path):
    path = stored(tmp_path / "a.safetensors", grids(), grid="[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match="stored axes, grid and scale must be"):
        read(path, NAMES, Layout())


@pytest.mark.parametrize("kind", ["npz", "packed", "safetensors"])
def test_broken_bytes_are_refused(kind, tmp_path):
    """Any byte of a file may be wrong: it is read, or refused as wrong input is."""
    path = stored(tmp_path / f"a.{kind.replace('packed', 'npz')}", grids()[:, :1, :1, :2, :2], grid=[2, 2], scale=0.5)
    if kind == "packed":
        with np.load(path) as file:
            arrays = dict(file)
        np.savez_compressed(path, **arrays)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        path.write_bytes(broken(whole, rng))
        try:
            read(path, NAMES, Layout())
        except (ValueError, OSError):
            refused += 1
    assert refused > 20


def broken(whole, rng):
    """Some bytes changed, most of them where the headers are, or the end cut off."""
    data = bytearray(whole)
    for _ in range(rng.integers(1, 6)):
        place = rng.integers(min(len(data), 400)) if rng.random() < 0.7 else rng.integers(len(data))
        data[place] = rng.integers(256)
    return bytes(data[: rng.integers(len(data))] if rng.random() < 0.1 else data)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("complex64", "q must hold real numbers, got complex64"),
        ("bool", "q must hold real numbers, got bool"),
        ("U9", "q must hold real numbers, got <U9"),
    ],
)
def test_what_is_no_number_is_refused(kind, message, tmp_path):
    letters = np.full((3, 1, 1, 2, 2, 2), "no")
    x = letters if kind == "U9" else grids().astype(kind)
    with pytest.raises(ValueError, match=message.replace("<U9", "<U2")):
        read(stored(tmp_path / "a.npz", x), NAMES, Layout())
    if kind != "U9":
        with pytest.raises(ValueError, match=message):
            read(stored(tmp_path / "a.safetensors", x), NAMES, Layout())
