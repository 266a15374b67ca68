"""`scram judge`: a table, a picture and JSON; refusals in one line; what failed is a row; Ctrl-C keeps what is done."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import scram
from scram.cli import judge as judge_module
from scram.cli import rivals
from support.command import call

FUNCTIONS = """
import time
import torch.nn.functional as F

def flat(q, k, v):
    assert q.ndim == 4
    return F.scaled_dot_product_attention(q, k, v)

def zeros(q, k, v):
    return 0 * q

def first(q, k, v):
    return v[:, :, 0]

def broken(q, k, v):
    raise RuntimeError("no kernel\\nfor this")

def leaves(q, k, v):
    raise SystemExit(7)

def endless(q, k, v):
    print("I never end")
    open("endless", "w").close()
    while True:
        time.sleep(0.01)

class Holder:
    attention = staticmethod(zeros)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with tensors of 12 x 14 points and a module of functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "functions", raising=False)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    x = np.random.default_rng(0).standard_normal((3, 1, 2, 12, 14, 8)).astype(np.float32)
    np.savez("qkv.npz", q=x[0], k=x[1], v=x[2])
    return tmp_path


def stored():
    with np.load("qkv.npz") as file:
        return dict(file)


def judged(*arguments):
    code, printed, complaints = call("judge", "qkv.npz", "--json", "--out", "out", *arguments)
    assert (code, complaints) == (0, "")
    return json.loads(printed)


def test_a_table_a_picture_and_json(folder):
    names = ("sdpa", "scram", "scram-windows", "functions:zeros", "functions:Holder.attention")
    code, printed, complaints = call(
        "judge", "qkv.npz", "--out", "out", *(word for name in names for word in ("--backend", name))
    )
    assert (code, complaints) == (0, "")
    found = json.loads((folder / "out" / "judge.json").read_text())
    assert tuple(found["rows"]) == names
    assert {"machine", "commit", "date", "seed"} <= set(found)
    assert (found["num_queries"], found["queries"]) == (168, 168)
    rows = found["rows"]
    assert np.max(rows["sdpa"]["p95_error"]["high"]) < 1e-5
    assert rows["functions:zeros"]["output_error"] == [pytest.approx([1.0, 1.0])]
    assert rows["functions:zeros"]["p95_error"] == rows["functions:Holder.attention"]["p95_error"]
    assert np.max(rows["scram"]["p95_error"]["high"]) < 1e-5  # on so small a grid it is dense
    assert 0.1 < rows["scram-windows"]["median_error"]["value"][0][0] < 9
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in rows.values())
    for name in names:
        assert name in printed
    assert "1.0000" in printed
    assert (folder / "out" / "judge.png").stat().st_size > 10_000


def test_what_failed_is_a_row_with_its_reason(folder):
    names = ("functions:broken", "functions:leaves", "functions:none", "nowhere:f", "functions:first", "natten", "sdpa")
    sys.modules["natten"] = None
    try:
        found = judged(*(word for name in names for word in ("--backend", name)))["rows"]
    finally:
        del sys.modules["natten"]
    assert found["functions:broken"] == {"failed": "RuntimeError: no kernel"}
    assert found["functions:leaves"] == {"failed": "SystemExit: 7"}
    assert "has no attribute 'none'" in found["functions:none"]["failed"]
    assert found["nowhere:f"]["failed"] == "ModuleNotFoundError: No module named 'nowhere'"
    assert "must return a tensor of shape (1, 2, 12, 14, 8), got (1, 2, 14, 8)" in found["functions:first"]["failed"]
    assert "natten" in found["natten"]["failed"]
    assert found["sdpa"]["seconds"] > 0
    printed = call("judge", "qkv.npz", "--backend", "sdpa", "--backend", "functions:broken")[1]
    assert "functions:broken failed: RuntimeError: no kernel\n" in printed
    code, printed, complaints = call("judge", "qkv.npz", "--backend", "functions:broken")
    assert (code, complaints) == (2, "scram: no backend could be measured\n")
    assert "RuntimeError: no kernel" in printed


