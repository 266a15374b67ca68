"""The first searched call of a kind measures itself: who is warned, of what, how often, and what it costs."""

import threading
import warnings

import pytest
import torch

import scram
from scram.core import first_call
from scram.core.first_call import AccuracyWarning, sampled

GRID = (20, 24)
SEARCH = scram.Search(sweeps=2, seed=0)
FEW = {"search": SEARCH, "tail": scram.DrawnKeys(samples=4, seed=0)}  # far off on noise
MANY = {"search": SEARCH, "tail": scram.DrawnKeys(samples=480, seed=0)}  # exact


@pytest.fixture(autouse=True)
def _forgotten():
    first_call.clear()
    yield
    scram.check_first_call(True)
    first_call.clear()


def noise(heads=1, dtype=torch.float32):
    return torch.randn(3, 1, heads, *GRID, 16).to(dtype).unbind()


def warned(call, *args, **how):
    """The warnings of a call that are of accuracy."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*args, **how)
    return [x for x in found if x.category is AccuracyWarning]


def error(out, q, k, v, **how):
    """Of the worst head."""
    exact = scram.exact_attention(q, k, v, **how).out
    return float(((out - exact).square().sum((-1, -2, -3)) / exact.square().sum((-1, -2, -3))).sqrt().max())


def test_noise_is_warned_of_once(impl):
    q, k, v = noise()
    said_so = warned(scram.attention, q, k, v, impl=impl, **FEW)
    if impl == "triton" and torch.cuda.is_available():  # it is read when it is there, at the latest by the next call
        torch.cuda.synchronize()
        said_so += warned(scram.attention, q, k, v, impl=impl, **FEW)
    (found,) = said_so
    assert found.filename == __file__
    assert issubclass(AccuracyWarning, UserWarning)
    true = error(scram.attention(q, k, v, impl=impl, **FEW), q, k, v)
    said = int(str(found.message).split(" %")[0].split("%")[0].split()[-1]) / 100
    assert true > 0.35
    assert said == pytest.approx(true, rel=0.3)
    assert "error=0.05" in str(found.message)
    assert "search=None, tail=None" in str(found.message)
    assert not warned(scram.attention, q, k, v, impl=impl, **FEW)


def test_a_good_answer_is_silent(impl):
    q, k, v = noise()
    assert error(scram.attention(q, k, v, impl=impl, **MANY), q, k, v) < 0.15
    first_call.clear()
    assert not warned(scram.attention, q, k, v, impl=impl, **MANY)


def test_the_worst_head_is_named():
    q, k, v = (x.clone() for x in noise(heads=3))
    q[:, :2] = 0.0  # the others' attention is even
    v[:, :2] = 1.0
    (found,) = warned(scram.attention, q, k, v, **FEW)
    assert "head 2 of batch entry 0" in str(found.message)


@pytest.mark.parametrize(
    "how",
    [
        {"causal": True},
        {"key_mask": torch.rand(1, *GRID, generator=torch.Generator().manual_seed(0)) > 0.3},
        {"extra": (torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))},
        {
            "extra": (torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)),
            "extra_mask": torch.tensor([[True, False, True]]),
        },
        {
            "causal": True,
            "extra": (torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)),
            "extra_mask": torch.tensor([[True, False, True]]),
        },
        {"score": "l2"},
        {"scale": 0.4},
        {"causal": True, "extra": (torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))},
    ],
    ids=lambda how: "-".join(how),
)
def test_it_measures_what_the_call_stands_for(monkeypatch, how):
    """The squares of a call that attends every key are those of rounding; of one that is far off, what tests say."""
    q, k, v = torch.randn(3, 1, 2, *GRID, 16).unbind()
    seen = []
    monkeypatch.setattr(first_call, "_report", seen.append)
    out = scram.attention(q, k, v, **MANY, **how)
    (measured,) = seen
    off, size = measured.squares
    assert (off / size).sqrt().max() < 1e-5
    scram.attention(q, k, v, **FEW, **how)
    queries = sampled(out.shape[2:-1].numel(), q.device)
    exact = scram.attention(q, k, v, search=None, tail=None, **how).flatten(2, -2)[:, :, queries]
    far = scram.attention(q, k, v, **FEW, **how).flatten(2, -2)[:, :, queries]
    torch.testing.assert_close(seen[1].squares[0], (far - exact).double().square().sum((-1, -2)), rtol=1e-3, atol=1e-3)


def test_masked_nans_are_not_measured(monkeypatch):
    q, k, v = (x.clone() for x in noise())
    mask = torch.ones(1, *GRID, dtype=torch.bool)
    mask[0, 3] = False
    k[:, :, 3] = v[:, :, 3] = torch.nan
    assert warned(scram.attention, q, k, v, key_mask=mask, **FEW)


def test_without_a_tail_it_says_so():
    (found,) = warned(scram.attention, *noise(), search=SEARCH, tail=None)
    assert "Leave out tail=None" in str(found.message)


def test_another_kind_measures_itself():
    q, k, v = noise()
    assert warned(scram.attention, q, k, v, **FEW)
    assert warned(scram.attention, q, k, v, causal=True, **FEW)
    assert warned(scram.attention, q[:, :, 1:], k, v, **FEW)
    assert warned(scram.attention, q, k, v, search=SEARCH, tail=scram.DrawnKeys(samples=5))
    assert not warned(scram.attention, q, k, v, search=SEARCH, tail=scram.DrawnKeys(samples=5, seed=3))
    scram.clear_caches()
    assert warned(scram.attention, q, k, v, **FEW)


def test_each_module_measures_itself_in_training_too():
    x = torch.randn(1, *GRID, 16)
    torch.manual_seed(0)
    layers = [scram.nn.GridAttention(16, 1, **FEW).train() for _ in range(2)]
    for layer in layers:
        with torch.no_grad():
            layer.in_proj_weight.mul_(6)
        (found,) = warned(layer, x)
        assert found.filename == __file__
        assert not warned(layer, x)
        layer(x).sum().backward()


def test_layers_of_a_patched_model_measure_themselves():
    q, k, v = (x.flatten(2, 3) for x in noise())
    with scram.patch_sdpa(grid=GRID, **FEW):
        assert warned(torch.nn.functional.scaled_dot_product_attention, q, k, v)
        assert not warned(torch.nn.functional.scaled_dot_product_attention, q, k, v)


@pytest.mark.parametrize("how", ["attend", "local", "estimate", "dense", "dropout", "mean", "callable"])
def test_what_does_not_stand_for_dense_attention_is_silent(how, monkeypatch):
    q, k, v = noise()
    monkeypatch.setattr(first_call, "_squares", None)
    matches = scram.search(q, k, search=SEARCH)
    calls = {
        "attend": lambda: scram.attend(q, k, v, matches),
        "local": lambda: scram.local(q, k, v, radius=1),
        "estimate": lambda: scram.estimate(q, k, v, matches, method=FEW["tail"]),
        "dense": lambda: scram.attention(q, k, v),
        "dropout": lambda: scram.attention(q, k, v, dropout_p=0.5, **FEW),
        "mean": lambda: scram.attention(q, k, v, search=SEARCH, weight="mean"),
        "callable": lambda: scram.attention(q, k, v, search=SEARCH, score=lambda a, b: -(a - b).abs().sum(-1)),
    }
    assert not warned(calls[how])


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(first_call, "_squares", None)
    scram.check_first_call(False)
    assert not warned(scram.attention, *noise(), **FEW)
    with pytest.raises(TypeError, match="enabled must be True or False"):
        scram.check_first_call(None)


@pytest.mark.slow
def test_compiled_code_holds_nothing_of_it(monkeypatch):
    q, k, v = noise()
    monkeypatch.setattr(first_call, "_squares", None)
    compiled = torch.compile(lambda *x: scram.attention(*x, **FEW), backend="aot_eager", fullgraph=True)
    assert not warned(compiled, q, k, v)
    assert not warned(torch.func.vmap(lambda *x: scram.attention(*x, **FEW)), *(x[None] for x in (q, k, v)))
    monkeypatch.undo()
    assert warned(scram.attention, q, k, v, **FEW)  # eager, the same kind


def test_gradients_and_draws_are_those_of_a_call_that_does_not_measure():
    def run():
        torch.manual_seed(1)
        q, k, v = (x.requires_grad_() for x in noise())
        out = scram.attention(q, k, v, search=scram.Search(sweeps=2), tail=scram.DrawnKeys(samples=4))
        out.square().sum().backward()
        return out.detach(), q.grad, v.grad, torch.rand(())

    ours = []
    assert len(warned(lambda: ours.extend(run()))) == 1
    scram.check_first_call(False)
    for a, b in zip(ours, run(), strict=True):
        assert torch.equal(a, b)


def test_threads_measure_a_kind_once_and_none_waits():
    q, k, v = noise()
    count = []
    begin = threading.Barrier(4)

    def run():
        begin.wait()
        for _ in range(3):
            scram.attention(q, k, v, **FEW)

    def note(*args, **how):
        count.append(1)
        scram.attention(q, k, v, **FEW)  # a handler of warnings may call again

    threads = [threading.Thread(target=run, daemon=True) for _ in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_call, "warn_caller", note)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(count) == 1


class Late:
    """A result that comes later, as a GPU's."""

    there = False

    def __call__(self):
        return self.there


