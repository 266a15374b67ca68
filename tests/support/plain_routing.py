"""Routed clusters and the clustered tail in plain Python: loops and floats, from SPEC and the docstrings alone.

Tensors are read into nested lists first. A row of the clusters is (batch, head of the clusters).
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import torch

from scram.core.calls import AttendCall, ClusterCall, ClusterTailCall, RouteCall, RoutedStartCall
from scram.spec.routing import EVEN, MOST_RAISED, MOST_SPREAD
from support.plain import around, flat, noise, points

TILE = {1: (64,), 2: (8, 8), 3: (4, 4, 4), 4: (2, 2, 4, 4)}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def finite(numbers):
    return all(map(math.isfinite, numbers))


def source(head, heads, fewer):
    """Which of fewer heads serves a head."""
    return head // (heads // fewer)


def table(x, batch, head):
    """The vectors of one head: [B, H, *G, E] -> [N][E]."""
    return x[batch, head].double().reshape(-1, x.shape[-1]).tolist()


# --- tiles and bits ---


@cache
def tiles(grid):
    """The queries of every tile of a grid, ascending."""
    side = TILE[len(grid)]
    across = [math.ceil(extent / s) for extent, s in zip(grid, side, strict=True)]
    mine = [[] for _ in range(math.prod(across))]
    for query, place in enumerate(points(tuple(grid))):
        mine[flat([c // s for c, s in zip(place, side, strict=True)], across)].append(query)
    return [tuple(one) for one in mine]


def tile_of(grid, query):
    return next(number for number, mine in enumerate(tiles(grid)) if query in mine)


def words(chosen, count):
    """The clusters of a tile as signed numbers of 32 bits."""
    made = []
    for first in range(0, count, 32):
        word = sum(1 << (c - first) for c in chosen if first <= c < first + 32)
        made.append(word - (1 << 32) if word >= 1 << 31 else word)
    return made


def clusters_in(row_of_words):
    """The inverse of `words`."""
    return {32 * w + bit for w, word in enumerate(row_of_words) for bit in range(32) if (word >> bit) & 1}


# --- which clusters a tile routes ---


def importances(call: RouteCall, batch, head, tile):
    """Of a key of every cluster to a tile of queries."""
    own = source(head, call.q.shape[1], call.sizes.shape[1])
    centers, sizes = table(call.centers, batch, own), call.sizes[batch, own].tolist()
    variance, spreads = call.variance[batch, own].tolist(), call.spreads[batch, own].tolist()
    every = table(call.q, batch, head)
    queries = [every[i] for i in tile if finite(every[i])]
    number = max(len(queries), 1)
    squares = [0.0] * len(sizes)
    for q in queries:
        logits = [call.scale * dot(q, k) + math.log(n) if n else -math.inf for k, n in zip(centers, sizes, strict=True)]
        top = max(logits)
        if top == -math.inf:
            continue
        total = sum(math.exp(x - top) for x in logits)
        squares = [old + (math.exp(x - top) / total) ** 2 for old, x in zip(squares, logits, strict=True)]
    mean = [sum(q[e] for q in queries) / number for e in range(call.q.shape[-1])]
    s = call.scale**2 * sum(u * u * x for u, x in zip(mean, variance, strict=True))
    return [
        math.sqrt(square / number) * (math.exp(min(s * spread, MOST_SPREAD)) - 1 + EVEN) / size if size else 0.0
        for square, spread, size in zip(squares, spreads, sizes, strict=True)
    ]


def cluster_lse(call: RouteCall, batch, head, query):
    """Log of the sum of exp over all clusters, sizes counted; -inf for a query that is not finite."""
    own = source(head, call.q.shape[1], call.sizes.shape[1])
    q = table(call.q, batch, head)[query]
    if not finite(q):
        return -math.inf
    pairs = zip(table(call.centers, batch, own), call.sizes[batch, own].tolist(), strict=True)
    logits = [call.scale * dot(q, center) + math.log(size) for center, size in pairs if size]
    top = max(logits, default=-math.inf)
    return top + math.log(sum(math.exp(x - top) for x in logits)) if logits else -math.inf


def chosen(importance, sizes, keys):
    """The clusters within the budget, most important first; one that does not fit is passed over."""
    taken = []
    for c in sorted(range(len(sizes)), key=lambda c: (-importance[c], c)):
        if importance[c] > 0 and 0 < sizes[c] <= keys:
            taken.append(c)
            keys -= sizes[c]
    return taken


def routes(call: RouteCall):
    """The clusters of every tile: {(batch, head, tile): clusters in the order they were taken}."""
    made = {}
    for batch, head in itertools.product(*map(range, call.q.shape[:2])):
        sizes = call.sizes[batch, source(head, call.q.shape[1], call.sizes.shape[1])].tolist()
        for number, tile in enumerate(tiles(call.q.shape[2:-1])):
            made[batch, head, number] = chosen(importances(call, batch, head, tile), sizes, call.keys)
    return made


def drawn_routes(sizes, heads, grid, keys, generator):
    """Any clusters within the budget: int32 [B, H, T, W], for clusters of sizes [B, Hc, C] and queries on a grid."""
    batch, cluster_heads, count = sizes.shape
    made = []
    for b, head in itertools.product(range(batch), range(heads)):
        own = sizes[b, source(head, heads, cluster_heads)].tolist()
        for _ in tiles(grid):
            made.append(words(chosen(torch.rand(count, generator=generator).tolist(), own, keys), count))
    return torch.tensor(made, dtype=torch.int32).reshape(batch, heads, len(tiles(grid)), -(-count // 32))


def best_routed(call: RoutedStartCall, batch, head, query):
    """The key of highest score that the query's tile routes, the lower one of two, and its score."""
    heads = call.q.shape[1]
    own = source(head, heads, call.sizes.shape[1])
    order, sizes = call.order[batch, own].tolist(), call.sizes[batch, own].tolist()
    routed = clusters_in(call.routes[batch, head, tile_of(call.q.shape[2:-1], query)].tolist())
    k = table(call.k, batch, source(head, heads, call.k.shape[1]))
    q = table(call.q, batch, head)[query]
    best, best_score, first = -1, -math.inf, 0
    for c, size in enumerate(sizes):
        for j in order[first : first + size]:
            score = dot(q, k[j])
            if c in routed and (score > best_score or (score == best_score > -math.inf and j < best)):
                best, best_score = j, score
        first += size
    return best, best_score


