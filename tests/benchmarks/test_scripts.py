"""The scripts in benchmarks/ start, and those that measure a device get their tensors."""

import json
import runpy
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.processes import run_program

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]


@pytest.fixture(autouse=True)
def _from_their_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    before = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, before)  # some end quietly when piped into head: tests must not


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_says_what_it_takes(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    assert left.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_the_cost_of_an_estimate_gets_its_tensors(tmp_path):
    import estimators
    from gpu_sets import Data

    picture = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    np.savez(tmp_path / "pictures.npz", left=picture, right=picture, astronaut=picture)
    q, k, v, scale = estimators.cost_tensors(Data(tmp_path, device="cpu"), size=16)
    assert q.shape == k.shape == v.shape == (1, 1, 16, 16, 64)
    assert q.dtype == torch.bfloat16
    assert scale > 1


def test_the_table_of_the_tile_search_names_its_rows_in_words():
    import tile

    lines = tile.table().splitlines()
    assert any(line.startswith("| gpu attention size 256 heads 8 4 |") for line in lines)
    assert not any("{" in line for line in lines)


def test_a_table_may_be_cut_short_by_a_pipe():
    command = f"{sys.executable} {FOLDER / 'tile.py'} table | head -1"
    done = run_program("sh", "-c", command, cwd=FOLDER)
    assert done.stdout.startswith("| row |")
    assert done.stderr == ""


@pytest.mark.slow
def test_one_rank_is_timed_in_every_way():
    command = (sys.executable, FOLDER / "nccl_one_rank.py", "--device", "cpu", "--backend", "gloo")
    done = run_program(*command, "--size", "6", "--turns", "2", "--warmup", "1")
    rows = json.loads(done.stdout)["rows"]
    ways = {"plain", "heads", "dtensor batch", "dtensor heads", "dtensor whole"}
    assert all(set(row["ratio"]) == ways for row in rows.values())