def test_a_result_that_is_not_there_is_read_later(monkeypatch):
    q, k, v = noise()
    late = Late()
    monkeypatch.setattr(first_call, "_on_the_host", lambda squares: (squares, late))
    monkeypatch.setattr(first_call, "_reads_at_once", lambda device: False)
    monkeypatch.setattr(first_call, "_captures", lambda: False)
    assert not warned(scram.attention, q, k, v, **FEW)
    assert not warned(scram.attention, q, k, v, **FEW)
    late.there = True
    assert len(warned(scram.attention, q, k, v, **FEW)) == 1
    assert not warned(scram.attention, q, k, v, **FEW)


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch):
    """To ask an event then would end the capture."""
    late = Late()
    late.there = True
    first_call.pending.append(first_call._Measured(torch.ones(2, 1, 1), late, "", ""))
    monkeypatch.setattr(first_call, "_captures", lambda: True)
    assert not warned(first_call.look)
    assert first_call.pending
    monkeypatch.setattr(first_call, "_captures", lambda: False)
    assert warned(first_call.look)


def test_values_that_are_not_finite_say_nothing():
    q, k, v = (x.clone() for x in noise())
    v[...] = torch.inf
    assert not warned(scram.attention, q, k, v, **FEW)
    assert not warned(scram.attention, q, k, torch.zeros_like(v), **FEW)