@pytest.mark.slow
def test_a_backend_that_does_not_end_is_given_up(folder):
    names = ("--backend", "functions:endless", "--backend", "sdpa")
    code, printed, complaints = call("judge", "qkv.npz", "--json", "--longest", 2, *names)
    assert (code, complaints) == (0, "I never end\n")  # stdout is JSON alone
    found = json.loads(printed)["rows"]
    assert found["functions:endless"] == {"failed": "not finished in 2 s"}
    assert "seconds" in found["sdpa"]


def test_memory_that_is_not_there_is_a_row(folder, monkeypatch):
    monkeypatch.setattr(judge_module, "memory_status", lambda *_: 1000)
    found = judged("--backend", "full", "--backend", "local")["rows"]
    assert found["full"]["failed"].startswith("out of memory: needs 0.0 GiB")
    assert "seconds" in found["local"]


def test_the_layout_of_a_function(folder):
    found = judged("--backend", "functions:flat", "--backend", "sdpa", "--layout", "sdpa")["rows"]
    assert np.max(found["functions:flat"]["p95_error"]["high"]) < 1e-5
    assert "seconds" in found["sdpa"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["full", "local", "flex-local", "brute-force", "scram-paper"])
def test_backends_are_what_they_say(name, folder):
    q, k, v = (torch.from_numpy(x) for x in stored().values())
    torch.manual_seed(0)
    out = judge_module.backend(name, q, k, False)(q, k, v)
    torch.manual_seed(0)
    wanted = {
        "full": lambda: scram.exact_attention(q, k, v).out,
        "brute-force": lambda: scram.attend(q, k, v, scram.exact_search(q, k)).out,
        "scram-paper": lambda: scram.attention(q, k, v, search=scram.Search.paper(), tail=None),
    }.get(name, lambda: local(q, k, v))()
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def local(q, k, v):
    point = torch.arange(12 * 14)
    allowed = rivals.local_allows(14)(0, 0, point[:, None], point[None])
    flat = [x.flatten(2, 3) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*flat, attn_mask=allowed).reshape(q.shape)


@pytest.mark.slow
def test_scale_causal_order_and_dtype(folder):
    x = stored()
    found = judged("--backend", "sdpa", "--backend", "scram", "--backend", "local", "--causal", "--scale", 0.9)
    assert found["scale"] == 0.9
    for name in ("sdpa", "scram"):
        assert np.max(found["rows"][name]["p95_error"]["high"]) < 1e-5
    assert found["rows"]["local"]["failed"] == "ValueError: takes no causal order"
    q, k, v = (torch.from_numpy(one) for one in x.values())
    seen, *_ = judge_module.prepared(Path("qkv.npz"), ("q", "k", "v"), judge_module.Layout(scale=0.9), None, "cpu")
    plain = scram.exact_attention(q, k, v, scale=0.9).out
    torch.testing.assert_close(scram.exact_attention(seen, k, v).out, plain, rtol=1e-4, atol=1e-5)
    assert judged("--backend", "sdpa", "--dtype", "bfloat16")["dtype"] == "bfloat16"
    np.savez("half.npz", **{name: one.astype(np.float16) for name, one in x.items()})
    np.savez("whole.npz", **{name: (9 * one).astype(np.int64) for name, one in x.items()})
    for name in ("half.npz", "whole.npz"):
        assert json.loads(call("judge", name, "--backend", "sdpa", "--json")[1])["dtype"] == "float32"
    np.savez("wide.npz", **{name: one.astype(np.float64) for name, one in x.items()}, scale=0.3)
    assert json.loads(call("judge", "wide.npz", "--backend", "sdpa", "--json")[1])["dtype"] == "float64"


