"""Every kernel variant that a launcher can choose compiles for sm_80 or sm_90; no GPU is needed for that.

Every kernel is compiled to the end once, its other variants to Triton's own language. Widths are small: Triton takes
minutes for wide ones in float32. Tests on a device have those.

The launchers run as they are, on CPU tensors; what they would launch is compiled instead.
"""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support.cases import Case, gradients, make_tensors, run_attend, run_search
from support.cluster_calls import cluster_call
from support.decode_calls import Decoded, decode_call
from support.earlier_calls import Earlier, earlier_call
from support.estimates import CELLS, HYBRID, SNIS, WALKS, Estimated, run_estimate, tensors_of
from support.routed_calls import ALL, Parts, attend_call, route_call, start_call, tail_call

triton = pytest.importorskip("triton")

import scram  # noqa: E402
from scram.core.tails.base import Shard, draw_seed  # noqa: E402
from scram.engines import dispatch  # noqa: E402
from scram.engines.gpu import noise, primitives  # noqa: E402
from scram.engines.gpu.attend import query_collect  # noqa: E402
from scram.engines.gpu.cluster_tail import keys_backward  # noqa: E402
from scram.engines.gpu.engine import (  # noqa: E402
    attend,
    attend_backward,
    cluster,
    cluster_backward,
    cluster_tail,
    cluster_tail_backward,
    decode,
    earlier,
    earlier_backward,
    route,
    routed_start,
)
from scram.engines.gpu.runtime import block_sizes, launch  # noqa: E402
from scram.engines.gpu.sample import visits  # noqa: E402
from scram.engines.gpu.search import query as query_search  # noqa: E402
from scram.spec import clustering  # noqa: E402
from support import part_calls  # noqa: E402

pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = ("softmax", "mean", "relu")
PROPAGATE = ("shift", "stay", "both", "turns")
GRIDS = ((8,), (4, 5), (2, 3, 4), (2, 2, 2, 2))


def table_cases():
    """One case per row of the table of block_sizes; the other choices are dealt out so that each value comes up."""
    for n, size in enumerate([*block_sizes.SEARCH, 2 * max(block_sizes.SEARCH)]):
        dtype = DTYPES[n % 3]
        width = size // dtype.itemsize - (size <= 32)  # narrow keys are padded
        yield Case(
            f"{size} bytes",
            grid=GRIDS[(n if n < 4 else 2 * n) % 4],
            heads=2,
            width=width,
            value_width=60 if n == 5 else width,
            dtype=dtype,
            value_dtype=torch.float32 if n == 4 else None,
            kappa=1 + n % 2,
            separation=int(n % 4 == 3),
            causal=n % 3 == 1,
            mask=("none", "batch", "head", "none")[n % 4],
            weight=WEIGHTS[n // 2 % 3],
            extra=n % 2,
            dropout_p=0.5 * (n % 3 == 0),
            propagate=PROPAGATE[n % 4],
            warm=n % 3 == 2,
            reach=(None, 2, None, 3)[n % 4],
            random=n % 4 < 3,
        )


CASES = list(table_cases())
ANYWHERE = replace(dispatch.ENGINES["triton"], devices=None)  # the engine on CPU tensors
KERNELS = {
    "start_kernel",
    "sweep_kernel",
    "attend_kernel",
    "backward_kernel",
    "share_kernel",
    "collect_kernel",
    "arrange_kernel",
}


def by_pointer(seed, rows):
    """A seed as on the device."""
    return noise.Seed(seed, 0, 0, None, 0)


@pytest.fixture
def launches(monkeypatch):
    """Runs a case up to its launches, which `launched` (kernel, arguments, flags) takes the place of."""

    def run(number, launched):
        case, seed_by_pointer = CASES[number], number // 2 % 2 == 0
        monkeypatch.setattr(launch.Kernel, "__call__", lambda self, *given: launched(self.kernel, given, self.flags))
        monkeypatch.setitem(dispatch.ENGINES, "triton", ANYWHERE)
        monkeypatch.setattr(query_collect, "LEAST_SHARE", 2)  # so that these few keys have several shares too
        for module in (query_search, primitives):
            monkeypatch.setattr(module, "seed_argument", by_pointer if seed_by_pointer else noise.seed_argument)
        tensors = make_tensors(case)
        run_search(case, tensors, "triton")
        for repeatable in (False, True) if number == 0 else (number % 2 == 1,):
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda asked=repeatable: asked)
            leaves = tensors.leaves(case.dtype)
            gradients(run_attend(case, tensors, leaves, "triton"), leaves)

    return run


