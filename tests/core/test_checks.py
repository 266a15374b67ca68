"""Every user error: it names the argument, what was expected and what came. One row of the table per `raise`."""

import ast
import math
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import scram
from scram.core import checks
from scram.quality.plan import Rung, Setting

Q = torch.zeros(2, 4, 5, 6, 8)
K = torch.zeros(2, 2, 7, 3, 8)
V = torch.zeros(2, 2, 7, 3, 9)
MASK = torch.ones(2, 7, 3, dtype=torch.bool)
META = torch.device("meta")


def matches(shape=(2, 4, 5, 6), kappa=1, key_grid=(7, 3), device="cpu"):
    index = torch.zeros(*shape, kappa, dtype=torch.int32, device=device)
    return scram.Matches(index, torch.zeros(index.shape, device=device), key_grid)


def search(q=Q, k=K, **how):
    return lambda: scram.search(q, k, impl="reference", **how)


def attend(q=Q, k=K, v=V, found=None, **how):
    return lambda: scram.attend(q, k, v, matches() if found is None else found, impl="reference", **how)


def estimate(**how):
    return lambda: scram.estimate(Q, K, V, matches(), impl="reference", **{"method": scram.DrawnKeys(), **how})


def attention(**how):
    return lambda: scram.attention(Q, K, V, impl="reference", **how)


def lookup(coords):
    return lambda: scram.correlation(Q, K.repeat_interleave(2, 1), coords, 1, levels=1)


def maps(fmap1, fmap2=None):
    return lambda: scram.nn.CorrelationLookup(fmap1, fmap1 if fmap2 is None else fmap2)


def build(index=None, score=None, key_grid=(7, 3)):
    found = matches()
    return lambda: scram.Matches(
        found.index if index is None else index, found.score if score is None else score, key_grid
    )


def huge():
    wide = torch.zeros(1).expand(1, 1, 2**31, 1)
    return scram.search(Q[:1, :1, :1, 0, :1], wide, impl="reference")


def attended(q=Q, width=9):
    return scram.Attended(torch.zeros(*q.shape[:-1], width), torch.zeros(q.shape[:-1]))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch: its nested tensors are a prototype
    NESTED = torch.nested.nested_tensor([torch.zeros(4, n, n, 8) for n in (5, 6)])  # has no shape
PAIR = (torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 9))

TOKENS = torch.randn(1, 2, 64, 8)


def sdpa(**change):
    """A call of `scaled_dot_product_attention` on 8 x 8 points, but for what changes."""
    given = {"query": TOKENS, "key": TOKENS, "value": TOKENS, "grid": (8, 8), **change}
    return lambda: scram.scaled_dot_product_attention(**given)


