"""examples/distributed.py in its smallest form: rows of the picture, and whole runs on one and on two processes."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image

import scram
from support.processes import run_python

PATH = Path(__file__).parents[2] / "examples" / "distributed.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("distributed_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_keys_are_the_tiles_in_another_order(example):
    mosaic = example.Mosaic(64)
    a, b = mosaic.rows(0, 64), mosaic.rows(0, 64, moved=True)
    assert a.shape == b.shape == (3, 64, 64)
    assert (a - b).std() > 5 * example.NOISE
    for down in range(4):
        for across in range(4):
            right, there = (across + 3 * down + 1) % 4, (down + 2) % 4
            tile = a[:, 16 * down : 16 * down + 16, 16 * across : 16 * across + 16]
            moved = b[:, 16 * there : 16 * there + 16, 16 * right : 16 * right + 16]
            assert (moved - tile).std() == pytest.approx(example.NOISE, rel=0.15)


def test_rows_do_not_depend_on_who_makes_them(example):
    mosaic = example.Mosaic(64)
    basis = mosaic.basis(8)

    def made(*rows):
        return example.features(mosaic, rows, True, basis, torch.float32, "cpu", lambda n: None)

    whole, parts = made(0, 64), [made(0, 21), made(21, 21), made(21, 64)]
    for n in (0, 1):
        torch.testing.assert_close(torch.cat([part[n] for part in parts], 2), whole[n], atol=1e-5, rtol=0)
    assert [example.share(8192, n, 3, 16) for n in range(3)] == [(0, 2720), (2720, 5456), (5456, 8192)]


def test_one_process(example, tmp_path, capsys):
    """Exact attention over blocks of keys is that over all; the group is gone after it, and after an error."""
    example.main(["--size", "64", "--dtype", "float32", "--picture", str(tmp_path / "a.png"), "--band", "24"])
    said = capsys.readouterr().out
    assert "64 x 64 points, 1 processes, mode ring, float32" in said
    assert "rank 0: 64 rows; " in said
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="size must be a multiple of 8, 32 at least, got 100"):
        example.main(["--size", "100"])
    assert not dist.is_initialized()
    q, k = torch.randn(2, 1, 1, 300, 4, 8)
    v = torch.rand(1, 1, 300, 4, 3)
    with example.processes("cpu") as mesh:
        found = example.exact(q[0, 0, :5, 0], k, v, 0.7, mesh)
    want = scram.exact_attention(q[:, :, :5, :1], k, v, score="l2", scale=0.7).out
    torch.testing.assert_close(found, want.flatten(0, 3), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_two_processes(tmp_path):
    picture, results = tmp_path / "new" / "picture.png", tmp_path / "results.json"
    words = ["--size", "64", "--mode", "ring", "--sweeps", "12", "--band", "16", "--queries", "40"]
    words += ["--dtype", "float32", "--picture", str(picture), "--results", str(results)]
    run_python(f"""
        import os
        from torch.distributed.run import main
        os.environ.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1")
        main({["--standalone", "--nproc-per-node", "2", str(PATH), *words]})
    """)
    (row,) = json.loads(results.read_text()).values()
    first, second = row["ranks"]
    assert first["rows"] == second["rows"] == 32
    keys, halo = 32 * 64 * (8 + 3) * 4, 16 * 64 * 8 * 4  # bytes, sent once for each of two bands of 16 rows
    assert first["sent_bytes"] == second["sent_bytes"] == 2 * (keys + halo)
    assert first["queries"] == 80
    # Against the keys of one process alone the error would be 0.5, and half of the queries near.
    assert first["output_error"] == second["output_error"] < 0.25
    assert first["near_exact"] > 0.8
    assert first["painted_error"] < 0.05
    assert row["commit"]
    with Image.open(picture) as drawn:
        assert drawn.size == (3 * 64, 64)
