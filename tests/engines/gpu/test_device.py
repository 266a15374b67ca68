"""The Triton engine on a CUDA device: large cases, and what only a device can show. The table runs in engines/."""

import dataclasses

import pytest
import torch

import scram
from support.cases import assert_attended_as_near_float64, make_tensors, named, run_search
from support.on_device import to

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kappa", [1, 4, 8, 16, 32])
def test_every_number_of_matches_in_a_tile_search(kappa, dtype):
    case = named("rank 2", grid=(41, 50), key_grid=(37, 45), width=64, dtype=dtype, kappa=kappa, separation=1)
    case = dataclasses.replace(case, sweeps=3, method="tile")
    tensors = make_tensors(case, integer=True)
    expected = run_search(case, to(tensors, "cuda"), "reference")
    found = run_search(case, to(tensors, "cuda"), "triton")
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)


@pytest.mark.parametrize("limits", [{"reach": (3, 9)}, {"reach": 2, "warm": 2}, {"random": False}], ids=str)
@pytest.mark.parametrize("method", ["query", "tile"])
@pytest.mark.parametrize("kappa", [1, 4])
def test_a_search_within_limits(kappa, method, limits):
    case = named("rank 2", grid=(41, 50), key_grid=(37, 45), width=64, dtype=torch.bfloat16, kappa=kappa, sweeps=3)
    case = dataclasses.replace(case, method=method, mask="batch", **limits)
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, to(tensors, "cuda"), impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)


@pytest.mark.parametrize("kappa", [1, 4])
@pytest.mark.parametrize("width", [5, 64, 140])
def test_float32_tiles_find_as_much_as_the_reference(width, kappa):
    q, k = torch.randn(2, 1, 2, 60, 70, width, device="cuda").cumsum(2).cumsum(3).unbind()
    settings = scram.Search("tile", matches=kappa, seed=0)
    found, expected = (scram.search(q, k, search=settings, impl=impl) for impl in ("triton", "reference"))
    assert found.score.mean() >= expected.score.mean() - 1e-5 * expected.score.abs().mean()
    chosen = k.flatten(2, 3).gather(2, found.index.flatten(2).long()[..., None].expand(-1, -1, -1, width))
    exact = (q.flatten(2, 3).repeat_interleave(kappa, 2).double() * chosen).sum(-1).view_as(found.score)
    torch.testing.assert_close(found.score.double(), exact, rtol=1e-5, atol=1e-4)


WIDE = {"grid": (41, 50), "key_grid": (37, 45), "kappa": 4, "width": 64, "value_width": 64}
WIDE_CASES = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "extra": 3},
    "float32": {},
    "width 128": {"dtype": torch.bfloat16, "width": 128, "value_width": 128},
    "width 300": {"dtype": torch.bfloat16, "width": 300, "value_width": 300},
    "width 64, values 192": {"dtype": torch.bfloat16, "value_width": 192, "extra": 2},
    "width 130, values 16": {"dtype": torch.bfloat16, "width": 130, "value_width": 16, "mask": "batch"},
    "float32, values 128": {"value_width": 128, "extra": 2},
    "radius 3": {"dtype": torch.bfloat16, "radius": 3},
    "many matches": {"dtype": torch.bfloat16, "kappa": 20},
    "causal": {"dtype": torch.bfloat16, "key_grid": (41, 50), "causal": True, "mask": "batch"},
    "rank 3": {"dtype": torch.bfloat16, "grid": (9, 10, 11), "key_grid": (8, 9, 7), "radius": 2},
}