ERRORS = [
    # torch's own signature.
    (sdpa(query=None), TypeError, "query must be a torch.Tensor"),
    (sdpa(query=[[1.0]]), TypeError, r"query must be a torch.Tensor \[B, H, N, E\], got list"),
    (sdpa(query=TOKENS.to_sparse()), TypeError, "query must be a dense tensor, got layout torch.sparse_coo"),
    (
        sdpa(query=torch.nested.as_nested_tensor([TOKENS[0]], layout=torch.jagged)),
        TypeError,
        "query must be a dense tensor, got a nested one; pad it .*attn_mask",
    ),
    (sdpa(key=TOKENS[0, 0, 0]), ValueError, r"key must be \[B, H, N, E\] or \[B, N, E\], got \(8,\)"),
    (sdpa(value=TOKENS.int()), TypeError, "value must be floating point, got torch.int32"),
    (sdpa(attn_mask="causal"), TypeError, "attn_mask must be a torch.Tensor"),
    (sdpa(attn_mask=torch.ones(64)), ValueError, r"attn_mask must broadcast to .* = \(1, 2, 64, 64\), got \(64,\)"),
    (sdpa(attn_mask=torch.ones(3, 3) > 0), ValueError, "attn_mask must broadcast to "),
    (sdpa(attn_mask=torch.ones(64, 64).int()), TypeError, "attn_mask must be bool or floating point"),
    (sdpa(dropout_p="x"), TypeError, "dropout_p must be a float"),
    (sdpa(dropout_p=10**30), ValueError, r"dropout_p must be in \[0, 1\]"),
    (sdpa(dropout_p=10**400), ValueError, "dropout_p must fit a float"),
    (sdpa(is_causal=1), TypeError, "is_causal must be True or False"),
    (sdpa(enable_gqa="x"), TypeError, "enable_gqa must be True or False"),
    (sdpa(scale=torch.ones(2)), TypeError, "scale must be a float, got Tensor"),
    (sdpa(scale=math.nan), ValueError, "scale must be finite, got nan"),
    (sdpa(scale=10**400), ValueError, "scale must fit a float"),
    # Settings.
    (lambda: scram.trust(Q[:0], K[:0], V[:0]), ValueError, "q must hold at least one query, got"),
    (lambda: scram.tune(Q[:0], K[:0], V[:0]), ValueError, "q must hold at least one query, got"),
    (lambda: scram.tune(Q, K, V, error=-1), ValueError, r"error must be in \[0, inf\), got -1; 0.05 is 5 %"),
    (lambda: scram.trust(Q / 0, K, V), ValueError, "q must be finite, .* values are NaN or infinite"),
    (lambda: scram.patch_sdpa(grid=8), ValueError, "grid must be a sequence of 1 to 4 extents"),
    (lambda: scram.Search(matches=1.5), TypeError, "matches must be an int, got float 1.5"),
    (lambda: scram.Search(sweeps=2**31), ValueError, r"sweeps must be below 2\*\*31, got 2147483648"),
    (lambda: scram.Search(matches=torch.tensor(3)), TypeError, "matches must be an int, got Tensor"),
    (search(search=scram.Search(matches=10**9)), ValueError, "matches must be at most the number of keys, 21, got 10"),
    (
        lambda: scram.Snis(alpha=np.float32(0.5)),
        TypeError,
        r"alpha must be a float, got float32.*; use float\(alpha\)",
    ),
    (search(search=scram.Search(reach=(1, 2, 3))), ValueError, r"reach must be .* per grid axis \(2\), got 3 values"),
    (lambda: scram.Search(matches=0), ValueError, "matches must be at least 1, got 0"),
    (lambda: scram.Search(propagate="up"), ValueError, "propagate must be one of 'shift', .* got 'up'"),
    (lambda: scram.Search(propagate=3), ValueError, "propagate must be one of .* got 3"),
    (lambda: scram.Search(seed=torch.zeros(2).long()), TypeError, r"seed as a tensor must be 0-d int64, .* \(2,\)"),
    (lambda: scram.Search(seed="7"), TypeError, "seed must be None, an int or a 0-d int64 tensor, got str '7'"),
    (lambda: scram.Search(seed=2**64), ValueError, "seed must fit a signed 64-bit integer, got 18446744073709551616"),
    (lambda: scram.Search(jumps=4), TypeError, "jumps must be a sequence of ints .* got 4"),
    (search(search="paper"), ValueError, r"search must be one of 'auto', got 'paper'; or pass scram\.Search"),
    (search(search=3), TypeError, r"search must be a scram\.Search, got int; for example"),
    # Queries and keys.
    (search(q=[1.0]), TypeError, r"q must be a torch.Tensor \[B, H, \*G, E\], got list; use torch.as_tensor"),
    (search(k=None), TypeError, r"k must be a torch.Tensor \[B, Hk, \*G', E\], got NoneType"),
    (search(q=Q.to_sparse()), TypeError, "q must be a dense tensor, got layout torch.sparse_coo; call .to_dense"),
    (search(q=NESTED), TypeError, "q must be a dense tensor, got a nested one; pad it"),
    (lambda: scram.attention(NESTED, NESTED, NESTED), TypeError, "q must be a dense tensor, got a nested one; pad it"),
    (lambda: scram.attention(Q, K, NESTED), TypeError, "v must be a dense tensor, got a nested one; pad it"),
    (search(q=Q[0, 0, 0]), ValueError, r"q must be \[B, H, \*G, E\] with a grid of rank 1 to 4, got 2 axes \(6, 8\)"),
    (search(q=torch.zeros(1, 1, 1, 1, 1, 1, 1, 1)), ValueError, "rank 1 to 4, got 8 axes"),
    (search(k=K[:, :, 0]), ValueError, r"k must have as many axes as q \(5\), got 4 axes \(2, 2, 3, 8\)"),
    (search(k=K[:1]), ValueError, "k must have the batch size of q, 2, got 1"),
    (search(k=torch.zeros(2, 3, 7, 3, 8)), ValueError, "key heads must divide the query heads, got q with 4 .* with 3"),
    (search(k=K[:, :0]), ValueError, "key heads must divide the query heads, got q with 4 and k with 0 heads"),
    (search(k=K[..., :5]), ValueError, r"q and k must share their last axis \(width >= 1\), got 8 and 5"),
    (search(q=Q[..., :0], k=K[..., :0]), ValueError, "share their last axis .* got 0 and 0"),
    (search(k=K[:, :, :0]), ValueError, r"grid extents must be at least 1, got q \(5, 6\) and k \(0, 3\)"),
    (huge, ValueError, r"a grid must have fewer than 2\*\*31 points"),
    (search(k=K.to(META)), ValueError, r"k must be on q's device cpu, got meta; use k.to\(q.device\)"),
    (search(k=K.double()), TypeError, "k must have q's dtype torch.float32, got torch.float64; use k.to"),
    (search(q=Q.int(), k=K.int()), TypeError, "q must be float16, .* or float64, got torch.int32; use q.float"),
    # What a search takes.
    (search(causal=1), TypeError, "causal must be True or False, got int 1"),
    (search(causal=True), ValueError, r"causal needs equal grids, got queries \(5, 6\) and keys \(7, 3\)"),
    (search(key_mask=[True]), TypeError, r"key_mask must be a torch.Tensor \[B, \*G'\], got list"),
    (search(key_mask=MASK.byte()), TypeError, r"got torch.uint8; use key_mask.bool\(\)"),
    (search(key_mask=MASK.float()), TypeError, "key_mask must be bool .* got torch.float32; a float mask is a bias"),
    (search(key_mask=MASK[:, 0]), ValueError, r"key_mask must be \[B, \*G'\] = \(2, 7, 3\) or .*got \(2, 3\)"),
    (search(key_mask=MASK[0]), ValueError, r"got \(7, 3\); add the batch axis"),
    (search(key_mask=MASK[:, None]), ValueError, r"or \[B, H, \*G'\] = \(2, 4, 7, 3\), got \(2, 1, 7, 3\)"),
    (search(key_mask=MASK.to(META)), ValueError, "key_mask must be on q's device cpu, got meta"),
    (
        search(score="euclid"),
        ValueError,
        "score must be one of 'dot', 'cosine', 'l2', got 'euclid'; or pass a callable",
    ),
    (search(score=lambda a, b: a), ValueError, r"score callable must return a tensor of shape .* got \(240, 8\)"),
    (search(warm=torch.zeros(3)), TypeError, "warm must be a scram.Matches, got Tensor; scram.search returns one"),
    (search(warm=matches((2, 4, 6, 5))), ValueError, r"warm must have one .* = \(2, 4, 5, 6\), got \(2, 4, 6, 5\)"),
    (search(warm=matches(key_grid=(3, 7))), ValueError, r"warm was made for key grid \(3, 7\), but k has \(7, 3\)"),
    (search(warm=matches(device=META)), ValueError, "warm must be on q's device cpu, got meta; use warm.to"),
    # What attending takes.
    (attend(v=3), TypeError, r"v must be a torch.Tensor \[B, Hk, \*G', F\], got int"),
    (
        attend(v=V[:, :1]),
        ValueError,
        r"v must be \[B, Hk, \*G', F\] = \(2, 2, 7, 3, .*\) like k, got \(2, 1, 7, 3, 9\)",
    ),
    (attend(v=V[..., :0]), ValueError, r"F >= 1.* got \(2, 2, 7, 3, 0\)"),
    (attend(v=V.half()), TypeError, "v must have q's dtype torch.float32, got torch.float16"),
    (
        attend(q=Q.half(), k=K.half(), v=V.double()),
        TypeError,
        r"v must have q's dtype torch.float16 or float32, got torch.float64; use v.to\(q.dtype\)",
    ),
    (attend(found=(1, 2)), TypeError, "matches must be a scram.Matches, got tuple"),
    (attend(found=matches((2, 1, 5, 6))), ValueError, r"matches must have one entry per query, .*got \(2, 1, 5, 6\)"),
    (attend(scale="1"), TypeError, "scale must be a float, got str '1'"),
    (attend(scale=True), TypeError, "scale must be a float, got bool True"),
    (attend(scale=0.0), ValueError, "scale must be positive and finite, got 0.0"),
    (attend(scale=-1), ValueError, "scale must be positive and finite, got -1; to seek low scores negate q"),
    (attend(scale=float("nan")), ValueError, "scale must be positive and finite, got nan"),
    (attend(scale=float("inf")), ValueError, "scale must be positive and finite, got inf"),
    (attend(weight="max"), ValueError, "weight must be one of 'softmax', 'mean', 'relu', got 'max'"),
    (attend(radius=(1, 1, 1)), ValueError, r"radius must be an int or one int per grid axis \(2\), got 3 values"),
    (attend(radius=-1), ValueError, "radius must be at least 0, got -1, or one int per grid axis"),
    (attend(radius=(1, -2)), ValueError, r"radius\[1\] must be at least 0, got -2"),
    (attend(radius=0.5), TypeError, "radius must be an int, got float 0.5"),
    (attention(extra_mask=torch.ones(2, 3) > 0), ValueError, "extra_mask masks extra keys, and there are none"),
    (attention(extra=PAIR, extra_mask=torch.ones(2, 4) > 0), ValueError, r"extra_mask must be \[B, X\] = \(2, 3\)"),
    (attention(extra=PAIR, extra_mask=torch.ones(2, 3)), TypeError, "extra_mask must be bool"),
    (attention(extra=PAIR, extra_mask=torch.ones(2, 3) > 0, weight="relu"), ValueError, "needs weight='softmax'"),
    (
        attention(extra=PAIR, extra_mask=torch.ones(2, 3, dtype=torch.bool, device="meta")),
        ValueError,
        "extra_mask must be on the device of q",
    ),
    (attend(extra=PAIR[0]), TypeError, r"extra must be a pair \(k_extra, v_extra\), got Tensor"),
    (attend(extra=(PAIR[0],)), TypeError, "extra must be a pair .* got tuple"),
    (attend(extra=(PAIR[0], None)), TypeError, "v_extra must be a torch.Tensor .* got NoneType"),
    (attend(extra=PAIR[::-1]), ValueError, r"k_extra must be \[B, Hk, X, width\] = \(2, 2, X, 8\), got \(2, 2, 3, 9\)"),
    (attend(extra=(PAIR[0], PAIR[1][:, :1])), ValueError, r"v_extra must be .* = \(2, 2, X, 9\), got \(2, 1, 3, 9\)"),
    (
        attend(extra=(PAIR[0].half(), PAIR[1])),
        TypeError,
        "k_extra must have q's dtype torch.float32, got torch.float16",
    ),
    (attend(extra=(PAIR[0], PAIR[1][:, :, :2])), ValueError, "k_extra and v_extra must hold as many keys, got 3 and 2"),
    (attend(dropout_p="0"), TypeError, "dropout_p must be a float, got str '0'"),
    (attend(dropout_p=1.0), ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    (attend(dropout_p=-0.1), ValueError, r"dropout_p must be in \[0, 1\), got -0.1"),
    # What a correlation lookup takes.
    (
        lookup(torch.zeros(2, 4, 5, 6, 2, dtype=torch.int32)),
        TypeError,
        "coords must be float32 or float64, got torch.i",
    ),
    (lookup(torch.zeros(2, 4, 5, 6, 2).half()), TypeError, "coords must be float32 .* 16 bits cannot hold places"),
    (lookup(torch.zeros(2, 4, 5, 6, 3)), ValueError, r"coords must be \[B, H, \*G, rank\] = \(2, 4, 5, 6, 2\), got"),
    (lookup(torch.zeros(2, 4, 5, 6, 2, device=META)), ValueError, "coords must be on q's device cpu, got meta"),
    (maps(torch.zeros(2, 3, 4)), ValueError, r"fmap1 must be \[B, E, h, w\] with E, h, w >= 1, got \(2, 3, 4\)"),
    (maps(torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 4, 5)), ValueError, r"fmap2 must have fmap1's B, E = \(2, 3\)"),
    (maps(torch.zeros(2, 3, 4, 5, dtype=torch.int64)), TypeError, "fmap1 must be float16, bfloat16, float32 or"),
    # What estimating takes.
    (lambda: scram.Snis(samples=0), ValueError, "samples must be at least 1, got 0"),
    (lambda: scram.DrawnKeys(samples=2**31), ValueError, r"samples must be below 2\*\*31, got 2147483648"),
    (lambda: scram.Snis(alpha="0"), TypeError, "alpha must be a float, got str '0'"),
    (lambda: scram.Snis(alpha=1.0), ValueError, r"alpha must be in \[0, 1\), got 1.0; leave some uniform draws"),
    (lambda: scram.Snis(alpha=float("nan")), ValueError, r"alpha must be in \[0, 1\), got nan"),
    (lambda: scram.Snis(bandwidth=0), ValueError, r"bandwidth must be in \(0, inf\), got 0"),
    (lambda: scram.MetropolisHastings(bandwidth=math.inf), ValueError, r"bandwidth must be in \(0, inf\), got inf"),
    (lambda: scram.MetropolisHastings(chains_per_mode=0), ValueError, "chains_per_mode must be at least 1, got 0"),
    (lambda: scram.MetropolisHastings(burn_in=-1), ValueError, "burn_in must be at least 0, got -1"),
    (lambda: scram.DrawnKeys(stratified=1), TypeError, "stratified must be True or False, got int 1"),
    (lambda: scram.DrawnKeys(seed=1.5), TypeError, "seed must be None, an int or a 0-d int64 tensor, got float 1.5"),
    (
        search(K, search=scram.Search("tile"), causal=True),
        ValueError,
        r"method must be 'query' or 'auto' under causal order, got 'tile': .* pass search=.*method='query'",
    ),
    (estimate(method="hybrid"), TypeError, r"method must be one of scram\.Clusters, .* got str; for example scram"),
    (attention(tail=scram.Clusters(), weight="mean"), ValueError, r"clusters of keys need weight='softmax'"),
    (
        attention(tail=scram.DrawnKeys(), weight="mean"),
        ValueError,
        r"DrawnKeys needs weight='softmax', got 'mean'; use tail=",
    ),
    (
        attend(tail=scram.DrawnKeys(), weight="relu"),
        ValueError,
        r"DrawnKeys needs weight='softmax', got 'relu'; use tail=",
    ),
    (attention(tail=512), TypeError, r"tail must be None, 'auto' or one of .* got int 512"),
    (
        estimate(method=scram.MetropolisHastings(), extra=PAIR),
        ValueError,
        "extra must be None with Metropolis.* no normal",
    ),
    (estimate(radius=-1), ValueError, "radius must be at least 0, got -1"),
    # A Matches value.
    (build(index=[0]), TypeError, r"index must be a torch.Tensor \[B, H, \*G, kappa\], got list"),
    (build(index=matches().index.long()), TypeError, "index must be int32, got torch.int64; use index.to"),
    (build(score=matches().score.half()), TypeError, "score must be float32, got torch.float16; use score.float"),
    (build(score=torch.zeros(3)), ValueError, r"index and score must share shape and device, got .* and \(3,\) on cpu"),
    (build(key_grid=21), ValueError, "key_grid must be a sequence of 1 to 4 extents, got 21"),
    (build(key_grid="73"), ValueError, "key_grid must be a sequence of 1 to 4 extents, got '73'"),
    (build(key_grid=()), ValueError, r"key_grid must be a sequence of 1 to 4 extents, got \(\)"),
    (build(key_grid=(7, 0)), ValueError, r"key_grid\[1\] must be at least 1, got 0"),
    (build(key_grid=(7, 3.5)), TypeError, r"key_grid\[1\] must be an int, got float 3.5"),
    (
        build(key_grid=(21,)),
        ValueError,
        r"index must be \[B, H, \*G, kappa\] with 1 grid axes .* got \(2, 4, 5, 6, 1\)",
    ),
    (build(key_grid=(2**16, 2**16)), ValueError, r"key_grid must have fewer than 2\*\*31 points, got \(65536, 65536\)"),
    (lambda: matches(kappa=0), ValueError, r"at least one match per query, kappa >= 1, got \(2, 4, 5, 6, 0\)"),
    # Plans.
    (attend(scale=10**400), ValueError, "scale must fit a float, got an int of 1329 bits"),
    (lambda: Rung(Setting(), 1, output_error=-0.5), ValueError, "output_error must not be negative, got -0.5"),
    (lambda: checks.share("split", 1.5), ValueError, r"split must be in \[0, 1\], got 1.5"),
    (lambda: Setting(radius=()), ValueError, r"radius must be an int or have 1 to 4 values.* got \(\)"),
    # The truth and the measures.
    (lambda: scram.exact_search(Q, K, matches=0), ValueError, "matches must be at least 1, got 0"),
    (lambda: scram.exact_search(Q, K, queries=[0]), TypeError, r"queries must be a torch.Tensor \[n\], got list"),
    (
        lambda: scram.exact_search(Q, K, queries=torch.zeros(2)),
        TypeError,
        r"queries must be int64 \[n\], got .*float32",
    ),
    (lambda: scram.exact_search(Q, K, queries=torch.tensor([30])), ValueError, r"queries must lie in 0\.\.29"),
    (lambda: scram.exact_search(Q, K, queries=torch.tensor([-1])), ValueError, r"queries must lie in 0\.\.29"),
    (lambda: scram.measure.recall(Q, K, matches(), num_queries=0), ValueError, "num_queries must be at least 1, got 0"),
    (lambda: scram.measure.captured_mass(Q, K, Q), TypeError, r"attended must be a scram.Attended .* got Tensor"),
    (
        lambda: scram.measure.captured_mass(Q, K, attended(Q[:1])),
        ValueError,
        r"attended.lse must be \[B, H, \*G\] = \(2, 4, 5, 6\), got \(1, 4, 5, 6\)",
    ),
    (
        lambda: scram.measure.output_error(Q, K, V, attended(width=8)),
        ValueError,
        r"attended.out must be \[B, H, \*G, F\] = \(2, 4, 5, 6, 9\), got \(2, 4, 5, 6, 8\)",
    ),
    (lambda: scram.attention(Q, K, V, raduis=1), TypeError, r"attention\(\) has no argument raduis; use radius="),
    (lambda: scram.merge(attended(), 3), TypeError, r"b must be a scram.Attended \(out, lse\), got int"),
    (lambda: scram.merge(attended(), attended(width=8)), ValueError, r"same queries, got out .* and \(2, 4, 5, 6, 8\)"),
    (
        lambda: scram.merge(attended(), attended(Q.double())._replace(out=attended().out.double())),
        ValueError,
        "merge needs results of one dtype and device, got torch.float32 on cpu and torch.float64 on cpu",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[message[:50] for *_, message in ERRORS])
def test_message(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_every_check_is_in_the_table():
    source = Path(checks.__file__)
    # A bare `raise` hands on what another function raised.
    nodes = ast.walk(ast.parse(source.read_text()))
    raises = {node.lineno: node for node in nodes if isinstance(node, ast.Raise) and node.exc}
    reached = set()
    for call, *_ in ERRORS:
        try:
            call()
        except (ValueError, TypeError):
            lines = [frame.lineno for frame in traceback.extract_tb(sys.exc_info()[2]) if frame.filename == str(source)]
            # Values that check themselves raise in their own modules.
            reached |= {line for line, node in raises.items() if lines and line <= lines[-1] <= node.end_lineno}
    assert sorted(set(raises) - reached) == []


def test_integers_of_numpy_are_ints():
    three = np.int64(3)
    made = scram.Search(matches=three, separation=three, sweeps=three, gossip=three, jumps=(three,), seed=three)
    assert made == scram.Search(matches=3, separation=3, sweeps=3, gossip=3, jumps=(3,), seed=3)
    assert made.seed_tensor == 3
    settings = (made, scram.MetropolisHastings(three, three, burn_in=three), scram.DrawnKeys(three), scram.Snis(three))
    for one in settings:
        assert type(one.matches if one is made else one.samples) is int
    assert checks.radius(three, 2) == checks.radius((three, three), 2) == (3, 3)
    assert type(checks.grid((three,))[0]) is int
    assert scram.exact_search(Q, K, matches=three).index.shape[-1] == 3
    assert torch.equal(scram.measure.sample_queries(Q, 5, three), scram.measure.sample_queries(Q, 5, 3))
    assert scram.Search(matches=2, separation=10**30).separation == 2**31
    assert (scram.search(Q, K, search=scram.Search(matches=2, separation=10**30)).index[..., 1] == -1).all()
    with pytest.raises(TypeError, match="matches must be an int"):
        scram.Search(matches=np.bool_(True))


def test_more_matches_than_keys_are_none():
    for call in (scram.search(Q, K, search=scram.Search(matches=30)), scram.exact_search(Q, K, matches=30)):
        assert (call.index[..., :21] >= 0).all()
        assert (call.index[..., 21:] == -1).all()
    with pytest.raises(ValueError, match="at most the number of keys, 21"):
        scram.exact_search(Q, K, matches=10**9)


HUGE = {
    "keys": lambda x, huge: replace(scram.cluster(x, x, x, impl="reference"), keys=huge),
    "separation": lambda x, huge: scram.exact_search(x, x, separation=huge),
    "radius": lambda x, huge: scram.correlation(x, x, torch.zeros(1, 1, 4, 4, 2), radius=huge),
    "samples": lambda x, huge: scram.DrawnKeys(huge),
}


@pytest.mark.parametrize("name", HUGE)
def test_whole_numbers_that_no_engine_takes_are_named(name):
    with pytest.raises(ValueError, match=rf"{name} must be below 2\*\*31, got 1000"):
        HUGE[name](torch.ones(1, 1, 4, 4, 8), 10**30)