def in_turn(cases):
    """Numbers of the cases and an architecture for each."""
    return [(n, 80 if n % 2 else 90) for n in range(len(cases))]


@pytest.mark.parametrize(("number", "architecture"), in_turn(CASES))
def test_compiles(number, architecture, launches):
    compiled = []

    def compile_only(kernel, arguments, flags):
        compiled.append(kernel.fn.__name__)
        _compile(kernel, arguments, flags, architecture)

    launches(number, compile_only)
    left_out = {"arrange_kernel"} if number % 2 == 0 else set()
    left_out |= {"share_kernel", "collect_kernel"} if number % 2 == 0 and number > 0 else set()
    assert set(compiled) == KERNELS - left_out


def leaves(named):
    """The names and values of a dict, and of the NamedTuples in it; an outer name wins."""
    for value in named.values():
        yield from leaves(value._asdict()) if hasattr(value, "_fields") else ()
    yield from named.items()


def test_the_cases_reach_every_choice_of_the_launchers(launches):
    seen, shapes = {}, {}

    def record(kernel, arguments, flags):
        name, given = kernel.fn.__name__, dict(leaves(dict(zip(kernel.arg_names, arguments, strict=False))))
        constants = dict(leaves(flags))
        dtype = next(x.dtype for x in (given.get("q"), *given.values()) if isinstance(x, torch.Tensor))
        pointers = POINTERS_OR_NONE | ({"sums"} if name == "backward_kernel" else set())
        absent = {pointer: given[pointer] is None for pointer in pointers & given.keys()}
        ranks = {"rank": len(given["magic"])} if "magic" in given else {}
        for choice, value in {**constants, **absent, **ranks, "dtype": dtype}.items():
            seen.setdefault((name, choice), set()).add(value)
        shapes.setdefault(name, set()).add((constants.get("BLOCK_Q"), flags.get("num_warps")))

    for number in range(len(CASES)):
        launches(number, record)
    for (name, choice), values in seen.items():
        everything = {
            "rank": {1, 2, 3, 4},
            "MOVES": {(-1,), (0,), (-1, 0)},
            "WEIGHT": set(WEIGHTS),
            "dtype": {"arrange_kernel": {torch.int32}, "share_kernel": {torch.int64}}.get(name, set(DTYPES)),
            **{flag: {False, True} for flag in FLAGS | POINTERS_OR_NONE},
            **({"sums": {False, True}} if name == "backward_kernel" else {}),
        }
        assert values == everything.get(choice, values), (name, choice)
    rows = {
        (lanes, warps)
        for lanes, _, warps in (block_sizes.SEARCH_NARROW, *block_sizes.SEARCH.values(), block_sizes.SEARCH_WIDE)
    }
    assert shapes["sweep_kernel"] == rows
    windows_rows = (block_sizes.ATTEND_NARROW, block_sizes.ATTEND, block_sizes.ATTEND_WIDE)
    assert shapes["attend_kernel"] == {(lanes, warps) for lanes, _, warps in windows_rows}


TILES = [
    Case("one match", grid=(4, 5), width=64, dtype=torch.bfloat16, kappa=1, method="tile"),
    Case("several matches", grid=(2, 3, 4), width=20, dtype=torch.float16, kappa=5, separation=2, method="tile"),
    Case("many matches", grid=(4, 5), width=64, dtype=torch.bfloat16, kappa=32, separation=1, method="tile"),
    Case("float32", grid=(9,), width=3, kappa=3, mask="batch", warm=2, method="tile"),
    Case("reach", grid=(4, 5), width=64, dtype=torch.bfloat16, kappa=1, warm=2, reach=2, method="tile"),
    Case("reach, several", grid=(2, 3, 4), width=20, kappa=3, mask="batch", reach=(0, 1, 2), method="tile"),
    Case("wide", grid=(2, 2, 2, 2), width=300, dtype=torch.bfloat16, kappa=1, mask="head", method="tile"),
]


