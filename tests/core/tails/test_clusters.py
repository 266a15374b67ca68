"""Clusters of keys through the public functions: where they are exact, routes, starts of a search, and errors."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.core.calls import RouteCall, RoutedStartCall
from scram.spec.clustering import order_of
from scram.spec.routing import LEAST_WINDOW
from support import plain_routing as plain

SEARCH = scram.Search(matches=2, sweeps=1, seed=3)
GRID, KEY_GRID = (9, 10), (6, 7)


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tensors(heads=4, key_heads=2, grid=GRID, key_grid=KEY_GRID):
    """q, k and v; four tiles of queries."""
    return (
        drawn(1, heads, *grid, 8),
        drawn(1, key_heads, *key_grid, 8, seed=1),
        drawn(1, key_heads, *key_grid, 3, seed=2),
    )


def some_extra(key_heads=2):
    return drawn(1, key_heads, 3, 8, seed=3), drawn(1, key_heads, 3, 3, seed=4)


def exact(q, k, v, extra=None, **how):
    """Over all keys and the extra ones."""
    made = scram.exact_attention(q, k, v, **how)
    if extra is None:
        return made
    rest = {name: x for name, x in how.items() if name != "key_mask"}
    other = scram.exact_attention(q.flatten(2, -2), *extra, **rest)
    return scram.merge(made, scram.Attended(other.out.reshape(made.out.shape), other.lse.reshape(made.lse.shape)))


def assert_equal(found, want, near=1e-4):
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)


def attended(q, k, v, impl, tail, search=None, **how):
    return scram.attention(q, k, v, search=search, tail=tail, impl=impl, return_lse=True, **how)


# --- exactly ---


MASK = torch.arange(42).reshape(1, *KEY_GRID) % 5 > 0


@pytest.mark.parametrize("search", [None, SEARCH], ids=["no search", "search"])
@pytest.mark.parametrize("keys", [0, 9, 512])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"score": "cosine", "scale": 5.0},
        {"score": "l2"},
        {"extra": some_extra()},
        {"key_mask": MASK},
        {"key_mask": torch.stack([MASK, ~MASK, MASK, ~MASK], 1), "extra": some_extra()},
    ],
    ids=lambda how: "-".join(str(how.get(name, name)) for name in how if name != "scale")[:20],
)
def test_one_cluster_a_key_is_exact_attention(impl, search, keys, how):
    q, k, v = tensors()
    for count in (42, 1000):
        found = attended(q, k, v, impl, scram.Clusters(count=count, keys=keys, seed=0), search, **how)
        assert_equal(found, exact(q, k, v, **how))


@pytest.mark.parametrize("search", [None, SEARCH], ids=["no search", "search"])
@pytest.mark.parametrize("keys", [0, 60, 512])
def test_copies_of_few_pairs_are_exact(impl, search, keys):
    """Of 12 kinds of keys, by 48 clusters: each of them has copies of one pair alone."""
    kind = torch.randint(12, (1, 2, 16, 16), generator=torch.Generator().manual_seed(0))
    k, v = drawn(12, 8)[kind], drawn(12, 3, seed=1)[kind]
    q = drawn(1, 4, *GRID, 8, seed=2)
    assert_equal(attended(q, k, v, impl, scram.Clusters(count=48, steps=3, keys=keys, seed=0), search), exact(q, k, v))


@pytest.mark.parametrize("search", [None, SEARCH], ids=["no search", "search"])
@pytest.mark.parametrize(
    "how",
    [{}, {"score": "cosine"}, {"score": "l2"}, {"extra": some_extra()}, {"key_mask": MASK}],
    ids=lambda how: str(next(iter(how.values()), "dot"))[:9],
)
def test_all_keys_routed_is_exact_attention(impl, search, how):
    """Whatever the clusters are: none is left to its center."""
    q, k, v = tensors()
    for keys in (42, 10**6):
        found = attended(q, k, v, impl, scram.Clusters(count=5, keys=keys, seed=0), search, **how)
        assert_equal(found, exact(q, k, v, **how))


def test_windows_over_every_key_leave_nothing_to_clusters(impl):
    """Not a rounding of it: centers, values and slopes may be anything."""
    q, k, v = tensors()
    book = scram.cluster(q, k, v, clusters=scram.Clusters(count=5, keys=0, seed=0), impl=impl)
    bad = {name: torch.full_like(getattr(book, name), torch.nan) for name in ("centers", "values", "slope")}
    found = scram.search(q, k, search=SEARCH, impl=impl)
    made = scram.attend(q, k, v, found, radius=9, tail=replace(book, **bad), impl=impl)
    want = scram.attend(q, k, v, found, radius=9, impl=impl)
    assert torch.equal(made.out, want.out)
    assert torch.equal(made.lse, want.lse)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_are_not_finite_count_in_windows_only(impl, bad):
    q, k, v = tensors()
    fine = torch.ones(1, 2, *KEY_GRID, dtype=torch.bool)
    k[0, 0, 2, 3, 1], v[0, 1, 5, 5, 2] = bad, bad
    fine[0, 0, 2, 3] = fine[0, 1, 5, 5] = False
    mask = fine.repeat_interleave(2, 1)
    want = exact(q, torch.where(fine.unsqueeze(-1), k, 0), torch.where(fine.unsqueeze(-1), v, 0), key_mask=mask)
    for tail in (scram.Clusters(count=5, keys=42, seed=0), scram.Clusters(count=42, keys=0, seed=0)):
        assert_equal(attended(q, k, v, impl, tail), want)
    index = torch.zeros(1, 4, *GRID, 1, dtype=torch.int32)
    index[0, 1, 4, 4] = 17  # the bad key of the first key head
    assert q[0, 1, 4, 4, 1] > 0
    matches = scram.Matches(index, torch.zeros(index.shape), KEY_GRID)
    made = scram.attend(q, k, v, matches, radius=0, tail=scram.Clusters(count=5, keys=42, seed=0), impl=impl)
    assert not made.out[0, 1, 4, 4].isfinite().all()
    made.out[0, 1, 4, 4], made.lse[0, 1, 4, 4] = want.out[0, 1, 4, 4], want.lse[0, 1, 4, 4]
    assert_equal(made, want)


@pytest.mark.parametrize("keys", [0, 12, 42])
def test_a_query_that_is_not_finite_is_alone_with_it(impl, keys):
    q, k, v = tensors()
    tail = scram.cluster(q, k, v, clusters=scram.Clusters(count=5, keys=keys, seed=0), impl=impl)
    routes = scram.route(q, k, tail, impl=impl) if keys else None
    want = scram.attend(q, k, v, None, tail=tail, routes=routes, impl=impl)
    q[0, 1, 4, 4, 2] = torch.nan
    made = scram.attend(q, k, v, None, tail=tail, routes=routes, impl=impl)
    assert made.out[0, 1, 4, 4].isnan().all()
    made.out[0, 1, 4, 4], made.lse[0, 1, 4, 4] = want.out[0, 1, 4, 4], want.lse[0, 1, 4, 4]
    assert_equal(made, want)
    again = attended(q, k, v, impl, scram.Clusters(count=5, keys=keys, seed=0))
    assert again.out.isnan().any(-1).sum() == 1


def test_no_key_at_all_gives_0(impl):
    q, k, v = tensors()
    none = torch.zeros(1, *KEY_GRID, dtype=torch.bool)
    out, lse = attended(q, k, v, impl, scram.Clusters(count=5, keys=9, seed=0), key_mask=none)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


# --- nearer ---


def errors(tail, q, k, v, impl):
    """Of out and of lse, relative to exact attention and in nats."""
    found, want = attended(q, k, v, impl, tail), exact(q, k, v)
    return float((found.out - want.out).norm() / want.out.norm()), float((found.lse - want.lse).abs().mean())


def test_every_term_brings_the_output_nearer(impl):
    """Values go with keys inside of clusters, and scores of their keys are apart."""
    k = drawn(1, 1, 24, 24, 4)
    v = torch.cat([k @ drawn(4, 2, seed=5), drawn(1, 1, 24, 24, 1, seed=6)], -1)
    q = 1.5 * drawn(1, 1, 16, 16, 4, seed=7)
    plainly = scram.Clusters(count=24, keys=0, first_order=False, second_order=False, steps=3, seed=0)
    out, lse = errors(plainly, q, k, v, impl)
    first = errors(replace(plainly, first_order=True), q, k, v, impl)
    second = errors(replace(plainly, second_order=True), q, k, v, impl)
    routed = errors(replace(plainly, keys=192), q, k, v, impl)
    assert first[0] < 0.8 * out
    assert first[1] == lse  # the first order leaves the normalizer alone
    assert second[1] < 0.6 * lse
    assert routed[0] < 0.9 * out
    assert errors(replace(plainly, first_order=True, second_order=True, keys=192), q, k, v, impl)[0] < first[0]


# --- routes ---


def book_of(q, k, v, impl, **how):
    return scram.cluster(q, k, v, clusters=scram.Clusters(**({"count": 9, "keys": 12, "seed": 0} | how)), impl=impl)


def test_routes_of_route_are_those_that_attend_chooses(impl):
    q, k, v = tensors()
    book = book_of(q, k, v, impl)
    routes = scram.route(q, k, book, impl=impl)
    assert routes.bits.shape == (1, 4, 4, 1)
    chosen = routes.chosen  # [B, H, T, C]
    number = (chosen * book.sizes.repeat_interleave(2, 1).unsqueeze(2)).sum(-1)
    assert ((number > 0) & (number <= 12)).all()
    for matches in (None, scram.search(q, k, search=SEARCH)):
        free, fixed = (scram.attend(q, k, v, matches, tail=book, routes=x, impl=impl) for x in (None, routes))
        assert torch.equal(free.out, fixed.out)
        assert torch.equal(free.lse, fixed.lse)
    nothing = replace(routes, bits=torch.zeros_like(routes.bits))
    other = scram.attend(q, k, v, None, tail=book, routes=nothing, impl=impl)
    want = scram.attend(q, k, v, None, tail=replace(book, keys=0), impl=impl)
    assert_equal(other, want, 1e-6)
    assert not torch.allclose(other.out, free.out)


def test_routes_with_more_keys_than_the_budget_are_refused():
    """Keys over it would be left out in silence."""
    q, k, v = tensors()
    book = book_of(q, k, v, "reference", keys=42)
    routes = scram.route(q, k, book, impl="reference")
    for keys, message in ((12, "have a tile with 42 keys, the codebook has keys=12"), (0, "need a codebook with keys")):
        with pytest.raises(ValueError, match=f"routes {message}"):
            scram.attend(q, k, v, None, tail=replace(book, keys=keys), routes=routes, impl="reference")


WRONG_ROUTES = [
    (lambda routes, book: {"routes": 3}, TypeError, r"routes must be a scram\.Routes, got int; scram\.route"),
    (lambda routes, book: {"routes": routes.bits}, TypeError, r"routes must be a scram\.Routes, got Tensor"),
    (lambda routes, book: {"tail": scram.Clusters(count=9, keys=12)}, ValueError, "routes need the clusters"),
    (lambda routes, book: {"tail": None}, ValueError, "routes need the clusters that they name: pass tail=codebook"),
    (
        lambda routes, book: {"routes": scram.Routes(routes.bits, GRID, 8)},
        ValueError,
        r"routes were made for .*8\), the call has .*9\)",
    ),
    (
        lambda routes, book: {"routes": scram.Routes(routes.bits, (10, 9), 9)},
        ValueError,
        r"routes were made for .*\(10, 9\).* the call has .*\(9, 10\)",
    ),
    (
        lambda routes, book: {"routes": scram.Routes(routes.bits[:, :2], GRID, 9)},
        ValueError,
        r"routes were made for .*\(\(1, 2\).* the call has \(\(1, 4\)",
    ),
    (lambda routes, book: {"routes": routes.to("meta")}, ValueError, r"routes must be on q's device cpu, got meta"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG_ROUTES, ids=range(len(WRONG_ROUTES)))
def test_wrong_routes_are_refused(change, error, message):
    q, k, v = tensors()
    book = book_of(q, k, v, "reference")
    routes = scram.route(q, k, book, impl="reference")
    given = {"tail": book, "routes": routes} | change(routes, book)
    matches = scram.search(q, k, search=SEARCH)
    with pytest.raises(error, match=message):
        scram.attend(q, k, v, matches, **given)


def test_what_cannot_be_routed_is_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"route needs a codebook with keys; make it with scram\.Clusters\(keys=512\)"):
        scram.route(q, k, book_of(q, k, v, "reference", keys=0))
    with pytest.raises(TypeError, match=r"codebook must be a scram\.Codebook, got Clusters; scram\.cluster"):
        scram.route(q, k, scram.Clusters())
    with pytest.raises(ValueError, match=r"key grid \(6, 7\), but k is"):
        scram.route(q, k[:, :, :5], book_of(q, k, v, "reference"))


# --- where a search starts ---


def starts_of(q, k, book, impl):
    """The best routed key of every query, in plain Python."""
    bits = scram.route(q, k, book, impl=impl).bits
    call = RoutedStartCall(q=q, k=k, order=order_of(book.label), sizes=book.sizes, routes=bits, keys=book.keys)
    best = [[plain.best_routed(call, 0, h, i)[0] for i in range(q.shape[2:-1].numel())] for h in range(q.shape[1])]
    return torch.tensor(best, dtype=torch.int32).reshape(1, q.shape[1], *q.shape[2:-1])


def whole_numbers():
    """Their scores are equal in every engine."""
    return [(3 * x).round() for x in tensors()]


@pytest.mark.parametrize("start", ["auto", "routed"])
def test_a_search_starts_at_the_best_routed_key(impl, start):
    q, k, v = whole_numbers()
    book = book_of(q, k, v, impl)
    best = starts_of(q, k, book, impl)
    search = scram.Search("query", sweeps=0, matches=2, start=start, seed=0)
    found = scram.search(q, k, search=search, codebook=book, impl=impl)
    assert (found.index == best.unsqueeze(-1)).any(-1).all()  # beside a drawn one
    one = scram.search(q, k, search=replace(search, matches=1), codebook=book, impl=impl)
    assert torch.equal(one.index.squeeze(-1), best)


def test_attention_starts_where_search_does(impl):
    q, k, v = tensors()
    book = book_of(q, k, v, impl)
    search = scram.Search("query", sweeps=0, seed=0)
    found = scram.search(q, k, search=search, codebook=book, impl=impl)
    whole = scram.attention(q, k, v, search=search, tail=book, return_lse=True, impl=impl)
    assert_equal(whole, scram.attend(q, k, v, found, tail=book, impl=impl), 1e-6)
    elsewhere = scram.search(q, k, search=replace(search, start="drawn"), codebook=book, impl=impl)
    assert torch.equal(elsewhere.index, scram.search(q, k, search=search, impl=impl).index)
    assert not torch.equal(elsewhere.index, found.index)


def test_windows_that_hold_hardly_any_attention_are_left_to_clusters(impl):
    """Of matches that were drawn and not improved most are far from the best keys of sharp attention."""
    q, k, v = tensors()
    q = 4 * q
    book = book_of(q, k, v, impl)
    search = scram.Search("query", sweeps=0, matches=2, start="drawn", seed=0)
    found = scram.search(q, k, search=search, impl=impl)
    call = RouteCall(
        q=q,
        centers=book.centers,
        sizes=book.sizes,
        variance=book.variance,
        spreads=book.spreads,
        keys=12,
        scale=book.scale,
    )
    least = [[plain.cluster_lse(call, 0, h, i) for i in range(90)] for h in range(4)]
    least = torch.tensor(least).reshape(1, 4, *GRID, 1) + math.log(LEAST_WINDOW / 9)
    poor = book.scale * found.score < least
    assert 0.1 < poor.float().mean() < 0.9
    kept = scram.Matches(torch.where(poor, -1, found.index), found.score, KEY_GRID)
    whole = scram.attention(q, k, v, search=search, tail=book, return_lse=True, impl=impl)
    assert_equal(whole, scram.attend(q, k, v, kept, tail=book, impl=impl), 1e-6)
    assert not torch.allclose(whole.out, scram.attend(q, k, v, found, tail=book, impl=impl).out)


def test_warm_matches_come_before_routed_starts(impl):
    """Where there is none in the first place the routed key counts; others keep their places."""
    q, k, v = whole_numbers()
    book = book_of(q, k, v, impl)
    index = torch.randint(-1, 42, (1, 4, *GRID, 2), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    index[..., 0] = torch.where(torch.arange(10) % 3 == 0, -1, index[..., 0])
    warm = scram.Matches(index, torch.zeros(index.shape), KEY_GRID)
    search = scram.Search("query", sweeps=0, matches=1, seed=0)
    found = scram.search(q, k, search=search, warm=warm, codebook=book, impl=impl)
    want = torch.where(index[..., 0] < 0, starts_of(q, k, book, impl), index[..., 0])
    assert torch.equal(found.index.squeeze(-1), want)
    both = scram.search(q, k, search=replace(search, matches=2), warm=warm, codebook=book, impl=impl)
    second = (index[..., 1] >= 0) & (index[..., 1] != want)
    assert (both.index == index[..., 1:]).any(-1)[second].all()
    assert (both.index == want.unsqueeze(-1)).any(-1).all()


def test_a_search_within_reach_starts_at_its_own_place(impl):
    q, k, v = tensors()
    search = scram.Search("query", reach=2, seed=0)
    found = scram.search(q, k, search=search, codebook=book_of(q, k, v, impl), impl=impl)
    assert torch.equal(found.index, scram.search(q, k, search=search, impl=impl).index)


def test_routed_starts_need_clusters_with_keys():
    q, k, v = tensors()
    search = scram.Search(start="routed")
    for call in (
        lambda: scram.search(q, k, search=search),
        lambda: scram.search(q, k, search=search, codebook=book_of(q, k, v, "reference", keys=0)),
        lambda: scram.attention(q, k, v, search=search, tail=None),
        lambda: scram.attention(q, k, v, search=search, tail=scram.Clusters(keys=0)),
        lambda: scram.attention(q, k, v, search=search, tail=scram.DrawnKeys()),
        lambda: scram.attention(q, k, v, search=search, weight="relu"),
        lambda: scram.explain(q, k, v, search=search, tail=None),
    ):
        with pytest.raises(ValueError, match=r"Search\(start='routed'\) needs clusters with keys .*scram\.Clusters\(k"):
            call()
    with pytest.raises(ValueError, match=r"Search\(start='routed'\) is of calls without causal order"):
        scram.attention(q, q, q, search=search, causal=True)
    with pytest.raises(ValueError, match="start must be one of 'auto', 'drawn', 'routed', got 'best'"):
        scram.Search(start="best")
    with pytest.raises(TypeError, match=r"codebook must be a scram\.Codebook"):
        scram.search(q, k, codebook=scram.Clusters())
    with pytest.raises(ValueError, match=r"tail was made for score='dot', scale=0\.353553, the call has"):
        scram.search(q, k, codebook=book_of(q, k, v, "reference"), scale=0.5)


# --- without a search ---


@pytest.mark.parametrize("tail", [None, "auto"])
def test_without_a_search_and_clusters_it_is_dense(tail):
    x = drawn(1, 2, *GRID, 8)
    flat = x.flatten(2, 3)
    want = F.scaled_dot_product_attention(flat, flat, flat).reshape(x.shape)
    assert torch.equal(scram.attention(x, x, x, search=None, tail=tail), want)
    assert scram.explain(x, x, x, search=None, tail=tail).dense
    out, lse = scram.attention(x, x, x, search=None, tail=tail, return_lse=True)
    assert_equal((out, lse), exact(x, x, x), 1e-5)
    causal = scram.attention(x, x, x, search=None, tail=tail, causal=True)
    torch.testing.assert_close(causal, scram.exact_attention(x, x, x, causal=True).out)


def test_clusters_without_a_search_have_no_windows(impl):
    q, k, v = tensors()
    book = book_of(q, k, v, impl)
    want = scram.attend(q, k, v, None, tail=book, impl=impl)
    for tail in (book, scram.Clusters(count=9, keys=12, seed=0)):
        found = attended(q, k, v, impl, tail)
        assert torch.equal(found.out, want.out)
        assert torch.equal(found.lse, want.lse)
    none = scram.Matches(torch.full((1, 4, *GRID, 1), -1, dtype=torch.int32), torch.zeros(1, 4, *GRID, 1), KEY_GRID)
    assert_equal(scram.attend(q, k, v, none, tail=book, impl=impl), want, 1e-6)
    told = scram.explain(q, k, v, search=None, tail=book)
    assert (told.dense, told.search, told.tail) == (False, None, book)
    assert told.scores == 9 + 12


@pytest.mark.parametrize("function", [scram.attention, scram.explain], ids=lambda x: x.__name__)
def test_drawn_keys_without_a_search_are_refused(function):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"windows need matches: pass search=scram\.Search"):
        function(q, k, v, search=None, tail=scram.DrawnKeys())


def test_attend_needs_matches_where_a_tail_does_not_stand_alone():
    q, k, v = tensors()
    for tail in (None, scram.DrawnKeys()):
        with pytest.raises(TypeError, match=r"matches must be a scram\.Matches, got NoneType"):
            scram.attend(q, k, v, None, tail=tail)


# --- settings ---


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"count": 0}, ValueError, "count must be at least 1"),
        ({"keys": -1}, ValueError, "keys must be at least 0, got -1"),
        ({"keys": 1.5}, TypeError, "keys must be an int, got float 1.5"),
        ({"keys": True}, TypeError, "keys must be an int, got bool True"),
        ({"first_order": 1}, TypeError, "first_order must be True or False, got int 1"),
        ({"second_order": None}, TypeError, "second_order must be True or False, got NoneType"),
        ({"steps": -1}, ValueError, "steps must be at least 0"),
        ({"fit": 8}, TypeError, "unexpected keyword argument 'fit'"),
    ],
    ids=str,
)
def test_clusters_check_themselves(change, error, message):
    with pytest.raises(error, match=message):
        scram.Clusters(**change)


def test_keys_are_told():
    tail = scram.Clusters(count=9, keys=12)
    assert tail.describe() == "9 clusters + 12 keys"
    assert replace(tail, keys=0).describe() == "9 clusters"
    assert [x.visited(90, keys) for x in (tail, replace(tail, keys=0)) for keys in (1000, 5)] == [21, 5, 9, 5]
    assert "keys=12" in repr(tail)
    assert tail.of_part(7, Fraction(1, 9)) == scram.Clusters(count=3, keys=4, seed=7)
    assert tail.of_part(7, Fraction(1, 10**4)).count == 1
    assert tail.resized(99) == scram.Clusters(count=99, keys=12)
    q, k, v = tensors()
    book = book_of(q, k, v, "reference")
    assert book.describe() == "9 clusters + 12 keys"
    assert book.visited(90, 1000) == 21
    assert "keys=12" in repr(book)


def test_terms_that_are_off_are_not_in_the_codebook():
    q, k, v = tensors()
    assert book_of(q, k, v, "reference").second_order
    assert not book_of(q, k, v, "reference", second_order=False).second_order
    assert book_of(q, k, v, "reference", first_order=False).slope is None
    l2 = scram.cluster(q, k, v, clusters=scram.Clusters(count=9), score="l2", impl="reference")
    assert not l2.second_order  # its features hold |k|^2: their variances say too much
    assert l2.slope.shape == (1, 2, 10, 3)