@pytest.mark.parametrize("points", [1, 63, 64, 65, 100, 4096, 9216, 65536])
def test_sampled_queries_are_distinct_and_lie_everywhere(points):
    queries = sampled(points, torch.device("cpu"))
    assert len(queries.unique()) == len(queries) == min(points, 64)
    if points >= 4096:
        side = int(points**0.5)
        for place in (queries // side, queries % side):  # rows and columns of a square
            shares = torch.histc(place.float(), 4, 0, side)
            assert shares.min() >= 8


def test_an_answer_is_returned_where_memory_is_full(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(first_call, "_squares", full)
    assert scram.attention(*noise(), **FEW).isfinite().all()


def test_kinds_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(first_call, "MOST_KINDS", 2)
    for n in range(4):
        scram.attention(*(x[:, :, : 8 + n] for x in noise()), **FEW)
        assert 1 <= len(first_call.known_kinds) <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_no_wait_for_the_device(graph):
    q, k, v = (x.cuda() for x in noise())
    scram.attention(q, k, v, **MANY)  # compiled, and pinned memory
    first_call.clear()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = warned(scram.attention, q, k, v, **FEW)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            scram.attention(q, k, v, **FEW)
        captured.replay()
    torch.cuda.synchronize()
    found += warned(scram.attention, q, k, v, **FEW)
    assert len(found) == 1


@pytest.mark.parametrize("unit", [1e-25, 1e25])
def test_values_far_from_one_are_warned_of_too(unit):
    scram.clear_caches()
    x = torch.randn(1, 1, 48, 48, 16, generator=torch.Generator().manual_seed(0))
    with pytest.warns(scram.AccuracyWarning, match="off dense attention"):
        scram.attention(x, x.roll(1, 2), x.flip(2) * unit, search=None, tail=scram.Clusters(count=8, keys=16, seed=0))