@pytest.mark.parametrize(("number", "architecture"), in_turn(TILES))
def test_the_tile_search_compiles(number, architecture, monkeypatch):
    compiled, case = [], TILES[number]

    def compile_only(self, *arguments):
        compiled.append(self.kernel.fn.__name__)
        _compile(self.kernel, arguments, self.flags, architecture)

    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    monkeypatch.setitem(dispatch.ENGINES, "triton", ANYWHERE)
    run_search(case, make_tensors(case), "triton")
    wanted = {"start_kernel", "offer_kernel", "score_offers_kernel"}
    wanted |= {"arrange_kernel"} if case.kappa > 1 else set()
    wanted |= {"exact_kernel", "halves_kernel"} if case.dtype == torch.float32 else set()
    assert set(compiled) == wanted


@pytest.fixture
def specialised(monkeypatch):
    """Compiles instead of launching, as `kernel[grid](...)` would: that makes constants of numbers that are 1, also in
    tuples. Gathers the names of the kernels."""
    compiled = set()

    def compile_specialised(self, *arguments):
        compiled.add(self.kernel.fn.__name__)
        _compile(self.kernel, arguments, self.flags, 90)

    monkeypatch.setattr(launch, "_stand_in", lambda x: x)
    monkeypatch.setattr(launch.Kernel, "__call__", compile_specialised)
    monkeypatch.setitem(dispatch.ENGINES, "triton", ANYWHERE)
    return compiled


@pytest.mark.parametrize("method", ["query", "tile"])
def test_the_public_way_compiles_where_numbers_are_1(method, specialised):
    case = Case("1", grid=(1, 1), kappa=2, separation=1, sweeps=1, mask="batch", warm=1, method=method)
    run_search(case, make_tensors(case), "triton")
    assert {"start_kernel", "arrange_kernel"} < specialised


@pytest.mark.parametrize("repeatable", [False, True])
def test_the_public_way_compiles_attention_where_numbers_are_1(repeatable, specialised, monkeypatch):
    case = Case("1", grid=(1, 1), heads=1, batch=1, kappa=1, radius=1, extra=1, mask="batch")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    monkeypatch.setattr(query_collect, "LEAST_SHARE", 1)
    tensors = make_tensors(case)
    leaves = tensors.leaves(case.dtype)
    gradients(run_attend(case, tensors, leaves, "triton"), leaves)
    collects = {"share_kernel", "collect_kernel"}
    assert collects <= specialised if repeatable else not collects & specialised


@pytest.mark.parametrize(
    "method",
    [HYBRID, SNIS, WALKS],
    ids=["DrawnKeys", "Snis", "MetropolisHastings"],
)
def test_the_public_way_compiles_estimators_where_numbers_are_1(method, specialised):
    case = Case("1", grid=(1, 1), heads=1, batch=1, kappa=1, radius=1, mask="batch")
    one = Estimated(case, replace(method, samples=1))
    leaves = (tensors := tensors_of(one)).leaves(case.dtype)
    torch.autograd.grad(run_estimate(one, tensors, leaves, "triton").out.sum(), leaves)
    assert {"queries_kernel", "visit_backward_kernel"} & specialised


WITH_ROWS = {
    "tiles": ({"search": scram.Search("tile", matches=2), "tail": scram.Clusters(count=5)}, "cluster_tail_kernel"),
    "queries": ({"search": scram.Search("query"), "tail": scram.DrawnKeys(samples=5)}, "draw_order_kernel"),
    "draws": (scram.Snis(samples=5), "draw_kernel"),
    "walks": (scram.MetropolisHastings(samples=5), "walk_kernel"),
}


@pytest.mark.parametrize("name", WITH_ROWS)
def test_kernels_with_the_numbers_of_rows_compile(name, monkeypatch):
    """Forward and backward, with dropout."""
    compiled = set()

    def compile_only(self, *arguments):
        compiled.add(self.kernel.fn.__name__)
        _compile(self.kernel, arguments, self.flags, 90)

    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    monkeypatch.setitem(dispatch.ENGINES, "triton", ANYWHERE)
    q, k, v = torch.zeros(3, 1, 2, 4, 5, 16).requires_grad_().unbind()
    how, kernel = WITH_ROWS[name]
    common = {"impl": "triton", "shard": Shard(torch.tensor([[3, 1]]), draw_seed)}
    if isinstance(how, dict):
        out = part_calls.attention(q, k, v, dropout_p=0.5, **how, **common)
    else:
        index = torch.zeros(*q.shape[:-1], 1, dtype=torch.int32)
        matches = scram.Matches(index, index.float(), (4, 5))
        out = part_calls.estimate(q, k, v, matches, method=how, **common)
    out.sum().backward()
    assert kernel in compiled