# --- what clusters keep of their keys ---


def means(k, v, label, count):
    """Mean key, mean value and number of keys of every label, of keys [M][E] and values [M][F]."""
    mine = [[j for j, name in enumerate(label) if name == c] for c in range(count)]
    centers, values = (
        [[sum(x[j][e] for j in keys) / max(len(keys), 1) for e in range(len(x[0]))] for keys in mine] for x in (k, v)
    )
    return centers, values, [len(keys) for keys in mine]


def moments(k, v, label, count, metric):
    """Slope [E][F], variance [E] and spreads [C] of keys around the means of their labels."""
    centers, values, sizes = means(k, v, label, count)
    labeled = [j for j, name in enumerate(label) if name >= 0]
    number = max(len(labeled), 1)
    apart_k = {j: [x - c for x, c in zip(k[j], centers[label[j]], strict=True)] for j in labeled}
    apart_v = {j: [x - c for x, c in zip(v[j], values[label[j]], strict=True)] for j in labeled}
    axes, parts = range(len(k[0])), range(len(v[0]))
    slope = [[sum(apart_k[j][e] * apart_v[j][f] for j in labeled) / number for f in parts] for e in axes]
    variance = [sum(apart_k[j][e] ** 2 for j in labeled) / number for e in axes]
    squares = {j: sum(metric[e] * apart_k[j][e] ** 2 for e in axes) for j in labeled}
    mean = sum(squares.values()) / number
    spreads = [0.0] * count
    for j in labeled:
        spreads[label[j]] += squares[j] / sizes[label[j]] / mean if mean > 0 else 0.0
    return slope, variance, spreads


