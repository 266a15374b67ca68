"""Statements of README and of the start page, each checked against a stored row or by a call."""

import json
import re
from pathlib import Path

import pytest
import torch

import scram
from scram.core import first_call

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
CODE = re.search(r"^```python\n(.*?)^```$", README, re.M | re.S)[1]


def stored(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def says(statement, *texts):
    """The pages say it, however their lines break."""
    for text in texts or (README, START):
        assert " ".join(statement.split()) in " ".join(text.split()), statement


def off(out, q, k, v):
    exact = scram.exact_attention(q, k, v).out
    return max(float((a - b).norm() / b.norm()) for a, b in zip(out[0], exact[0], strict=True))


@pytest.mark.slow
def test_the_code_keeps_its_budget():
    says("`error=0.05`: 95 % of the queries of every head are at most 5 % off")
    names = {}
    torch.manual_seed(0)
    assert "(96, 96)" in CODE
    exec(CODE.replace("(96, 96)", "(56, 56)"), names)  # tuning takes less time there
    q, k, v, out = (names[name] for name in ("q", "k", "v", "out"))
    exact = scram.exact_attention(q, k, v).out
    size = exact.square().sum(-1).flatten(2).mean(-1).sqrt()
    query = (out - exact).norm(dim=-1).flatten(2) / size[..., None]
    assert (query.quantile(0.95, -1) <= 0.05).all()


def test_the_first_call_of_a_kind_warns_where_it_is_far_off():
    says(f"the first call of a kind warns where its output error is above {100 * first_call.TOLERATED:g} %", README)
    says(f"[output error](glossary.md#output-error) is above {100 * first_call.TOLERATED:g} %", START)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 64, 64, 32).unbind()
    first_call.clear()
    with pytest.warns(scram.AccuracyWarning, match="output error"):
        out = scram.attention(q, k, v, search=scram.Search(sweeps=2, seed=0), tail=scram.Clusters(count=64, seed=0))
    assert off(out, q, k, v) > first_call.TOLERATED


def test_noise_is_far_off():
    says("as with `torch.randn`, the default is far off", README)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 96, 96, 32).unbind()
    settings = scram.core.resolve.SEARCHES["cpu"], scram.core.resolve.CLUSTERS["cpu"]
    scram.check_first_call(False)
    try:
        out = scram.attention(q, k, v, search=settings[0], tail=settings[1])
    finally:
        scram.check_first_call(True)
    assert off(out, q, k, v) > 0.35


def test_small_grids_are_dense_and_exact():
    says("`scram.attention` takes it", README)
    says("On small grids, where torch is faster, a call *is* torch's attention, exact", START)
    q, k, v = torch.randn(3, 1, 1, 16, 16, 32).unbind()
    assert str(scram.explain(q, k, v)).startswith("dense attention, by torch")
    assert off(scram.attention(q, k, v), q, k, v) < 1e-5


def test_dense_attention_is_faster_on_64x64():
    says("On 64\N{MULTIPLICATION SIGN}64 dense attention is faster.", README)
    rows = stored("gpu")
    assert rows["cudnn stereo 64 E64 h1 k1"]["ms"] < rows["captured stereo 64 E64 h1 k1"]["ms"]


def test_a_single_call_is_bound_by_the_host():
    says("A single call of one head is bound by the host; in a CUDA graph it is not.", README)
    row = stored("routed_gpu")["default 512 E64 h1 k1"]
    assert row["graph_ms"] < 0.7 * row["ms"]
    assert row["heads"] == 1


def test_errors_stand_at_the_scales_that_are_named():
    says("Three figures are those at [scale](docs/glossary.md#scale) 8, 32 and 100, two those at 8 and 32", README)
    says("Three output errors are those at scale 8, 32 and 100, two those at 8 and 32", START)
    cpu, gpu = stored("cpu")["default 256x256 E=64 forward"], stored("routed_gpu")["default 1024 E64 h1 k1"]
    of_cpu = [cpu[f"error_at_scale_{scale}"] for scale in (8, 32, 100)]
    of_gpu = [gpu[f"error_stereo_{scale}"] for scale in (8, 32)]
    for text in (README, START):
        for errors in (of_cpu, of_gpu):
            assert " / ".join(f"{error:.3f}".removeprefix("0") for error in errors) in text


def test_local_windows_can_be_faster():
    says("A local window (`scram.local`, NATTEN, FlexAttention masks) can be [faster]", README)
    rows = stored("bench_gpu")["rows"].values()
    forward = {
        row["contender"]: row.get("least")
        for row in rows
        if (row["kind"], row["size"], row["width"], row["backward"]) == ("attention", 1024, 64, False)
    }
    assert forward["NATTEN"] < forward["SCRAM, paper"]


def test_short_causal_sequences_are_hardly_faster():
    says("On 4096 positions clusters are hardly faster than dense attention, or slower", README)
    short = [row for row in stored("stretches").values() if row["positions"] == 4096]
    default = [row["1/8, 64 clusters, 512 keys"]["seconds"] / row["dense"]["seconds"] for row in short]
    assert min(default) > 0.85
    assert max(default) > 1


def test_sam2_is_tuned_on_one_photograph_and_shown_on_another():
    says("Settings were tuned on another photograph.")
    says("measured on others")
    measured = {name.split()[2] for name in stored("sam2")} - {"tuned", "times"}
    assert "coffee" not in measured
    assert len(measured & {"astronaut", "chelsea", "dogs", "fig", "drum", "stream"}) >= 2
    row = stored("sam2")["cpu 2048 tuned"]
    assert row["tokens"] == [128, 128]
    assert row["0.05"]["layers"] < row["0.05"]["dense"]


def test_the_page_of_the_frontier_holds_trained_layers_and_other_attentions():
    says("Layers of trained models beside other attentions: [error against time]")
    rows = stored("frontier")
    sets = {name.removeprefix("errors ").split("_")[0] for name in rows if name.startswith("errors ")}
    assert {"sam2", "mobilesam", "gmflow", "moonshine"} <= sets
    families = {name.rsplit("-", 1)[0] for row in rows.values() for name in row.get("times", {})}
    assert {"best-blocks", "block-means", "random-features", "top-k", "scram-clusters"} <= families


def test_search_time_grows_nearly_linearly():
    says("in O(n log n)")
    rows = stored("bench_cpu")["rows"].values()
    paper = {
        row["size"]: row["least"]
        for row in rows
        if (row["kind"], row["contender"], row["width"], row["backward"]) == ("attention", "SCRAM, paper", 3, False)
    }
    assert paper[512] / paper[128] < 16**1.3  # 16 times the points; the square would be 256 times