FLAGS = {"CAUSAL", "SEPARATED", "EARLIER", "KEYLESS", "TURNS"}
FLAGS |= {"DROPOUT", "SEVERAL", "FIRST"}
POINTERS_OR_NONE = {"mask", "warm", "wide", "pointer", "k_extra", "v_extra"}


class Lowered(Exception):
    """A kernel went through the frontend; the passes for the GPU, LLVM and ptxas are left out."""


def _lower_only(backend=None, stages=None, *_):
    """Triton's hook: first asked for what makes its code another, then given the stages."""

    def stop(module, metadata):
        raise Lowered

    if stages is None:
        return "lowered", "lowered"
    stages["ttgir"] = stop
    return None


whole, variants = set(), set()  # kernels that were compiled to the end, and all that was compiled at all


def _compiler_sees(x):
    """Dtypes and alignment of tensors, classes and values of all else."""
    if isinstance(x, tuple):
        return tuple(map(_compiler_sees, x))
    return (x.dtype, x.data_ptr() & 15) if isinstance(x, torch.Tensor) else (x.__class__, x)


def _target(architecture):
    """What Triton compiles for from here on."""
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: architecture,  # Triton keeps the code of each device
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )


def _compile(kernel, arguments, flags, architecture):
    """What a launch of these arguments would compile, once: the first to the end, which takes many times as long."""
    _target(architecture)
    given = tuple(_compiler_sees(launch._stand_in(x)) for x in arguments)
    variant = kernel.fn.__name__, architecture, given, tuple(flags.items())
    if variant in variants:
        return
    variants.add(variant)
    if kernel.fn.__name__ not in whole:
        whole.add(kernel.fn.__name__)
        assert launch.compiled(kernel, arguments, flags).asm["cubin"]
        return
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Lowered):
        patch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", _lower_only)
        launch.compiled(kernel, arguments, flags)


@pytest.fixture(autouse=True)
def _active_driver():
    yield
    triton.runtime.driver._active = None


ESTIMATED = [
    (Estimated(Case("rank 2", width=32, value_width=32, dtype=torch.bfloat16), HYBRID), "tail"),
    (Estimated(Case("rank 1", grid=(8,), width=5, causal=True, mask="head", heads=2), CELLS), "tail"),
    (Estimated(Case("many matches", width=5, kappa=9), HYBRID), "tail"),
    (
        Estimated(Case("dropout", width=16, value_width=16, dtype=torch.bfloat16, causal=True, dropout_p=0.5), HYBRID),
        "tail",
    ),
    (Estimated(Case("dropout, exact", width=5, value_width=20, dropout_p=0.5), CELLS), "tail"),
    (Estimated(Case("wide windows", grid=(2, 3, 4), width=5, mask="batch", radius=3), CELLS), "tail"),
    (Estimated(Case("rank 3", grid=(2, 2, 2), width=64, dtype=torch.float16, mask="batch", causal=True), SNIS), "draw"),
    (Estimated(Case("rank 2", width=32, value_width=32, mask="batch", causal=True), WALKS), "walk"),
]
WINDOWS = {"attend_kernel", "backward_kernel", "share_kernel", "collect_kernel"}


@pytest.mark.parametrize(("one", "first"), ESTIMATED, ids=str)
def test_estimators_compile(one, first, monkeypatch):
    """All but what attends the windows, which is compiled above."""
    compiled = set()

    def compile_only(self, *arguments):
        if self.kernel.fn.__name__ not in WINDOWS:
            compiled.add(self.kernel.fn.__name__)
            _compile(self.kernel, arguments, self.flags, 90)

    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    monkeypatch.setitem(dispatch.ENGINES, "triton", ANYWHERE)
    monkeypatch.setattr(visits, "_collect", lambda *_: None)  # no keys were written
    for repeatable in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda asked=repeatable: asked)
        if repeatable:  # as for a seed on the device
            monkeypatch.setattr(primitives, "seed_argument", by_pointer)
        tensors = tensors_of(one)
        leaves = tensors.leaves(one.case.dtype)
        made = run_estimate(one, tensors, leaves, "triton")
        torch.autograd.grad(made.out.sum(), leaves)
    wanted = (
        {"draw_order_kernel", "gather_kernel", "queries_kernel", "keys_kernel"}
        if first == "tail"
        else {"visit_kernel", "visit_backward_kernel"}
    )
    assert compiled == wanted | {f"{first}_kernel"}


