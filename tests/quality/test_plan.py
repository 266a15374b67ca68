"""Plan: what it prints, calls, saves and checks."""

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import scram
from scram.core.dense import every_key
from scram.quality.plan import Check, Rung, Setting
from scram.quality.timing import Believed
from support.compiling import assert_equal, graphs_are, results
from support.trusting import coherent, diffuse

planning = sys.modules["scram.quality.plan"]
SEARCH = scram.Search(matches=2, sweeps=3, seed=0)
SETTINGS = {
    "windows": Setting(SEARCH),
    "clusters": Setting(SEARCH, scram.Clusters(count=32, keys=64, seed=0), (0, 2)),
    "drawn": Setting(SEARCH, scram.DrawnKeys(samples=32, stratified=True)),
    "without a search": Setting(None, scram.Clusters(count=32, keys=16, seed=0)),
    "limited": Setting(scram.Search(reach=(2, 1), random=False, seed=0)),
    "dense": Setting(),
}


ERRORS = ("output error*", "95th percentile")


def plan(setting=SETTINGS["windows"], error=0.1, **how):
    dense = Rung(Setting(), 256, 0.02, (0.0, 0.0, 0.0), 0.0, True)
    rungs = (Rung(setting, 30, 0.01, (0.05, 0.04, float("inf")), 0.2, True), dense)
    fields = {"causal": False, "scale": None, "score": "dot", "impl": "auto", **how}
    chosen = int(setting.dense)
    return scram.Plan(
        error=error,
        rungs=rungs,
        chosen=chosen,
        num_queries=100,
        queries=256,
        seed=0,
        confidence=0.99,
        tensors="nothing",
        **fields,
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_a_call_is_the_line_that_it_prints(name):
    q, k, v = diffuse(size=16)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    v = v[..., : k.shape[-1]]  # values of another width are padded by the plan, so that torch's kernel differs
    made = plan(SETTINGS[name], scale=0.3)
    out = made(q, k, v)
    assert torch.equal(out, eval(made.code, {"torch": torch, "scram": scram, "q": q, "k": k, "v": v}))
    assert made.code in str(made)
    assert made.dense == (name == "dense")
    assert scram.attention(q, k, v, tail=None).shape == out.shape


@pytest.mark.parametrize("name", ["clusters", "dense"])
def test_tensors_of_other_sizes_and_arguments_of_the_call(name):
    made, mask = plan(SETTINGS[name], scale=0.3), torch.arange(2 * 70).reshape(2, 7, 10) % 3 > 0
    q, k, v = torch.randn(2, 4, 5, 8, 6), torch.randn(2, 2, 7, 10, 6), torch.randn(2, 2, 7, 10, 3)
    how = {"key_mask": mask, "extra": (torch.randn(2, 2, 3, 6), torch.randn(2, 2, 3, 3)), "scale": 0.5}
    setting = SETTINGS[name].arguments
    want = every_key(q, k, v, **how) if name == "dense" else scram.attention(q, k, v, **how, **setting)
    assert torch.equal(made(q, k, v, **how), want)
    assert not torch.equal(made(q, k, v, **{**how, "scale": 0.3}), want)
    assert torch.equal(made(q, k, v, **{**how, "scale": 0.3}), made(q, k, v, key_mask=mask, extra=how["extra"]))


def test_a_plan_of_a_busy_machine_says_so_and_is_measured_again(monkeypatch):
    q, k, v = diffuse(size=16)
    made = replace(plan(SETTINGS["clusters"]), busy=True)
    assert "other programs took the cores" in str(made)
    assert scram.Plan.from_dict(json.loads(json.dumps(made.as_dict()))) == made
    times = {False: 1.0, True: 3.0}  # seconds by whether it is dense attention

    def timed(call, device, beside):
        return Believed(times[not isinstance(call.func, scram.Plan)], True), call()

    monkeypatch.setattr(planning, "believed", timed)
    monkeypatch.setattr(planning, "yardstick", lambda *tensors, **how: SimpleNamespace(busy=False))
    quiet = made.check(q, k, v).plan
    assert ([rung.seconds for rung in quiet.rungs], quiet.chosen, quiet.busy) == ([1.0, 3.0], 0, False)
    assert "other programs" not in str(quiet)
    times[False] = 2.9
    assert made.check(q, k, v).plan.dense
    assert quiet.check(q, k, v).plan is quiet


def test_causal_order_and_score_are_the_plans_own():
    q, k, v = torch.randn(3, 1, 2, 6, 7, 8).unbind()
    for setting in (SETTINGS["drawn"], SETTINGS["dense"]):
        out = plan(setting, causal=True, score="l2", scale=0.2)(q, k, v)
        torch.testing.assert_close(out[:, :, 0, 0], v[:, :, 0, 0])  # the first query has one key
        assert not torch.equal(out, plan(setting, causal=True, scale=0.2)(q, k, v))


@pytest.mark.parametrize("name", ["search", "tail", "radius"])
def test_what_the_plan_chose_is_not_chosen_again(name):
    q = torch.zeros(1, 1, 4, 4, 4)
    for setting in SETTINGS.values():
        with pytest.raises(TypeError, match=rf"a plan has its own {name}; call scram.attention\({name}=...\)"):
            plan(setting)(q, q, q, **{name: 1})


def test_an_unknown_argument_is_refused():
    q = torch.zeros(1, 1, 4, 4, 4)
    for name in ("windows", "dense"):
        with pytest.raises(TypeError, match="is_causal"):
            plan(SETTINGS[name])(q, q, q, is_causal=True)
        for own in ("matches", "hints", "needs_lse"):  # of the request inside
            with pytest.raises(TypeError, match=rf"plan\(\) has no argument {own}"):
                plan(SETTINGS[name])(q, q, q, **{own: None})


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", ["windows", "clusters", "drawn", "dense"])
@pytest.mark.slow
def test_compiled_it_is_one_graph(name):
    tensors = [torch.randn(1, 2, 6, 8, 8, requires_grad=True) for _ in range(3)]
    made = plan(SETTINGS[name])
    if SETTINGS[name].tail is not None and isinstance(SETTINGS[name].tail, scram.Clusters):
        made = plan(replace(SETTINGS[name], radius=1))
    with graphs_are(1):
        compiled = torch.compile(lambda q, k, v: made(q, k, v) * 1.0, backend="aot_eager", fullgraph=True)
        ours = results(compiled, tensors)
    theirs = results(lambda q, k, v: made(q, k, v) * 1.0, tensors)
    if name == "dense":
        torch.testing.assert_close(ours, theirs)
    else:
        assert_equal(ours, theirs)


@pytest.mark.parametrize("name", SETTINGS)
def test_json_keeps_everything(name, tmp_path):
    made = plan(SETTINGS[name], scale=0.3, causal=name == "drawn")
    made.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert (data["format"], data["version"], data["error"]) == ("scram.Plan", 1, 0.1)
    again = scram.Plan.load(tmp_path / "plan.json")
    assert again == made
    assert str(again) == str(made)
    assert scram.Plan.from_dict(made.as_dict()) == made
    assert again.rungs[0].error[2] == float("inf")


def _changed(**fields):
    return {**plan().as_dict(), **fields}


def _with_setting(**fields):
    data = plan(SETTINGS["clusters"]).as_dict()
    data["rungs"][0]["setting"].update(fields)
    return data


def _with_rung(**fields):
    data = plan().as_dict()
    data["rungs"][0].update(fields)
    return data


WRONG = {
    "not JSON": ("{", "Expecting"),
    "a list": ([1], "it holds something else"),
    "another format": (_changed(format="scram.Codebook"), "it holds something else"),
    "a newer version": (_changed(version=2), "its version is 2, this package reads 1"),
    "too much": (_changed(color="red"), "fields missing or unknown: color"),
    "too little": ({x: y for x, y in _changed().items() if x != "seed"}, "fields missing or unknown: seed"),
    "no such rung": (_changed(chosen=7), "chosen must name a rung"),
    "no dense rung": (_changed(rungs=plan().as_dict()["rungs"][:1]), "dense attention must be the last"),
    "no budget": (_changed(error=-1), r"error must be in \[0, inf\), got -1"),
    "a scale": (_changed(scale=-2.0), "scale must be positive"),
    "a score": (_changed(score="best"), "score must be one of"),
    "an engine": (_changed(impl="best"), "impl must be one of"),
    "order": (_changed(causal=1), "causal must be True or False"),
    "a radius": (_with_setting(radius=[1, -1]), r"radius\[1\] must be at least 0"),
    "a tail": (_with_setting(tail={"kind": "Codebook"}), "tail must be one of 'Clusters', 'DrawnKeys'"),
    "clusters": (_with_setting(tail={"kind": "Clusters", "count": 0}), "count must be at least 1"),
    "a search": (_with_setting(search={"kind": "Clusters", "count": 3}), "search must be of the kind Search"),
    "a radius for no axis": (_with_setting(radius=[]), "radius must be an int or have 1 to 4 values"),
    "a flag for a radius": (_with_setting(radius=True), "radius must be an int, got bool"),
    "a text for rungs": (_changed(rungs="ab"), "rungs must be a list, got str"),
    "an empty error": (_with_rung(error=[]), r"error must be None or \(value, low, high\), got \(\)"),
    "a negative error": (_with_rung(error=[0.1, -0.1, 0.2]), "error must not be negative, got -0.1"),
    "endless seconds": (_with_rung(seconds="inf"), r"seconds must be in \[0, inf\), got inf"),
    "seconds as text": (_with_rung(seconds="3"), "seconds must be a number, got str '3'"),
    "keys": (_with_rung(keys=1.5), "keys must be an int, got float"),
    "a verdict": (_with_rung(keeps=1), "keeps must be True or False"),
    "a note": (_with_rung(note=None), "note must be a str, got NoneType"),
    "a rung that lacks keys": (_with_rung(keys=None), "keys must be an int"),
    "too many keys": (_with_rung(keys=257), "chosen must visit at most the 256 keys that there are, got 257"),
    "nothing measured": (_with_rung(error=None), "chosen must name a rung that was measured"),
    "a huge error": (_changed(error=10**400), "int too large"),
    "a share": (_changed(split=1.5), r"split must be in \[0, 1\], got 1.5"),
    "confidence": (_changed(confidence=1.0), r"confidence must be in \[0, 1\), got 1.0"),
    "more queries than there are": (_changed(num_queries=257), "num_queries must be at most queries = 256, got 257"),
    "words": (_changed(tensors=3), "tensors must be a str, got int"),
    "a seed": (_changed(seed=None), "seed of a plan must be an int, got None"),
    "tensors twice": (_changed(given=["extra", "extra"]), "given must name each tensor once"),
    "a score by number": (_changed(score=3), "score must be a name, got 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_plan_is_refused(name, tmp_path):
    data, message = WRONG[name]
    (tmp_path / "x.json").write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(ValueError, match=rf"x.json is not a plan that Plan.save wrote: .*{message}"):
        scram.Plan.load(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": 1.5}, r"split must be in \[0, 1\]"),
        ({"rungs": ()}, "chosen must name a rung"),
        ({"rungs": (3,)}, "rungs must be a tuple of Rungs, got int"),
        ({"num_queries": 0}, "num_queries must be at least 1"),
    ],
)
def test_a_plan_checks_itself(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        replace(plan(), **change)


def test_far_apart_times_are_printed():
    """Their ratio is beyond the range of floats."""
    made = plan()
    for own, dense in ((1e308, 5e-324), (5e-324, 1e308)):
        rungs = replace(made.rungs[0], seconds=own), replace(made.rungs[1], seconds=dense)
        assert "of dense" in str(replace(made, rungs=rungs))


def test_a_callable_score_is_not_saved(tmp_path):
    with pytest.raises(TypeError, match="a plan with a callable score cannot be saved"):
        plan(score=lambda q, k: (q * k).sum(-1)).save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_check_says_whether_the_promise_holds():
    q, k, v = coherent(size=20, sharpness=25, noise=0.05)
    made = plan(Setting(scram.Search(sweeps=8, seed=0)), error=0.05)
    found = made.check(q, k, v, scale=1.0)
    assert found
    assert found.kept
    assert "the promise is kept: error at most 0.05; 95th percentile of the worst head" in str(found)
    assert "on 400 of 400 queries" in str(found)
    broken = made.check(q / 20, k, v, scale=1.0, num_queries=150, seed=4)
    assert not broken
    assert "the promise is broken in 1 of 1 heads" in str(broken)
    some = scram.measure.sample_queries(q, 150, 4)
    exact = scram.exact_attention(q / 20, k, v, scale=1.0, queries=some).out
    off = (made(q / 20, k, v, scale=1.0).flatten(2, 3)[:, :, some] - exact).norm(dim=-1)
    rms = exact.square().sum(-1).mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(broken.errors.p95.value, (off / rms).quantile(0.95, -1), rtol=1e-3, atol=1e-5)
    assert broken.errors.p95.low < broken.errors.p95.value < broken.errors.p95.high
    assert isinstance(broken, Check)
    between = replace(made, error=float(broken.errors.p95.value) * 1.01).check(q / 20, k, v, scale=1.0, num_queries=150)
    assert not between
    assert "open, compare more queries" in str(between)
    assert plan(Setting(), error=1e-4).check(q, k, v)


def test_check_takes_what_a_call_takes():
    q, k, v = diffuse(size=16)
    mask, extra = torch.rand(1, 16, 16) < 0.7, (torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 16))
    made = plan(Setting(SEARCH, scram.Clusters(count=256)))  # as many as keys: exact
    assert made.check(q, k, v, key_mask=mask, extra=extra, scale=0.5).errors.output.max() < 1e-4
    causal = plan(Setting(SEARCH, scram.DrawnKeys(samples=256)), causal=True)
    assert causal.check(q, k, v).errors.output.max() < 1e-4


def test_reasons():
    dense = Rung(Setting(), 256, 0.02, (0.0, 0.0, 0.0), 0.0, True)
    far = Rung(SETTINGS["clusters"], 30, 0.01, (0.5, 0.4, 0.6), 0.2, False)
    slow = Rung(SETTINGS["clusters"], 30, 0.03, (0.05, 0.04, 0.06), 0.2, True)
    skipped = Rung(SETTINGS["without a search"], 30, note="not tried: 3 ms or more")
    fast = plan()
    assert "1 match" not in fast.reason
    assert "2 matches, windows only: 95 % of the queries are at most inf off in every head, 2.0 times" in fast.reason
    for rungs, words in (
        ((far, dense), "nothing that could be faster kept 0.1; 2 matches, 32 clusters + 64 keys: 0.6"),
        ((slow, dense), "2 matches, 32 clusters + 64 keys keeps the budget, but is no faster"),
        ((skipped, dense), "nothing else could be faster"),
    ):
        made = replace(plan(), rungs=rungs, chosen=1)
        assert f"dense attention: {words}" in str(made)
        assert made.speedup == 1
    assert "not tried: 3 ms or more" in str(made)
    table = str(fast).splitlines()
    assert re.split(" {2,}", table[1].strip()) == ["setting", "keys visited", "ms", "of dense", *ERRORS]
    assert table[2].startswith("->  2 matches, windows only")
    assert table[2].split()[-5:-3] == ["0.50", "0.2000"]
    assert "0.0500 [0.0400, inf]" in table[2]


MASK = torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.7
EXTRA = torch.randn(2, 1, 2, 3, 8, generator=torch.Generator().manual_seed(1)).unbind()


@pytest.mark.parametrize(
    "how",
    [{}, {"key_mask": MASK}, {"extra": EXTRA}, {"causal": True}, {"key_mask": MASK, "score": "l2"}],
    ids=lambda how: " ".join(how) or "plain",
)
@pytest.mark.parametrize("chosen", [0, -1], ids=["windows", "dense"])
def test_the_line_of_code_does_what_the_plan_does(how, chosen):
    """Also of grouped heads."""
    q, k, v = torch.randn(1, 4, 16, 16, 8), *torch.randn(2, 1, 2, 16, 16, 8).unbind()
    plan = scram.tune(q, k, v, error=0, **how)
    measured = [replace(rung, error=(0.0, 0.0, 0.0)) for rung in plan.rungs]
    plan = replace(plan, rungs=tuple(measured), chosen=chosen % len(plan.rungs))
    tensors = {name: x for name, x in how.items() if name in ("key_mask", "extra")}
    names = {"scram": scram, "torch": torch, "q": q, "k": k, "v": v, **tensors}
    torch.testing.assert_close(eval(plan.code, names), plan(q, k, v, **tensors), rtol=1e-4, atol=1e-5)
    assert scram.Plan.from_dict(plan.as_dict()) == plan


def test_what_no_one_function_does_is_the_plan_itself():
    setting = Setting()
    assert setting.code(("key_mask", "extra")) == "plan(q, k, v, key_mask=key_mask, extra=extra)"


def test_check_refuses_what_is_not_finite():
    k = torch.randn(1, 2, 16, 16, 8)
    plan = scram.tune(k, k, k)
    with pytest.raises(ValueError, match="v must be finite"):
        plan.check(k, k, k * float("nan"))


def test_dense_attention_keeps_every_promise():
    k = torch.randn(1, 2, 16, 16, 8)
    assert scram.tune(k, k, k, error=0, key_mask=MASK).check(k, k, k, key_mask=MASK)