@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("name", WIDE_CASES)
def test_tiles_are_attended_as_near_float64_as_the_reference_does(name, repeatable, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    case = named("rank 2", **{**WIDE, **WIDE_CASES[name]})
    assert_attended_as_near_float64(case, to(make_tensors(case), "cuda"), "triton")


def pictures(size, width=32, dtype=torch.bfloat16, heads=1):
    return torch.randn(3, 1, heads, size, size, width, device="cuda", dtype=dtype).unbind()


@pytest.mark.parametrize("method", ["query", "tile"])
def test_a_new_size_compiles_nothing(method):
    from scram.engines.gpu.runtime import launch

    def run(height, wide):
        q = torch.randn(1, 1, height, wide, 16, device="cuda", requires_grad=True)
        search = scram.Search(method, matches=2, seed=0)
        scram.attention(q, q, q, search=search, tail=None).sum().backward()

    run(32, 48)
    variants = {id(kernel) for kernel in launch._compiled.values()}
    for height, wide in ((33, 47), (16, 64), (1, 5), (64, 1), (100, 100)):
        run(height, wide)
    assert {id(kernel) for kernel in launch._compiled.values()} == variants


def test_more_numbers_than_an_int32_counts_after_fewer():
    from scram.engines.gpu.runtime.layout import halves

    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    for rows in (1024, 2**25 + 1024):
        x = torch.full((rows, 64), 1.0 + 2**-9, device="cuda")
        assert bool((halves(x).unflatten(-1, (2, 64)).sum(-2, dtype=torch.float32) == x).all())


@pytest.mark.parametrize("method", ["query", "tile"])
def test_a_captured_graph_draws_anew_at_every_replay(method):
    q, k, _ = pictures(64)
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    settings = scram.Search(method, sweeps=1, seed=seed)
    scram.search(q, k, search=settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = scram.search(q, k, search=settings)
    fields = []
    for value in (1, 2, 1):
        seed.fill_(value)
        graph.replay()
        fields.append(found.index.clone())
        assert torch.equal(fields[-1], scram.search(q, k, search=dataclasses.replace(settings, seed=value)).index)
    assert torch.equal(fields[0], fields[2])
    assert not torch.equal(fields[0], fields[1])


def test_a_captured_graph_attends_anew_at_every_replay():
    q, k, v = (x.requires_grad_() for x in pictures(64))
    found = scram.search(q, k, search=scram.Search(matches=2, seed=0))
    grad = torch.randn_like(v)

    def step():
        out, lse = scram.attend(q, k, v, found)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    other = scram.search(q, k, search=scram.Search(matches=2, seed=1, sweeps=1))
    found.index.copy_(other.index)
    graph.replay()
    torch.testing.assert_close(made, step(), rtol=2e-2, atol=2e-2)  # atomics add in any order
    assert torch.equal(made[0], step()[0])


def test_runs_on_the_current_stream():
    q, k, v = pictures(256)
    settings = scram.Search(seed=3)
    expected = scram.attention(q, k, v, search=settings)
    stream = torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            busy @ busy
        late = [x.clone() for x in (q, k, v)]
        out = scram.attention(*late, search=settings)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("method", ["query", "tile"])
def test_a_field_is_the_same_every_time(method):
    q, k, _ = pictures(200)
    settings = scram.Search(method, matches=2, seed=5)
    first = scram.search(q, k, search=settings)
    assert all(torch.equal(scram.search(q, k, search=settings).index, first.index) for _ in range(5))


@pytest.mark.parametrize("wanted", ["by some", "by all"])
def test_repeatable_gradients_have_the_same_bits(wanted):
    q, k, v = (x.requires_grad_() for x in pictures(96, dtype=torch.float32))
    k_extra, v_extra = torch.randn(2, 1, 1, 3, 32, device="cuda").unbind()
    found = scram.search(q, k, search=scram.Search(matches=3, seed=0))
    if wanted == "by all":
        found.index[..., 0] = 3000
    torch.use_deterministic_algorithms(True)
    try:
        grads = []
        for _ in range(3):
            out, lse = scram.attend(q, k, v, found, extra=(k_extra, v_extra))
            grads.append(torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))
    out, lse = scram.attend(q, k, v, found, extra=(k_extra, v_extra))
    for ours, fixed in zip(torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v)), grads[0], strict=True):
        torch.testing.assert_close(ours, fixed, rtol=1e-4, atol=1e-4)


def test_more_than_2_to_the_31_elements():
    heads, width = 9, 256
    q = torch.randint(-3, 4, (1, heads, 1024, 1024, width), device="cuda", dtype=torch.int8).to(torch.float16)
    assert q.numel() > 2**31
    settings = scram.Search("query", sweeps=1, gossip=0, propagate="shift", jumps=(1,), seed=1)
    found = scram.search(q, q, search=settings)
    out, _ = scram.attend(q, q, q, found, radius=0)
    index = found.index[0, -1, ..., 0].flatten().long()
    last = q[0, -1].flatten(0, 1)
    assert torch.equal((last.float() * last[index].float()).sum(-1), found.score[0, -1].flatten())
    assert torch.equal(out[0, -1].flatten(0, 1), last[index])


def extra_memory(size, **how):
    """Bytes beyond inputs and outputs, per query."""
    q, k, v = pictures(size, width=64)
    scram.attention(q, k, v, **how)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = scram.attention(q, k, v, **how)
    return (torch.cuda.max_memory_allocated() - before - out.numel() * out.itemsize) / size**2


def test_extra_memory_is_at_most_40_bytes_per_query_and_match():
    assert extra_memory(512, search=scram.Search.paper(), tail=None) <= 40


def test_extra_memory_with_clusters_is_at_most_64_bytes_per_query_and_match_and_8_per_key():
    assert extra_memory(1024, search=scram.Search(matches=4, separation=2)) <= 4 * 64 + 8
