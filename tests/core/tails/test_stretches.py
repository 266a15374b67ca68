"""Clusters under causal order: the formula by plain loops, what may matter to a position, exactness, gradients."""

import math

import pytest
import torch

import scram
from scram.core.resolve import CAUSAL_CLUSTERS
from scram.spec.stretches import complete_count, default_stretch, fine_features, fine_values, look_back

IMPLS = ("reference", "numba")
SMALL = scram.Clusters(count=8, keys=40, stretch=64, seed=3)


def tensors(grid, heads=2, key_heads=1, dtype=torch.float32, seed=0, width=8, value_width=4, batch=1):
    chance = torch.Generator().manual_seed(seed)
    shapes = ((heads, width), (key_heads, width), (key_heads, value_width))
    return [torch.randn(batch, h, *grid, w, generator=chance).to(dtype) for h, w in shapes]


def relative_error(x, y):
    return float((x - y).norm() / y.norm())


def attend(q, k, v, impl, tail=SMALL, search=None, **how):
    return scram.attention(q, k, v, search=search, tail=tail, causal=True, impl=impl, return_lse=True, **how)


# --- the formula ---


def plain_row(i, q, k, v, book, back, scale, windows=()):
    """out and lse of position i of one row, q [N, E], k [N, E], v [N, F], by the words of the docs.

    `windows` are keys, of any stretch.
    """
    stretch = book.label.shape[2]
    count = book.sizes.shape[2]
    own = i // stretch
    tile = i // 64 * 64
    sizes = [[int(book.sizes[0, s, c]) for c in range(count)] for s in range(own)]
    total = sum(map(sum, sizes))
    variance = sum((book.variance[0, s] * sum(sizes[s]) for s in range(own)), torch.zeros(q.shape[1])) / max(total, 1)
    slope = sum((book.slope[0, s] * sum(sizes[s]) for s in range(own)), torch.zeros(q.shape[1], v.shape[1]))
    slope = slope / max(total, 1)

    def spread_of(s, c):
        return float(book.spreads[0, s, c] * book.variance[0, s].sum() / variance.sum())

    clusters = [(s, c) for s in range(own) for c in range(count) if sizes[s][c]]
    # The queries that choose for the tile lie `back` before it, zeros before the first.
    chooser = [q[p - back] if p >= back else torch.zeros(q.shape[1]) for p in range(tile, tile + 64)]
    u = sum(chooser) / 64
    shares = []
    for x in chooser:
        logits = torch.tensor([scale * float(x @ book.centers[0, s, c]) + math.log(sizes[s][c]) for s, c in clusters])
        shares.append(logits.softmax(0) if clusters else logits)
    importance = []
    for n, (s, c) in enumerate(clusters):
        weight = math.sqrt(sum(float(a[n]) ** 2 for a in shares) / 64)
        expected = scale**2 * float((u * u) @ variance) * spread_of(s, c)
        importance.append(weight * (math.exp(min(expected, 4)) - 1 + 0.01) / sizes[s][c])
    left, routed = book.keys, set()
    for n in sorted(range(len(clusters)), key=lambda n: (-importance[n], clusters[n])):
        s, c = clusters[n]
        if sizes[s][c] <= left and importance[n] > 0:
            routed.add(clusters[n])
            left -= sizes[s][c]

    alone = {j for j in windows if j < own * stretch and book.label[0, j // stretch, j % stretch] >= 0}
    place = {j: (j // stretch, int(book.label[0, j // stretch, j % stretch])) for j in alone}
    alone = {j for j in alone if place[j] not in routed}
    s_i = scale**2 * float((q[i] * q[i]) @ variance)
    # Logit, value, part in the first-order term.
    terms = [(scale * float(q[i] @ k[j]), v[j], 0.0) for j in alone]
    terms += [(scale * float(q[i] @ k[j]), v[j], 0.0) for j in range(own * stretch, i + 1)]
    for s, c in clusters:
        if (s, c) in routed:
            mine = [s * stretch + j for j in range(stretch) if int(book.label[0, s, j]) == c]
            terms += [(scale * float(q[i] @ k[j]), v[j], 0.0) for j in mine]
        else:
            left = sizes[s][c] - sum(place[j] == (s, c) for j in alone)
            if not left:
                continue
            raised = min(s_i * spread_of(s, c), 2) / 2
            logit = scale * float(q[i] @ book.centers[0, s, c]) + math.log(left) + raised
            terms.append((logit, book.values[0, s, c], spread_of(s, c)))
    lse = torch.tensor([a for a, _, _ in terms]).logsumexp(0)
    out = sum(math.exp(a - lse) * value for a, value, _ in terms)
    share = sum(part * math.exp(a - lse) for a, _, part in terms)
    return out + share / (1 + s_i) * scale * (q[i] @ slope), lse


@pytest.mark.parametrize("impl", IMPLS)
def test_the_formula_by_plain_loops(impl):
    q, k, v = tensors((10, 23), heads=1, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        book = scram.cluster(q, k, v, clusters=SMALL, causal=True)
        out, lse = scram.attend(q, k, v, None, tail=book, causal=True, impl=impl)
        flat = [x[0, 0].flatten(0, 1) for x in (q, k, v)]
        for i in (5, 64, 100, 127, 128, 200, 229):
            want, want_lse = plain_row(i, *flat, book, look_back((10, 23)), 8**-0.5)
            torch.testing.assert_close(out[0, 0].flatten(0, 1)[i], want)
            torch.testing.assert_close(lse[0, 0].flatten()[i], want_lse)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("impl", IMPLS)
def test_windows_beside_clusters_by_plain_loops(impl):
    """Keys of windows in earlier stretches one by one, each once, and no more by their clusters."""
    grid = (10, 23)
    q, k, v = tensors(grid, heads=1, dtype=torch.float64)
    index = torch.randint(-1, 230, (1, 1, *grid, 2), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    index[..., 1] = torch.where(torch.rand(grid, generator=torch.Generator().manual_seed(1)) < 0.5, index[..., 0], -1)
    matches = scram.Matches(index, torch.zeros(index.shape), grid)
    torch.set_default_dtype(torch.float64)
    try:
        book = scram.cluster(q, k, v, clusters=SMALL, causal=True)
        out, lse = scram.attend(q, k, v, matches, tail=book, causal=True, radius=(1, 2), impl=impl)
        flat = [x[0, 0].flatten(0, 1) for x in (q, k, v)]
        for i in (5, 70, 100, 128, 200, 221, 229):
            windows = {
                y * 23 + x
                for match in index.reshape(230, 2)[i].tolist()
                for y in range(match // 23 - 1, match // 23 + 2)
                for x in range(match % 23 - 2, match % 23 + 3)
                if match >= 0 and 0 <= y < 10 and 0 <= x < 23
            }
            want, want_lse = plain_row(i, *flat, book, look_back(grid), 8**-0.5, windows)
            torch.testing.assert_close(out[0, 0].flatten(0, 1)[i], want)
            torch.testing.assert_close(lse[0, 0].flatten()[i], want_lse)
    finally:
        torch.set_default_dtype(torch.float32)


# --- strictly causal ---

FILLS = {
    "random": lambda x: 3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x.dtype),
    "nan": lambda x: torch.full_like(x, torch.nan),
    "inf": lambda x: torch.full_like(x, torch.inf),
    "large": lambda x: torch.full_like(x, torch.finfo(x.dtype).max / 4),
}
PROBLEMS = {
    "rank 1": ((200,), 2, 1, None, torch.float32),
    "rank 2, mask": ((10, 20), 2, 2, "shared", torch.bfloat16),
    "rank 3, mask of heads": ((4, 5, 10), 4, 2, "heads", torch.float32),
}


@pytest.mark.parametrize("search", [None, scram.Search(matches=2, sweeps=2, seed=4)], ids=["", "a search"])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_later_matters_to_the_bit(impl, problem, fill, search):
    """Outputs, lse and gradients of the positions before p, whatever comes from p on; gradients there are 0."""
    grid, heads, key_heads, masked, dtype = PROBLEMS[problem]
    q, k, v = tensors(grid, heads, key_heads, dtype)
    chance = torch.Generator().manual_seed(1)
    mask = (
        None if masked is None else torch.rand(1, *([heads] if masked == "heads" else []), 200, generator=chance) < 0.8
    )

    def run(p, inputs, mask):
        inputs = [x.detach().requires_grad_() for x in inputs]
        key_mask = None if mask is None else mask.unflatten(-1, grid)
        out, lse = attend(*inputs, impl, key_mask=key_mask, search=search)
        first = out.flatten(2, -2)[:, :, :p], lse.flatten(2)[:, :, :p]
        factor = torch.linspace(-1, 1, first[0].numel()).reshape(first[0].shape)
        loss = (first[0].float() * factor).sum() + torch.where(first[1].isfinite(), first[1], 0).sum()
        return *first, *(x.flatten(2, -2) for x in torch.autograd.grad(loss, inputs))

    for p in (1, 70, 150):
        before = run(p, (q, k, v), mask)
        later = [x.flatten(2, -2).clone() for x in (q, k, v)]
        for x in later:
            x[:, :, p:] = FILLS[fill](x[:, :, p:])
        other = None
        if mask is not None:
            other = torch.cat([mask[..., :p], ~mask[..., p:]], -1)
        after = run(p, [x.unflatten(2, grid) for x in later], other)
        for one, two in zip(before, after, strict=True):
            assert torch.equal(one[:, :, :p], two[:, :, :p])
        assert all(bool((x[:, :, p:] == 0).all()) for x in after[2:])


@pytest.mark.parametrize("large", [1e9, 1e30, torch.inf])
@pytest.mark.parametrize("impl", IMPLS)
def test_large_keys_of_one_stretch_reach_no_clusters_of_another(impl, large):
    """Nor of another batch entry: keys without a label are read beside those that have one."""
    q, k, v = tensors((480,), heads=1, width=16, value_width=24, batch=2)
    changed = k.clone()
    changed[:, :, 83:] = large
    books = [scram.cluster(q, x, v, clusters=SMALL, causal=True, impl=impl) for x in (k, changed)]
    for name in ("centers", "values", "sizes", "label", "variance", "spreads", "slope"):
        one, two = (getattr(book, name)[:, 0] for book in books)
        assert torch.equal(one, two), name
    out = [attend(q, x, v, impl).out[:, :, :83] for x in (k, changed)]
    assert torch.equal(*out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_counts_as_finite(dtype):
    large = min(2.0**30, torch.finfo(dtype).max)
    x = torch.tensor([[1, -large], [1, torch.inf], [-torch.inf, 1], [torch.nan, 1]], dtype=dtype)
    assert fine_features(x).tolist() == fine_values(x).tolist() == [True, False, False, False]


def test_other_positions_do_matter():
    """The test above can fail: what comes before does change a position."""
    q, k, v = tensors((200,))
    out = attend(q, k, v, "numba").out
    for n in range(3):
        changed = [x.clone() for x in (q, k, v)]
        changed[n][:, :, :20] += 1
        assert not torch.equal(attend(*changed, "numba").out[:, :, 150:], out[:, :, 150:])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_key_that_is_not_finite_reaches_its_own_stretch_alone(impl):
    q, k, v = tensors((200,))
    k[:, :, 70] = torch.nan
    v[:, :, 140, 0] = torch.inf
    q[:, :, 30] = torch.nan
    out, lse = attend(q, k, v, impl)
    broken = torch.zeros(200, dtype=torch.bool)
    broken[30] = broken[70:128] = broken[140:192] = True
    assert torch.equal(out.isnan().all(-1)[0, 0], broken)
    assert torch.equal(out.isfinite().all(-1)[0, 0], ~broken)
    assert torch.equal(lse.isnan()[0, 0], broken)


# --- exactness, gradients, engines ---


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("score", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("search", [None, scram.Search(seed=0)], ids=["", "a search"])
def test_one_cluster_a_key_is_exact(impl, score, search):
    q, k, v = tensors((11, 18), 4, 2, torch.float64, batch=2)
    mask = torch.rand(2, 4, 11, 18, generator=torch.Generator().manual_seed(0)) < 0.8
    extra = tuple(x.flatten(2, 3)[:, :, :3] for x in (k, v))
    how = {"key_mask": mask, "score": score}
    every = scram.Clusters(count=64, keys=0, stretch=64, seed=0)
    made = attend(q, k, v, impl, every, search, extra=extra, **how)
    exact = scram.exact_attention(q, k, v, causal=True, **how)
    more = scram.exact_attention(q.flatten(2, 3), *extra, score=score)
    want = scram.merge(exact, scram.Attended(more.out.unflatten(2, (11, 18)), more.lse.unflatten(2, (11, 18))))
    torch.testing.assert_close(made.out, want.out)
    torch.testing.assert_close(made.lse, want.lse)


def test_a_grid_of_one_stretch_is_exact():
    q, k, v = tensors((64,), dtype=torch.float64)
    torch.testing.assert_close(attend(q, k, v, "numba").out, scram.exact_attention(q, k, v, causal=True).out)


@pytest.mark.parametrize("matches", [None, scram.Matches.identity((12, 16))], ids=["", "windows"])
def test_engines_agree_and_so_do_their_gradients(matches):
    if matches is not None:  # around the keys two lines up
        index = (matches.index - 32).clamp(min=-1).expand(1, 4, -1, -1, -1)
        matches = scram.Matches(index, torch.zeros(index.shape), (12, 16))
    q, k, v = tensors((12, 16), 4, 2, torch.float64)
    tail = scram.cluster(q, k, v, clusters=SMALL, causal=True).detach()
    grads = {}
    for impl in IMPLS:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = scram.attend(*inputs, matches, tail=tail, causal=True, impl=impl)
        (out.sin().sum() + lse.cos().sum()).backward()
        grads[impl] = [x.grad for x in inputs]
    for one, two in zip(*grads.values(), strict=True):
        assert relative_error(one, two) < 1e-9


def test_the_gradient():
    q, k, v = (x.requires_grad_() for x in tensors((96,), heads=1, dtype=torch.float64, width=3, value_width=2))
    tail = scram.Clusters(count=4, keys=20, stretch=64, seed=0)

    def run(q, k, v):
        return tuple(attend(q, k, v, "numba", tail))

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_dropout_is_right_on_the_mean(impl):
    q, k, v = tensors((100,), heads=1)
    tail = scram.Clusters(count=64, keys=0, stretch=64, seed=0)
    plain = attend(q, k, v, impl, tail)
    torch.manual_seed(0)
    many = [attend(q, k, v, impl, tail, dropout_p=0.5) for _ in range(200)]
    assert all(torch.equal(one.lse, plain.lse) for one in many)
    mean = torch.stack([one.out for one in many]).mean(0)
    assert not torch.equal(many[0].out, plain.out)
    assert relative_error(mean, plain.out) < 0.2


# --- values and settings ---


def test_the_codebook(tmp_path):
    q, k, v = tensors((14, 15), 4, 2)
    book = scram.cluster(q, k, v, clusters=SMALL, causal=True)
    assert book.stretches == complete_count(210, 64) == 3
    assert book.key_grid == (14, 15)
    assert book.centers.shape == (1, 2 * 3, 8, 8)
    assert book.label.shape == (1, 2 * 3, 64)
    assert "8 clusters of keys of every 64 positions on grid (14, 15), batch=1, heads=2" in repr(book)
    out = scram.attend(q, k, v, None, tail=book, causal=True).out
    assert torch.equal(out, attend(q, k, v, "auto").out)
    book.save(tmp_path / "book.safetensors")
    read = scram.Codebook.load(tmp_path / "book.safetensors")
    assert torch.equal(scram.attend(q, k, v, None, tail=read, causal=True).out, out)
    assert scram.cluster(*tensors((60,)), clusters=SMALL, causal=True).centers.shape == (1, 0, 8, 8)


def test_a_cluster_comes_from_its_own_stretch():
    q, k, v = tensors((200,))
    book = scram.cluster(q, k, v, clusters=SMALL, causal=True)
    second = [x[:, :, 64:128] for x in (q, k, v)]
    alone = scram.cluster(*second, clusters=scram.Clusters(count=8, keys=40, seed=3))
    assert torch.equal(book.label[0, 1], alone.label[0, 0])
    assert torch.equal(book.centers[0, 1], alone.centers[0, 0])


def test_the_default_under_causal_order():
    x = torch.zeros(1, 1, 128, 128, 64)
    told = scram.explain(x, x, x, causal=True)
    assert not told.dense
    assert told.search is None
    assert told.tail.count == CAUSAL_CLUSTERS["cpu"].count
    assert told.tail.stretch == default_stretch(128 * 128) <= 128 * 128 // 8
    assert told.scores < told.dense_scores / 2
    assert scram.explain(x, x, x, causal=True, search=scram.Search()).tail == told.tail


X = tensors((8, 16), 1, 1)[0]
BOOK = scram.cluster(X, X, X, clusters=SMALL, causal=True)
REFUSED = {
    "no order": (lambda: scram.attend(X, X, X, None, tail=BOOK), "made with causal order"),
    "order": (
        lambda: scram.attend(X, X, X, None, tail=scram.cluster(X, X, X, clusters=scram.Clusters(count=4)), causal=True),
        "made without causal order",
    ),
    "route": (lambda: scram.route(X, X, BOOK), "no clusters under causal order"),
    "warm": (lambda: scram.cluster(X, X, X, clusters=SMALL, causal=True, warm=BOOK), "warm clusters under causal"),
    "stretch": (lambda: scram.Clusters(stretch=100), "stretch must be a multiple of 64, got 100"),
    "stretch without order": (lambda: scram.attention(X, X, X, tail=SMALL), "stretch=64 cuts a causal order"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_refused(wrong):
    call, message = REFUSED[wrong]
    with pytest.raises(ValueError, match=message):
        call()