TAILED = [
    (Case("rank 2", grid=(9, 9), width=32, value_width=32, dtype=torch.bfloat16, kappa=1), ALL),
    (Case("four matches", width=32, value_width=20, dtype=torch.float16, kappa=4, dropout_p=0.5), ALL),
    (Case("many keys", grid=(40,), width=5, kappa=3, radius=20, heads=2, key_heads=1, dropout_p=0.5), ALL),
    (Case("clusters alone", grid=(2, 3, 4), width=20, value_width=5), Parts(False, False, False, False, False)),
    (Case("no windows", grid=(2, 2, 2, 2), width=20, dtype=torch.bfloat16), Parts(windows=False, near=False)),
]


@pytest.mark.parametrize(("number", "architecture"), [(0, 80), (1, 90), (2, 90), (3, 80), (4, 90)])
def test_the_clustered_tail_compiles(number, architecture, monkeypatch):
    compiled = []
    case, parts = TAILED[number]

    def compile_only(self, *arguments):
        compiled.append(self.kernel.fn.__name__)
        _compile(self.kernel, arguments, self.flags, architecture)

    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    monkeypatch.setattr(keys_backward, "LEAST_SHARE", 1)  # so that few tiles have further shares too
    call = tail_call(case, parts)
    out, lse = cluster_tail(call)
    cluster_tail_backward(call, out, lse, out, lse)
    route(route_call(case))
    routed_start(start_call(case))
    wanted = {"table_kernel", "cluster_tail_kernel", "tail_queries_kernel", "tail_clusters_kernel"}
    wanted |= {"importance_kernel", "choice_kernel", "routed_start_kernel", "routed_keys_kernel"}
    wanted |= {"counts_kernel"} if parts.windows else set()
    wanted |= {"tail_slope_kernel"} if parts.slope else set()
    wanted |= {"routing_tiles_kernel", "tail_keys_kernel"} if parts.routes else set()
    assert set(compiled) == wanted


