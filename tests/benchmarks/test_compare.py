"""The script that compares two source trees: it agrees with itself, and reports what differs, dies or is refused."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from support.processes import run_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CALLS = 8
CHANGED = """
from .functional import attention as _attention
from .functional import search as _search
from .results import Matches


def search(q, k, **how):
    from pathlib import Path

    died = Path(__file__).with_name("died")  # once, in the first call
    if not died.exists():
        died.touch()
        raise SystemExit(3)
    found = _search(q, k, **how)
    return Matches(found.index.flip(-1), found.score, found.key_grid)


def attention(*tensors, **how):
    return 1.1 * _attention(*tensors, **how)
"""

# As a tree that is older than tails: its attention is the paper's sparse one and takes no `tail`.
OLD = """
from .functional import attention as _attention


def attention(q, k, v, *, search, warm, radius, causal, key_mask, scale, score, weight, extra, dropout_p, impl):
    how = {name: value for name, value in locals().items() if name not in ("q", "k", "v")}
    return _attention(q, k, v, tail=None, **how)
"""


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare

    return compare


def run(mode, base, new, out, *options):
    command = (sys.executable, ROOT / "benchmarks" / "compare.py", mode, base, new, "--json", out)
    done = run_program(*command, *options, code=None)
    return done, json.loads(out.read_text())


def same(base, new, out):
    options = ("--impl", "reference", "--calls", str(CALLS), "--points", "12", "--threads", "1")
    return run("same", base, new, out, *options)


def test_a_tree_is_the_same_as_itself_without_tails(tmp_path):
    """The same sources in both trees, but that one knows no tails and is compared without them."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src" / "scram" / "__init__.py").open("a") as file:
        file.write(OLD)
    done, report = same(ROOT / "src", tmp_path / "src", tmp_path / "same.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["calls"] == {"reference": {"same bits": CALLS}}
    assert report["results"] > 5 * CALLS
    assert f"{CALLS} same bits" in done.stdout


def test_what_differs_or_dies_is_reported_with_its_parameters(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src" / "scram" / "__init__.py").open("a") as file:
        file.write(CHANGED)
    done, report = same(ROOT / "src", tmp_path / "src", tmp_path / "same.json")
    assert done.returncode == 1
    verdicts = report["calls"]["reference"]
    assert verdicts["base ok, new crash"] == 1
    assert verdicts["different"] >= CALLS // 2
    assert sum(verdicts.values()) == CALLS
    words = " ".join(word for one in report["failures"] for word in one["what"])
    assert "index: " in words
    assert "out: " in words
    crashed = next(one for one in report["failures"] if "crash" in one["verdict"])
    assert crashed["call"] == 0
    assert "exit code 3" in crashed["what"][0]
    assert {"grid", "dtype", "search"} <= crashed["parameters"].keys()
    assert f"'grid': {tuple(crashed['parameters']['grid'])}" in done.stderr


def test_rounding_is_no_difference_but_in_a_search_field(compare):
    x = np.linspace(-1, 1, 50, dtype=np.float32)
    nearly, off = x * np.float32(1 + 1e-6), x * np.float32(1 + 1e-4)
    for name, new, words, rounded in [
        ("out", x, 0, 0),
        ("out", nearly, 0, 1),
        ("out", off, 1, 1),
        ("match score", nearly, 1, 1),
        ("out", np.where(x > 0, x, np.nan), 1, 1),
        ("out", x[:-1], 1, 0),
    ]:
        found = compare.differences({name: ("float32", x)}, {name: ("float32", new)})
        assert tuple(map(len, found)) == (words, rounded)
    assert compare.differences({"out": ("float32", x)}, {})[0]


def test_random_calls_reach_everything(compare):
    cases = [compare.random_case(f"0 triton {n}", "triton", "cuda", 4000) for n in range(500)]
    assert {len(case["grid"]) for case in cases} == {1, 2, 3, 4}
    assert {case["search"]["matches"] for case in cases} == {1, 2, 3, 4, 5, 6}
    assert {case["dtype"] for case in cases} == {"float16", "bfloat16", "float32"}
    assert {case["estimator"] for case in cases if case["kind"] == "estimate"} == {
        "DrawnKeys",
        "Snis",
        "MetropolisHastings",
    }
    assert min(case["batch"] for case in cases) == 0
    assert all(case["grid"] == case["key_grid"] for case in cases if case["causal"])
    assert any(case["grid"] != case["key_grid"] for case in cases)


# A tree for `speed` of which the import takes a known time; what the workers import besides is as small as can be.
STUBS = {
    "torch.py": "Tensor = object\nset_num_threads = lambda count: None\nget_num_threads = lambda: 1\n",
    "gpu_sets.py": "Data = object\n",
    "scram/__init__.py": "import time\ntime.sleep({seconds})\ndef attention(q, k, v): pass\n",
}


def test_speed_prints_the_ratio_of_the_two_trees(tmp_path):
    for tree, seconds in (("base", 0.1), ("new", 0.2)):
        (tmp_path / tree / "scram").mkdir(parents=True)
        for name, text in STUBS.items():
            (tmp_path / tree / name).write_text(text.format(seconds=seconds))
    out = tmp_path / "speed.json"
    done, report = run("speed", tmp_path / "base", tmp_path / "new", out, "--only", "import scram", "--imports", "3")
    assert done.returncode == 0, done.stderr
    row = report["rows"]["import scram"]
    assert row["base"]["ms"] >= 100
    assert row["new"]["ms"] >= 200
    assert row["rounds"] == row["base"]["calls"] == 3
    assert row["low"] <= row["ratio"] <= row["high"]
    assert 1.4 < row["ratio"] < 2.6
    table = (sys.executable, ROOT / "benchmarks" / "compare.py", "table", out)
    assert run_program(*table).stdout == done.stdout
    assert f"{row['ratio']:.3f}" in done.stdout


def test_interval_holds_the_ratio_of_two_speeds(compare):
    from compare_speed import summary

    rng = np.random.default_rng(0)
    drift = np.linspace(1, 3, 20)[:, None]  # of the machine, which both trees see
    base, new = (list(speed * drift * rng.normal(1, 0.01, (20, 5))) for speed in (10.0, 10.4))
    row = summary({"base": base, "new": new})
    assert row["low"] < 1.04 < row["high"]
    assert 0.98 < row["low"] / row["ratio"] <= 1 <= row["high"] / row["ratio"] < 1.02