def test_unlike_grids_are_for_some(folder):
    x = stored()
    np.savez("qkv.npz", q=x["q"][:, :, :5], k=x["k"], v=x["v"])
    found = judged("--backend", "local", "--backend", "sdpa")["rows"]
    assert "takes pictures with equal grids and heads" in found["local"]["failed"]
    assert np.max(found["sdpa"]["p95_error"]["high"]) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.npz",), "none.npz: No such file"),
        (("a.pt",), "a.pt must be an .npz or .safetensors file; nothing else is read, pickles never"),
        (("pickled.npz",), "q is a pickled object, which is never loaded"),
        (("nan.npz",), "q must be finite, 1 of its 2688 values are NaN or infinite"),
        (("shapes.npz",), "k must have as many axes as q"),
        (("widths.npz",), "q and k must share their last axis"),
        (("qkv.npz", "--axes", "bhe"), "--axes must name each of them once"),
        (("qkv.npz", "--names", "q,k"), "names must be three"),
        (("qkv.npz", "--grid", "3by4"), "grid must be extents such as 64x96"),
        (("qkv.npz", "--scale", "0"), "scale must be positive"),
        (("scaled.npz",), "scale must be positive and finite, got -1.0"),
        (("qkv.npz", "--layout", "sdap"), "layout must be one of grid, sdpa, got sdap; did you mean sdpa?"),
        (("qkv.npz", "--dtype", "int8"), "dtype must be one of"),
        (("qkv.npz", "--backend", "scam"), "or module:function, got scam; did you mean scram?"),
        (("qkv.npz", "--backend", "os:system()"), "or module:function, got os:system()"),
    ],
)
def test_wrong_input_is_one_line(arguments, words, folder):
    x = stored()
    np.savez("pickled.npz", **{**x, "q": np.array([{}], dtype=object)})
    np.savez("shapes.npz", **{**x, "k": x["k"][0, 0, 0]}, axes="bhyxe")
    np.savez("widths.npz", **{**x, "k": x["k"][..., :5]})
    np.savez("scaled.npz", **x, scale=-1.0)
    bad = x["q"].copy()
    bad[0, 0, 0, 0, 0] = np.nan
    np.savez("nan.npz", **{**x, "q": bad})
    if arguments[0] == "shapes.npz":
        words = "k has 3 axes" if x["k"][0, 0, 0].ndim == 3 else "k has 2 axes (14, 8), --axes must name each"
    code, printed, complaints = call("judge", *arguments, "--out", "new")
    assert (code, printed) == (2, "")
    assert words in complaints
    assert complaints.startswith("scram: ")
    assert complaints.count("\n") == 1
    assert not (folder / "new").exists()


@pytest.mark.slow
def test_interrupt_keeps_what_was_measured(folder):
    """A real Ctrl-C, while the third backend runs."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from scram.cli import main; main()"
    arguments = (
        "judge",
        "qkv.npz",
        "--out",
        "out",
        "--backend",
        "sdpa",
        "--backend",
        "functions:zeros",
        "--backend",
        "functions:endless",
        "--backend",
        "scram",
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            while process.poll() is None and not Path("endless").exists():
                sleep(0.05)
            process.send_signal(signal.SIGINT)
            printed, complaints = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert complaints == "I never end\nscram: interrupted; what was measured is kept\n"
    assert "functions:zeros" in printed
    assert "scram " not in printed
    assert list(json.loads((folder / "out" / "judge.json").read_text())["rows"]) == ["sdpa", "functions:zeros"]
    assert (folder / "out" / "judge.png").exists()


def test_a_busy_machine_is_seen_in_the_table(folder, monkeypatch):
    real, steady = judge_module.judged, {"sdpa": True, "functions:zeros": False}

    def judged(judge, name, *rest):
        return replace(real(judge, name, *rest), steady=steady[name])

    monkeypatch.setattr(judge_module, "judged", judged)
    printed = call("judge", "qkv.npz", "--backend", "functions:zeros", "--backend", "sdpa")[1]
    assert printed.count(" ? ") == 1
    assert "?: repeated times differ by more than a third" in printed
    steady["functions:zeros"] = True
    assert "?" not in call("judge", "qkv.npz", "--backend", "functions:zeros", "--backend", "sdpa")[1]


def test_the_worst_of_many_heads_is_shown(folder):
    x = np.random.default_rng(0).standard_normal((3, 1, 30, 4, 4, 8)).astype(np.float32)
    np.savez("qkv.npz", q=x[0], k=x[1], v=x[2])
    printed = call("judge", "qkv.npz", "--backend", "functions:zeros", "--backend", "sdpa")[1]
    assert "the worst of 30 heads" in printed
    assert printed.count("1.0000") == 1  # of the zeros; every head would have one
    assert " sdpa " in printed