def test_products_of_the_clustered_tail_do_not_wait_for_each_other(monkeypatch):
    """The first-order term behind the loop once made ptxas put a wait behind every product."""
    made = []

    def assemble(self, *arguments):
        if self.kernel.fn.__name__ == "cluster_tail_kernel":
            _target(90)
            made.append(launch.compiled(self.kernel, arguments, self.flags).asm["sass"])

    monkeypatch.setattr(launch.Kernel, "__call__", assemble)
    case = Case("wgmma", grid=(8, 8), width=64, value_width=64, dtype=torch.bfloat16)
    cluster_tail(tail_call(case, Parts(windows=False, near=False)))
    products, waits = (made[0].count(name) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
    assert products > 2 * waits > 0


@pytest.mark.parametrize("repeatable", [False, True])
def test_windows_without_routed_keys_compile(repeatable, monkeypatch):
    compiled = []

    def compile_only(self, *arguments):
        compiled.append(self.kernel.fn.__name__)
        _compile(self.kernel, arguments, self.flags, 90)

    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    call = attend_call(Case("rank 2", width=16, dtype=torch.bfloat16, extra=1))
    out, lse = attend(call)
    attend_backward(call, out, lse, out, lse)
    assert compiled[:2] == ["attend_kernel", "backward_kernel"]
    assert ("collect_kernel" in compiled) is repeatable


CLUSTERED = [
    {"width": 32, "value_width": 32, "dtype": torch.bfloat16, "grid": (4, 5), "count": 7, "sample": 16},
    {"width": 20, "value_width": 32, "dtype": torch.float16, "grid": (8,), "count": 3, "mask": "batch", "warm": True},
    {"width": 5, "value_width": 20, "dtype": torch.float32, "grid": (4, 5), "count": 7, "mask": "head", "sample": 16},
    {"width": 70, "value_width": 20, "dtype": torch.bfloat16, "grid": (4, 5), "count": 7},
]


@pytest.mark.parametrize(("number", "architecture"), [(0, 80), (1, 90), (2, 90), (3, 90)])
def test_clustering_compiles(number, architecture, monkeypatch):
    compiled, given = [], dict(CLUSTERED[number])

    def compile_only(self, *arguments):
        compiled.append(self.kernel.fn.__name__)
        _compile(self.kernel, arguments, self.flags, architecture)

    monkeypatch.setattr(clustering, "SAMPLED_KEYS", given.pop("sample", 1 << 14))
    launch.clear_caches()
    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    call = cluster_call(**given)
    made = cluster(call)
    cluster_backward(call, made.centers, made.values, made.sizes, made.label, *made[:3])
    nearest = ["assign_kernel", "label_kernel", "prefix_kernel", "order_kernel"]
    step = [*nearest, "far_kernel", "segments_kernel", "forms_kernel"]
    space = ["sample_kernel", "moments_kernel", "metric_kernel", "space_kernel", "forms_kernel"]
    last = [
        *nearest,
        "segments_kernel",
        "products_kernel",
        "means_kernel",
        "slope_kernel",
        "table_kernel",
        "spread_kernel",
    ]
    assert compiled == [*space, *step, *step, *last]
    launch.clear_caches()


@pytest.mark.parametrize(
    ("dtype", "width", "radius", "architecture"),
    [
        (*x, 90)
        for x in (
            (torch.float32, 256, 4),
            (torch.bfloat16, 5, 0),
            (torch.float16, 128, 7),
        )
    ],
)
@pytest.mark.parametrize("rank", [1, 2])
def test_correlation_compiles(dtype, width, radius, architecture, rank, monkeypatch):
    compiled = set()

    def compile_only(self, *arguments):
        compiled.add(self.kernel.fn.__name__)
        _compile(self.kernel, arguments, self.flags, architecture)

    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    monkeypatch.setitem(dispatch.ENGINES, "triton", ANYWHERE)
    q, k = torch.zeros(2, 1, 2, *[4] * rank, width, dtype=dtype).requires_grad_().unbind()
    coords = torch.zeros(*q.shape[:-1], rank)
    for repeatable in (False, True) if radius == 0 else (False,):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda asked=repeatable: asked)
        scram.correlation(q, k, coords, radius, levels=2, impl="triton").sum().backward()
    assert compiled == {"window_scores_kernel", "window_scores_backward_kernel"}


@pytest.mark.parametrize(
    ("one", "architecture"),
    [
        (Earlier("bfloat16", 200, width=64, value_width=64, dtype=torch.bfloat16), 90),
        (Earlier("float16, all", 40, heads=4, key_heads=2, masked=True, dropout_p=0.5, dtype=torch.float16), 80),
        (Earlier("float32", 40, width=20, masked=True), 80),
    ],
    ids=str,
)
def test_attention_over_earlier_keys_compiles(one, architecture, monkeypatch):
    compiled = []

    def compile_only(self, *arguments):
        compiled.append(self.kernel.fn.__name__)
        _compile(self.kernel, arguments, self.flags, architecture)

    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    call = earlier_call(one)
    out, lse = earlier(call)
    earlier_backward(call, out, lse, out, lse)
    assert set(compiled) == {"earlier_kernel", "earlier_queries_kernel", "earlier_keys_kernel"}


@pytest.mark.parametrize(
    ("one", "architecture"),
    [
        (Decoded("bfloat16", width=64, value_width=64, dtype=torch.bfloat16), 90),
        (Decoded("books of 16 bits", width=64, value_width=64, half_books=True, dtype=torch.bfloat16), 90),
        (Decoded("float16, a tile", queries=64, keys=200, heads=4, key_heads=2, dtype=torch.float16), 80),
        (Decoded("the first stretch", clusters=0, routed=0), 90),
        (Decoded("clusters alone", routed=0, plain=True), 80),
        (Decoded("float32"), 90),
    ],
    ids=str,
)
def test_attention_over_a_cache_compiles(one, architecture, monkeypatch):
    compiled = []

    def compile_only(self, *arguments):
        compiled.append(self.kernel.fn.__name__)
        _compile(self.kernel, arguments, self.flags, architecture)

    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    decode(decode_call(one))
    assert compiled == ["share_kernel", "join_kernel"]
