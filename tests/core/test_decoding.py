"""One position after another: the rows of the whole call, across borders and files; what is refused."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import scram

TAIL = scram.Clusters(count=8, keys=40, stretch=64, seed=3)
PROBLEMS = {  # grid, heads, key heads, a mask, more options
    "rank 1, grouped heads": ((200,), 4, 2, False, {}),
    "rank 2, mask": ((10, 20), 2, 2, True, {"score": "cosine", "scale": 4.0}),
    "rank 3": ((4, 5, 10), 2, 1, False, {"score": "l2"}),
}


def tensors(grid, heads, key_heads, dtype=torch.float32, batch=2):
    chance = torch.Generator().manual_seed(5)
    points = torch.Size(grid).numel()
    shapes = ((heads, 8), (key_heads, 8), (key_heads, 6))
    return [torch.randn(batch, h, points, w, generator=chance).to(dtype) for h, w in shapes]


def whole(q, k, v, grid, mask=None, **how):
    mask = None if mask is None else mask.unflatten(1, grid)
    made = scram.attention(*(x.unflatten(2, grid) for x in (q, k, v)), causal=True, key_mask=mask, tail=TAIL, **how)
    return made.flatten(2, -2)


@pytest.mark.parametrize("prompt", [1, 64, 130])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_decoding_is_the_rows_of_the_whole_call(problem, prompt, tmp_path):
    """A prompt, then one position after another over borders of tiles and stretches, saved and loaded on the way."""
    grid, heads, key_heads, masked, how = PROBLEMS[problem]
    q, k, v = tensors(grid, heads, key_heads)
    mask = torch.rand(2, 200, generator=torch.Generator().manual_seed(0)) < 0.8 if masked else None
    cache = scram.Cache(grid, tail=TAIL, **how)
    rows = []
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, 200))]:
        some = slice(begin, end)
        cache.append(q[:, :, some], k[:, :, some], v[:, :, some], key_mask=None if mask is None else mask[:, some])
        rows.append(scram.decode(q[:, :, some], cache))
        if begin == 140:
            cache.save(tmp_path / "cache.safetensors")
            cache = scram.Cache.load(tmp_path / "cache.safetensors")
    torch.testing.assert_close(torch.cat(rows, 2), whole(q, k, v, grid, mask, **how), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_parts_of_any_length_are_the_rows_of_the_whole_call(seed, dtype, tmp_path):
    """Cut anywhere, saved and loaded after any of them."""
    chance = torch.Generator().manual_seed(seed)
    q, k, v = tensors((200,), 4, 2, dtype)
    cuts = sorted(torch.randperm(199, generator=chance)[: 2 + 4 * seed].add(1).tolist())
    saved = int(torch.randint(len(cuts), (), generator=chance))
    cache = scram.Cache((200,), tail=TAIL)
    rows = []
    for n, (begin, end) in enumerate(pairwise([0, *cuts, 200])):
        new = [x[:, :, begin:end] for x in (q, k, v)]
        cache.append(*new)
        rows.append(scram.decode(new[0], cache))
        if n == saved:
            cache.save(tmp_path / "cache.safetensors")
            cache = scram.Cache.load(tmp_path / "cache.safetensors")
    far = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(torch.cat(rows, 2), whole(q, k, v, (200,)), atol=far, rtol=far if far > 1e-5 else 0)


def test_the_lse_and_extra_keys():
    q, k, v = tensors((200,), 2, 1)
    extra = (k[:, :, :3] * 2, v[:, :, :3] + 1)
    want = scram.attention(q, k, v, causal=True, tail=TAIL, extra=extra, return_lse=True)
    cache = scram.Cache((200,), tail=TAIL)
    cache.append(q, k, v)
    out, lse = scram.decode(q[:, :, 180:], cache, extra=extra, return_lse=True)
    torch.testing.assert_close(out, want.out[:, :, 180:], atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, want.lse[:, :, 180:], atol=1e-5, rtol=0)


def test_where_the_whole_call_is_dense_decoding_is_too():
    q, k, v = tensors((100,), 2, 2)
    assert scram.explain(q, k, v, causal=True).dense
    cache = scram.Cache((100,))
    cache.append(q, k, v)
    assert "every key" in repr(cache)
    torch.testing.assert_close(scram.decode(q, cache), scram.attention(q, k, v, causal=True), atol=1e-5, rtol=0)


def test_what_is_not_finite_spoils_its_own_stretch_alone():
    q, k, v = tensors((200,), 2, 1)
    k[:, :, 70] = torch.nan
    q[:, :, 30] = torch.inf
    want = whole(q, k, v, (200,))
    cache = scram.Cache((200,), tail=TAIL)
    cache.append(q, k, v)
    torch.testing.assert_close(scram.decode(q, cache), want, atol=1e-5, rtol=0, equal_nan=True)
    assert want.isnan().any()


def test_clusters_in_16_bits_are_near():
    q, k, v = tensors((200,), 2, 1)
    made = []
    for half in (False, True):
        cache = scram.Cache((200,), tail=TAIL, half=half)
        cache.append(q, k, v)
        made.append(scram.decode(q, cache))
    assert 0 < float((made[0] - made[1]).norm() / made[0].norm()) < 0.01


def test_a_cache_that_was_reset_begins_anew():
    q, k, v = tensors((200,), 2, 1)
    cache = scram.Cache((200,), tail=TAIL)
    made = []
    for _ in range(2):
        cache.append(q, k, v)
        made.append(scram.decode(q, cache))
        cache.reset()
    assert torch.equal(*made)
    assert cache.length == 0


def full():
    q, k, v = tensors((64,), 2, 1)
    cache = scram.Cache((64,), tail=TAIL)
    cache.append(q, k, v)
    return cache, q, k, v


def begun():
    cache, q, k, v = full()
    cache.reset()
    cache.append(q[:, :, :10], k[:, :, :10], v[:, :, :10])
    return cache, q, k, v


REFUSED = {
    "a search": (lambda: scram.Cache((8,), search=scram.Search()), ValueError, "takes no search"),
    "drawn keys": (lambda: scram.Cache((8,), tail=scram.DrawnKeys()), TypeError, "must be scram.Clusters or 'auto'"),
    "a callable": (lambda: scram.Cache((8,), score=max), ValueError, "no callable score"),
    "too many": (lambda: full()[0].append(*[x[:, :, :1] for x in full()[1:]]), ValueError, "has 64 positions, 64 are"),
    "empty": (lambda: scram.decode(full()[1], scram.Cache((8,))), ValueError, "the cache is empty"),
    "more than there are": (lambda: scram.decode(full()[1], begun()[0]), ValueError, "newest n of 10 positions"),
    "other heads": (
        lambda: scram.decode(full()[1][:, :1], full()[0]),
        ValueError,
        r"heads, width\) = \(2, 2, 8\)",
    ),
    "other dtype": (lambda: scram.decode(full()[1].double(), full()[0]), ValueError, "torch.float32 on cpu"),
    "other keys": (
        lambda: begun()[0].append(*[x[:, :, :1, :5] for x in full()[1:]]),
        ValueError,
        "as the positions before",
    ),
    "as many": (lambda: begun()[0].append(*begun()[1:3], begun()[3][:, :, :1]), ValueError, "as many positions"),
    "a grid": (lambda: begun()[0].append(*[x.unflatten(2, (8, 8)) for x in full()[1:]]), ValueError, "row-major"),
    "no positions": (lambda: scram.Cache((8,)).save("x"), ValueError, "nothing to save"),
    "a mask": (
        lambda: begun()[0].append(*[x[:, :, :1] for x in full()[1:]], key_mask=torch.ones(2, 2, dtype=torch.bool)),
        ValueError,
        r"key_mask must be bool \[B, n\]",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_refused(wrong):
    call, kind, message = REFUSED[wrong]
    with pytest.raises(kind, match=message):
        call()


def test_files_of_others(tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = scram.Cache((200,), tail=TAIL)
    cache.append(*tensors((200,), 2, 1))
    cache.save(path)
    held = load_file(path)
    with pytest.raises(ValueError, match="it holds something else"):
        scram.Codebook.load(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    settings = json.loads(metadata["settings"])
    for name, wrong in {"length": 270, "first": 9, "clustered": 5, "score": "max", "grid": [0]}.items():
        save_file(held, path, metadata={**metadata, "settings": json.dumps({**settings, name: wrong})})
        with pytest.raises(ValueError, match=r"is not a safetensors file that Cache\.save wrote"):
            scram.Cache.load(path)
    for name in ("k", "q", "label"):
        save_file({**held, name: held[name][:, :, :-1].contiguous()}, path, metadata=metadata)
        with pytest.raises(ValueError, match=r"Cache\.save wrote"):
            scram.Cache.load(path)
