"""benchmarks/hiera.py: the reader of .ort files, windows, the position table, the blocks; on made-up weights."""

import struct
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import hiera

TRUNK = "/image_encoder/trunk"


class Writer:
    """A writer of flatbuffers, as small as the reader: what a table points to lies behind it."""

    def __init__(self):
        self.data = bytearray(4)

    def table(self, pointer, fields):
        """A table that the pointer leads to, with values of 32 bits by number; the places of its fields."""
        start, offsets = len(self.data), [0] * (max(fields) + 1)
        for n, number in enumerate(fields):
            offsets[number] = 4 + 4 * n
        self.data += struct.pack(f"<{2 + len(offsets)}H", 4 + 2 * len(offsets), 4 + 4 * len(fields), *offsets)
        at = len(self.data)
        struct.pack_into("<I", self.data, pointer, at - pointer)
        self.data += struct.pack(f"<i{len(fields)}I", at - start, *fields.values())
        return {number: at + offsets[number] for number in fields}

    def vector(self, pointer, values, count=None):
        """A vector that the pointer leads to; the place of its values."""
        struct.pack_into("<I", self.data, pointer, len(self.data) - pointer)
        self.data += struct.pack("<I", len(values) if count is None else count) + values
        return len(self.data) - len(values)


def ort_file(weights):
    """The bytes of an .ort file with these constants, each with the number of its type."""
    file = Writer()
    session = file.table(0, {1: 0})
    model = file.table(session[1], {7: 0})
    graph = file.table(model[7], {0: 0})
    first = file.vector(graph[0], bytes(4 * len(weights)), len(weights))
    for n, (name, (kind, weight)) in enumerate(weights.items()):
        dims = {2: 0} if weight.ndim else {}
        tensor = file.table(first + 4 * n, {0: 0, **dims, 3: kind, 4: 0})
        file.vector(tensor[0], name.encode())
        if dims:
            file.vector(tensor[2], struct.pack(f"<{weight.ndim}q", *weight.shape), weight.ndim)
        file.vector(tensor[4], weight.numpy().tobytes())
    return file.data


def test_weights_of_a_file():
    given = {"one": torch.arange(6.0).reshape(2, 3), "scalar": torch.tensor(0.5), "last": torch.tensor([7.0])}
    kinds = {name: (1, weight) for name, weight in given.items()} | {"whole": (7, torch.tensor([3]))}
    found = hiera.weights_of(ort_file(kinds))
    assert found.keys() == given.keys()
    for name, weight in given.items():
        assert torch.equal(found[name], weight)


def test_another_file_is_refused():
    file = Writer()
    file.table(0, {0: 0})
    with pytest.raises(ValueError, match="field 1 is missing"):
        hiera.weights_of(file.data)


def test_windows_are_padded_and_joined_again():
    x = torch.arange(1.0, 36).reshape(1, 5, 7, 1)
    made = hiera.windows(x, 3)
    assert made.shape == (6, 3, 3, 1)
    assert made[1, ..., 0].tolist() == x[0, :3, 3:6, 0].tolist()
    assert made[5, ..., 0].tolist() == [[28, 0, 0], [35, 0, 0], [0, 0, 0]]
    assert torch.equal(hiera.joined(made, (5, 7)), x)


def test_positions_of_another_side():
    torch.manual_seed(0)
    coarse, fine = torch.randn(1, 3, 7, 7), torch.randn(1, 3, 8, 8)

    def table(side):
        return F.interpolate(coarse, (side, side), mode="bicubic") + fine.repeat(1, 1, side // 8, side // 8)

    for side in (32, 48):
        torch.testing.assert_close(hiera.positions(table(32), side), table(side), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def encoder():
    """An encoder of random weights, 8 wide at first, with a position table of 32 x 32."""
    torch.manual_seed(0)
    weights = {f"{TRUNK}/Transpose_output_0": torch.randn(1, 8, 32, 32)}
    plain = "model.image_encoder.trunk."
    weights |= {
        f"{plain}patch_embed.proj.weight": torch.randn(8, 3, 7, 7),
        f"{plain}patch_embed.proj.bias": torch.zeros(8),
    }
    width = 8
    for n in range(10):
        wide = 2 * width if n in hiera.DOWN else width
        sizes = {"attn.qkv": (width, 3 * wide), "attn.proj": (wide, wide), "mlp.layers.0": (wide, 2 * wide)}
        sizes |= {"mlp.layers.1": (2 * wide, wide)} | ({"proj": (width, wide)} if wide > width else {})
        for name, size in sizes.items():
            weights[f"{TRUNK}/blocks.{n}/{name.replace('.', '/', 1)}/Transpose_output_0"] = (
                torch.randn(size) / size[0] ** 0.5
            )
            weights[f"{plain}blocks.{n}.{name}.bias"] = torch.randn(size[1])
        for name, size in (("norm1", width), ("norm2", wide)):
            weights |= {f"{plain}blocks.{n}.{name}.{x}": torch.randn(size) for x in ("weight", "bias")}
        width = wide
    return hiera.Hiera(weights)


def test_global_blocks_attend_all_tokens(encoder):
    found = list(encoder.global_blocks(torch.rand(1, 3, 128, 128)))
    assert [block.number for block in found] == [5, 7, 9]
    for block in found:
        assert block.q.shape == block.k.shape == block.v.shape == block.out.shape == (8, 8, 4, 8)
        q, k, v = (x.reshape(64, 4, 8).movedim(1, 0) for x in (block.q, block.k, block.v))
        out = (q @ k.mT * 8**-0.5).softmax(-1) @ v
        torch.testing.assert_close(block.out, out.movedim(0, 1).reshape(8, 8, 4, 8))


def test_a_picture_of_another_side_has_its_own_positions(encoder, monkeypatch):
    picture = torch.rand(1, 3, 192, 192)
    found = next(encoder.global_blocks(picture))
    assert found.q.shape[:2] == (12, 12)
    monkeypatch.setattr(encoder, "table", hiera.positions(encoder.table, 48))
    assert torch.equal(found.out, next(encoder.global_blocks(picture)).out)


def test_other_blocks_attend_their_windows(encoder):
    """A change of one token reaches its window alone: 8 x 8 tokens, or 4 x 4 where the block halves the grid."""
    x = torch.randn(1, 32, 32, 8)
    changed = x.clone()
    changed[0, 9, 17] = torch.randn(8)
    for number, reached in ((0, (8, 16, 16, 24)), (1, (4, 8, 8, 12))):
        before, after = (encoder.block(number, y)[0] for y in (x, changed))
        off = (before != after).any(-1)[0].nonzero()
        low, high = off.amin(0), off.amax(0) + 1
        assert (int(low[0]), int(high[0]), int(low[1]), int(high[1])) == reached
