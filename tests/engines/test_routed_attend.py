"""Attending windows less the keys of routed clusters: results and gradients of every engine against the reference."""

import pytest
import torch

from support.cases import Case, assert_as_near_float64, gradients, named, parameter, size
from support.cluster_tails import run
from support.routed_calls import attend_call

CASES = [
    *(named(name) for name in ("rank 1", "rank 2", "rank 3", "unequal grids", "grouped heads", "one key head")),
    *(named(name) for name in ("mask of each head", "radius per axis", "extra", "dropout", "causal", "mean")),
    Case("several tiles", batch=2, heads=2, key_heads=1, grid=(17, 19), key_grid=(9, 11), width=6, value_width=5),
]


def everything(call, impl, double=False):
    names = [name for name in ("q", "k", "v", "k_extra", "v_extra") if getattr(call, name) is not None]
    given = [getattr(call, name).detach() for name in names]
    given = [(x.double() if double else x.clone()).requires_grad_() for x in given]
    made = run("attend", call._replace(**dict(zip(names, given, strict=True))), impl)
    return [x.detach() for x in (made.out, made.lse, *gradients(made, given))]


@pytest.mark.parametrize("case", [parameter(case, case) for case in CASES])
def test_keys_of_routed_clusters_are_left_out(engine, case):
    call = attend_call(case)
    truth, same = everything(call, "reference", True), everything(call, "reference")
    assert_as_near_float64(truth, same, everything(call, engine), size)
    free = run("attend", call._replace(label=None, routes=None), engine)
    assert not torch.equal(free.out, run("attend", call, engine).out)


def test_extra_keys_alone(impl):
    """No match at all: what is attended are the extra keys, whatever is routed."""
    call = attend_call(named("extra"))
    none = call._replace(index=call.index[..., :0])
    out, lse = run("attend", none, impl)
    a = call.scale * torch.einsum("bhxye,bhne->bhxyn", call.q, call.k_extra.repeat_interleave(2, 1))
    torch.testing.assert_close(lse, a.logsumexp(-1))
    torch.testing.assert_close(
        out, torch.einsum("bhxyn,bhnf->bhxyf", a.softmax(-1), call.v_extra.repeat_interleave(2, 1))
    )
