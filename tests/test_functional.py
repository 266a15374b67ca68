"""The public functions: one is made of the others, and none changes what it is given."""

import inspect

import pytest
import torch

import scram
from scram.core import layout_hints, resolve
from scram.engines import dispatch
from scram.spec import draws


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_matches(shape, key_grid, kappa):
    keys = int(torch.tensor(key_grid).prod())
    index = torch.randint(-1, keys, (*shape, kappa), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return scram.Matches(index, torch.zeros(index.shape), key_grid)


def test_attention_is_search_then_attend(impl):
    q, k, v = randn(3, 1, 2, 8, 8, 4).unbind()
    settings = scram.Search(matches=2, separation=1, seed=3)
    how = {"causal": True, "score": "cosine", "key_mask": torch.rand(1, 8, 8) < 0.8, "impl": impl}
    then = {"radius": (1, 2), "scale": 3.0, "weight": "relu", "dropout_p": 0.2}
    then["extra"] = (randn(1, 2, 2, 4, seed=1), randn(1, 2, 2, 4, seed=2))
    warm = random_matches((1, 2, 8, 8), (8, 8), 1)
    torch.manual_seed(0)
    whole = scram.attention(q, k, v, search=settings, warm=warm, **how, **then)
    torch.manual_seed(0)
    found = scram.search(q, k, search=settings, warm=warm, **how)
    assert torch.equal(whole, scram.attend(q, k, v, found, **how, **then).out)


def test_attention_takes_what_its_parts_take():
    """Under the same names, with the same defaults."""
    whole, search, attend = (
        inspect.signature(function).parameters for function in (scram.attention, scram.search, scram.attend)
    )
    own = {"return_lse", "error", "extra_mask"}
    assert set(whole) == (set(search) | set(attend) | own) - {"matches", "codebook", "routes"}
    for name, parameter in whole.items():
        if name in ("search", "tail", "return_lse"):  # "auto" there; `attend` always returns it
            continue
        for other in (search, attend):
            assert name not in other or other[name].default == parameter.default


@pytest.mark.parametrize(
    "function", [scram.search, scram.attend, scram.attention, scram.estimate, scram.cluster, scram.route]
)
def test_settings_are_keywords(function):
    for name, parameter in inspect.signature(function).parameters.items():
        keyword = parameter.kind is parameter.KEYWORD_ONLY
        assert keyword == (name not in ("q", "k", "v", "matches") + ("codebook",) * (function is scram.route))


def test_arguments_are_left_as_they_were(impl):
    q, k, v = randn(3, 1, 2, 5, 6, 4).unbind()
    mask, extra = torch.rand(1, 5, 6) < 0.7, (randn(1, 2, 2, 4), randn(1, 2, 2, 4, seed=1))
    found = random_matches((1, 2, 5, 6), (5, 6), 2)
    given = [q, k, v, mask, *extra, found.index, found.score]
    before = [x.clone() for x in given]
    scram.attention(q, k, v, search=scram.Search(matches=2, seed=0), key_mask=mask, warm=found, extra=extra, impl=impl)
    scram.estimate(q, k, v, found, method=scram.DrawnKeys(5, seed=0), key_mask=mask, impl=impl)
    book = scram.cluster(q, k, v, clusters=scram.Clusters(count=4, keys=8, seed=0), key_mask=mask, impl=impl)
    routes = scram.route(q, k, book, impl=impl)
    given += [book.centers, book.sizes, book.label, book.order, book.spreads, routes.bits]
    before += [x.clone() for x in given[len(before) :]]
    scram.search(q, k, search=scram.Search(seed=0), codebook=book, key_mask=mask, warm=found, impl=impl)
    scram.attend(q, k, v, found, tail=book, routes=routes, key_mask=mask, impl=impl)
    for one, other in zip(given, before, strict=True):
        assert torch.equal(one, other)


class Keeps:
    """An engine that keeps something."""

    def __init__(self):
        self.kept = [1]

    def clear_caches(self):
        self.kept.clear()


def test_clear_caches_empties_every_cache(monkeypatch):
    engine = Keeps()
    monkeypatch.setitem(dispatch.loaded, "another", engine)
    q = torch.randn(1, 1, 64, 8)
    layout_hints.clear()
    with pytest.warns(layout_hints.LayoutWarning):
        scram.attention(q, q, q)
    draws.cell_counts((8, 8), 16)
    caches = (resolve._valid, layout_hints._seen, engine.kept)
    assert all(caches)
    assert draws.cell_counts.cache_info().currsize
    scram.clear_caches()
    assert not any(caches)
    assert draws.cell_counts.cache_info().currsize == 0
    with pytest.warns(layout_hints.LayoutWarning):  # as on the first call
        scram.attention(q, q, q)


def test_in_one_pool_torch_has_the_calling_thread_and_the_engine_all(monkeypatch):
    """The backward pass too; outside torch has its threads again, also after an error."""
    q = randn(1, 1, 12, 12, 8).requires_grad_()
    threads = pytest.importorskip("scram.engines.cpu.threads")
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    seen = []
    count = threads.num_threads
    monkeypatch.setattr(threads, "num_threads", lambda: seen.append(count()) or count())
    hooked = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with scram.single_pool():
            out = scram.attention(q, q, q, search=scram.Search(seed=0), impl="numba")
            out.register_hook(lambda grad: hooked.append(torch.get_num_threads()))
            out.sum().backward()
            assert torch.get_num_threads() == 1
        with pytest.raises(ZeroDivisionError), scram.single_pool():
            1 / 0  # noqa: B018
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {2}
    assert hooked == [1]
