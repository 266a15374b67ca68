"""`scram demo`: what it prints, what it writes, that it repeats itself."""

import io
import json
import math
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from scram.cli import console as console_module
from scram.quality import baseline
from support.command import call

pytestmark = pytest.mark.slow

PICTURES = ("photo_a", "photo_b", "rebuilt", "matches_paper", "matches_default", "error", "demo")

MEASURES = ("recall", "captured_mass", "output_error", "psnr_db")


def test_demo_writes_pictures_and_a_table(tmp_path: Path) -> None:
    code, printed, complaints = call("demo", "--size", 24, "--out", tmp_path / "new" / "folder")
    assert (code, complaints) == (0, "")
    for heading in ("grid", "time", "recall@1", "captured mass", "output error", "24 x 43", "dense, torch SDPA"):
        assert heading in printed
    for meaning in (
        "SCRAM, default: windows of best keys, routed keys, clusters for all others",
        "SCRAM, paper: the published search, and its windows alone",
        "time: of search, clusters and attention",
        "recall@1: share of queries",
        "captured mass: share of the exact",
        "output error: ||out - exact|| ",
    ):
        assert meaning in printed
    for name in PICTURES:
        with Image.open(tmp_path / "new" / "folder" / f"{name}.png") as picture:
            assert picture.size == (43, 24) or name == "demo"
    numbers = json.loads((tmp_path / "new" / "folder" / "demo.json").read_text())
    for setting in ("paper", "default"):
        row = numbers["settings"][setting]
        assert all(math.isfinite(row[name]) for name in MEASURES)
        assert 0.5 < row["recall"] <= 1
        assert 0 < row["captured_mass"] <= 1 + 1e-5
        assert 0 <= row["output_error"] < 1
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert ("cluster" in row["seconds"]) == (setting == "default")


def test_demo_measures_windows_and_tail_apart(tmp_path: Path) -> None:
    """The default answers by all keys, so its error is smaller; its captured mass is still that of the windows."""
    rows = json.loads(call("demo", "--size", 48, "--json", "--out", tmp_path)[1])["settings"]
    assert rows["default"]["output_error"] < rows["paper"]["output_error"]
    assert rows["default"]["captured_mass"] < 0.9


def test_demo_prints_json_and_only_json(tmp_path: Path) -> None:
    code, printed, _ = call("demo", "--size", 20, "--json", "--seed", 3, "--out", tmp_path)
    assert code == 0
    assert json.loads(printed) == json.loads((tmp_path / "demo.json").read_text())
    assert json.loads(printed)["seed"] == 3


@pytest.mark.parametrize(("pairs", "queries"), [(1 << 27, 20 * 36), (1 << 18, (1 << 18) // (20 * 36))])
def test_demo_says_whether_dense_was_extrapolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: int, queries: int
) -> None:
    monkeypatch.setitem(baseline.DENSE_PAIRS, "cpu", pairs)
    printed = " ".join(call("demo", "--size", 20, "--out", tmp_path)[1].split())
    dense = json.loads((tmp_path / "demo.json").read_text())["dense"]
    extrapolated = queries < 20 * 36
    assert (dense["timed_queries"], dense["extrapolated"]) == (queries, extrapolated)
    assert (f"extrapolated from {queries} queries" in printed) == extrapolated


def test_demo_repeats_itself(tmp_path: Path) -> None:
    first, second, other = (
        json.loads(call("demo", "--size", 24, "--json", "--seed", seed, "--out", tmp_path)[1])["settings"]
        for seed in (0, 0, 1)
    )
    assert [[row[name] for name in MEASURES] for row in first.values()] == [
        [row[name] for name in MEASURES] for row in second.values()
    ]
    assert first["paper"]["psnr_db"] != other["paper"]["psnr_db"]


def test_demo_names_measuring_apart_from_searching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stages: list[str] = []
    screen = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(console_module, "console", lambda stderr=False: screen)
    monkeypatch.setattr(console_module.Progress, "reset", lambda self, task, description: stages.append(description))
    call("demo", "--size", 20, "--out", tmp_path)
    for name in ("paper", "default"):
        compiles, runs, measures = (stage for stage in stages if stage.startswith(f"{name} setting"))
        assert "may compile" in compiles
        assert "search and attend" in runs
        assert "exact attention" in measures
