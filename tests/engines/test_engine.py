"""One protocol, three engines: each has the functions of the protocol and says as data what it cannot do."""

import inspect

import pytest
import torch

from scram import engines
from scram.engines import dispatch

METHODS = {name: function for name, function in vars(engines.Engine).items() if not name.startswith("_")}
BACKWARD = {name for name in METHODS if name.endswith("_backward")}


def loaded(impl):
    if impl == "triton":
        pytest.importorskip("triton")
    return dispatch.engine(impl)


def test_the_protocol_is_seen():
    stages = {"attend", "earlier", "drawn_tail", "sample", "cluster", "cluster_tail", "window_scores"}
    assert stages | {"search", "clear_caches"} <= METHODS.keys()
    assert {f"{stage}_backward" for stage in stages} == BACKWARD


@pytest.mark.parametrize("impl", dispatch.ENGINES)
def test_an_engine_has_every_function_of_the_protocol(impl):
    """But for backward functions where autograd sees through it."""
    engine, spec = loaded(impl), dispatch.ENGINES[impl]
    assert all(hasattr(engine, name) != spec.plain_torch for name in BACKWARD)
    for name in METHODS.keys() - (BACKWARD if spec.plain_torch else set()):
        wanted = list(inspect.signature(METHODS[name]).parameters)[1:]  # without self
        assert list(inspect.signature(getattr(engine, name)).parameters) == wanted, name


@pytest.mark.parametrize("impl", dispatch.ENGINES)
def test_what_an_engine_cannot_do_is_data_beside_it(impl):
    spec = dispatch.ENGINES[impl]
    needs = engines.Needs(torch.device(spec.devices[0] if spec.devices else "cpu"), spec.dtypes[0])
    able = engines.EngineSpec(impl, None, spec.devices, spec.dtypes, most_tile_matches=5)
    assert able.reasons(needs) == []
    for change, word in (
        ({"device": torch.device("meta")}, "these are on meta"),
        ({"dtype": torch.int8}, "does not take int8"),
        ({"callable_score": True}, "callable score"),
        ({"tile_matches": 6}, "at most 5 matches, got 6"),
    ):
        if "device" in change and spec.devices is None:
            continue
        (reason,) = able.reasons(needs._replace(**change))
        assert word in reason