def metric(call: ClusterCall, batch, head, usable):
    """What a squared distance counts on each axis of the keys: the mean of the squares of the weighed queries.

    Of calls with so few queries and keys that the sample is all of them. Places of keys that are not usable repeat the
    usable ones.
    """
    group = call.q.shape[1] // call.k.shape[1]
    every = [q for h in range(head * group, (head + 1) * group) for q in table(call.q, batch, h)]
    queries = [[call.scale * x for x in q] if finite(q) else [0.0] * len(q) for q in every]
    k = table(call.k, batch, head)
    sample = [k[usable[part * len(usable) // len(k)]] for part in range(len(k))]
    axes = range(len(k[0]))
    center = [sum(x[e] for x in sample) / len(sample) for e in axes]
    centered = [[x[e] - center[e] for e in axes] for x in sample]
    total = [0.0 for _ in axes]
    for q in queries:
        s = sum(dot(q, x) ** 2 for x in centered) / len(sample)
        total = [old + x**2 / (1 + s) for old, x in zip(total, q, strict=True)]
    return [x / len(queries) for x in total]


# --- the tail ---


def window_keys(call: AttendCall | ClusterTailCall, key_grid, batch, head, query):
    """The keys in the windows of a query, allowed or not."""
    if call.index is None:
        return set()
    matches = call.index[batch, head].flatten(0, -2)[query].tolist()
    on_grid = [j for j in matches if 0 <= j < math.prod(key_grid)]
    return set().union(*(around(tuple(key_grid), j, tuple(call.radius)) for j in on_grid))


def routed_clusters(call: AttendCall | ClusterTailCall, batch, head, query):
    if call.routes is None:
        return set()
    return clusters_in(call.routes[batch, head, tile_of(call.q.shape[2:-1], query)].tolist())


def left(call: ClusterTailCall, batch, head, query):
    """How many keys each cluster stands for: none where it is routed, else its size less its keys in the windows."""
    own = source(head, call.q.shape[1], call.label.shape[1])
    label, number = call.label[batch, own].flatten().tolist(), call.sizes[batch, own].tolist()
    for j in window_keys(call, call.label.shape[2:], batch, head, query):
        if 0 <= label[j] < len(number):
            number[label[j]] -= 1
    routed = routed_clusters(call, batch, head, query)
    return [0 if c in routed else max(n, 0) for c, n in enumerate(number)]


def near(call: AttendCall, batch, head, query):
    """out and lse of a query over its windows, without routed keys, and the extra keys; the dot product, no dropout."""
    heads, key_grid = call.q.shape[1], call.k.shape[2:-1]
    own = source(head, heads, call.k.shape[1])
    q = table(call.q, batch, head)[query]
    keys = window_keys(call, key_grid, batch, head, query)
    if call.key_mask is not None:
        mask = call.key_mask[batch] if call.key_mask.ndim == call.k.ndim - 2 else call.key_mask[batch, head]
        keys = {j for j in keys if mask.flatten()[j]}
    if call.routes is not None:
        label = call.label[batch, source(head, heads, call.label.shape[1])].flatten().tolist()
        keys -= {j for j in keys if label[j] in routed_clusters(call, batch, head, query)}
    k, v = table(call.k, batch, own), table(call.v, batch, own)
    terms = [(call.scale * dot(q, k[j]), v[j]) for j in sorted(keys)]
    if call.k_extra is not None:
        extra = zip(table(call.k_extra, batch, own), table(call.v_extra, batch, own), strict=True)
        terms += [(call.scale * dot(q, x), value) for x, value in extra]
    return mixed([(a, a_value, 1.0) for a, a_value in terms], call.v.shape[-1])


def mixed(terms, width):
    """out and lse of (logit, value, what dropout makes of the weight 1): a softmax over the logits."""
    terms = [(a, value, kept) for a, value, kept in terms if a != -math.inf]
    if not terms:
        return [0.0] * width, -math.inf
    if any(math.isnan(a) for a, _, _ in terms):
        return [math.nan] * width, math.nan
    top = max(a for a, _, _ in terms)
    total = sum(math.exp(a - top) for a, _, _ in terms)
    weights = [math.exp(a - top) / total * kept for a, _, kept in terms]
    out = [sum(w * value[f] for w, (_, value, _) in zip(weights, terms, strict=True) if w) for f in range(width)]
    return out, math.log(total) + top


def tail(call: ClusterTailCall, batch, head, query):
    """out and lse of a query: the windows as one key, routed keys one by one, every other cluster by its center."""
    heads, width = call.q.shape[1], call.values.shape[-1]
    own = source(head, heads, call.label.shape[1])
    row = batch * heads + head if call.rows is None else int(call.rows[batch, head])
    label, q = call.label[batch, own].flatten().tolist(), table(call.q, batch, head)[query]
    keys = len(label)

    def kept(name):
        if call.dropout_seed is None:
            return 1.0
        dropped = noise(int(call.dropout_seed), row, query, name) < int(call.dropout_p * 2**32)
        return 0.0 if dropped else 1 / (1 - call.dropout_p)

    terms = []
    if call.near_lse is not None:
        lse = float(call.near_lse[batch, head].flatten()[query])
        terms.append((lse, table(call.near_out, batch, head)[query], 1.0))
    routed = routed_clusters(call, batch, head, query)
    if routed:
        of_keys = source(head, heads, call.k.shape[1])
        k, v = table(call.k, batch, of_keys), table(call.v, batch, of_keys)
        terms += [(call.scale * dot(q, k[j]), v[j], kept(j)) for j in range(keys) if label[j] in routed]
    s = call.scale**2 * sum(x * x * y for x, y in zip(q, call.variance[batch, own].tolist(), strict=True))
    spreads = [0.0] * call.sizes.shape[-1] if call.spreads is None else call.spreads[batch, own].tolist()
    centers, values = table(call.centers, batch, own), table(call.values, batch, own)
    first = [0.0] * width
    if call.slope is not None:
        slope = call.slope[batch, own].double().tolist()
        first = [call.scale * sum(x * slope[e][f] for e, x in enumerate(q)) / (1 + s) for f in range(width)]
    each = [1.0] * len(spreads) if call.spreads is None else spreads  # of the first-order term
    for c, number in enumerate(left(call, batch, head, query)):
        if number:
            a = call.scale * dot(q, centers[c]) + math.log(number) + min(s * spreads[c], MOST_RAISED) / 2
            value = [x + each[c] * y for x, y in zip(values[c], first, strict=True)]  # T_i is a sum over the clusters
            terms.append((a, value, kept(keys + call.extras + c)))
    return mixed(terms, width)
