"""Layers of a model: which module calls, what grid its tokens are, hooks for compiled code, plans as one file."""

import gc
import json
import weakref

import pytest
import torch
from torch import nn

import scram
from scram.integrations.layers import Hooks, Layer, Plans, Tokens, name_in, table


def test_names_of_modules():
    inner = nn.Identity()
    outer = nn.Sequential(nn.Identity(), nn.Sequential(inner))
    assert name_in(outer, inner) == "1.0"
    assert name_in(outer, nn.ReLU()) == "ReLU"


def test_plans_are_one_file(tmp_path):
    q = torch.randn(1, 1, 16, 16, 8)
    plans = Plans({"a": scram.tune(q, q, q), "b": scram.tune(q, q, q, error=0.5)})
    plans.save(tmp_path / "plans.json")
    assert Plans.load(tmp_path / "plans.json") == plans
    with pytest.raises(FileNotFoundError):
        Plans.load(tmp_path / "none.json")


def test_plans_are_part_of_a_checkpoint(tmp_path):
    q = torch.randn(1, 1, 16, 16, 8)
    plans, other = Plans({"a": scram.tune(q, q, q)}), Plans({"b": scram.tune(q, q, q, error=0.5)})
    torch.save({"plans": plans.state_dict()}, tmp_path / "checkpoint")
    other.load_state_dict(torch.load(tmp_path / "checkpoint", weights_only=True)["plans"])
    assert other == plans
    for wrong in ({}, {"json": "{}"}, {"json": "no JSON"}, None):
        with pytest.raises(ValueError, match=r"state_dict must be what Plans.state_dict returned: "):
            other.load_state_dict(wrong)
    assert other == plans


@pytest.mark.parametrize(
    "change",
    [
        lambda data: [],
        lambda data: {**data, "format": "scram.Plan"},
        lambda data: {**data, "version": 2},
        lambda data: {**data, "layers": {"a": {}}},
        lambda data: {**data, "layers": 3},
        lambda data: {name: x for name, x in data.items() if name != "layers"},
    ],
)
def test_another_file_is_refused(tmp_path, change):
    path = tmp_path / "plans.json"
    Plans().save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=r"plans.json holds no plans that Plans.save wrote"):
        Plans.load(path)


def test_hooks_are_there_while_somebody_needs_them():
    hooks, module = Hooks(), nn.Identity()
    hooks.add("one", module)
    assert not module._forward_hooks
    hooks.attach()
    hooks.attach()
    hooks.add("one", module)
    assert len(module._forward_hooks) == len(module._forward_pre_hooks) == 1
    late = nn.Identity()
    hooks.add("two", late)
    assert len(late._forward_hooks) == 1
    hooks.detach()
    assert len(module._forward_hooks) == 1
    module(late(torch.zeros(1)))
    assert hooks.running == []  # only while torch compiles
    hooks.detach()
    assert not module._forward_hooks
    assert not late._forward_pre_hooks
    hooks.attach()
    assert len(module._forward_hooks) == 1


def test_hooks_keep_no_module_alive():
    hooks, module = Hooks(), nn.Identity()
    gone = weakref.ref(module)
    hooks.add("one", module)
    hooks.attach()
    del module
    gc.collect()
    assert gone() is None
    hooks.detach()
    hooks.attach()
    assert not hooks._handles


def test_a_line_for_each_layer():
    q = torch.randn(1, 1, 16, 16, 8)
    layers = [
        Layer("first", Tokens((16, 16), 1), scram.tune(q, q, q), searched=3, clustered=4, dense=7, left_alone=5),
        Layer("second", Tokens((4, 4)), why_not="why"),
        Layer("third", why_not="text", left_alone=2),
    ]
    lines = table(layers, 0.05).splitlines()
    assert lines[0].split()[-5:] == ["searched", "clustered", "dense", "to", "torch"]
    assert lines[1].split()[-4:] == ["3", "4", "7", "5"]
    assert lines[1].startswith("first   1 + 16 x 16  dense attention")
    assert lines[2].split("  ")[0] == "second"
    assert "default settings: why" in lines[2]
    assert lines[3].startswith("third  ")
    assert "left to torch: text" in lines[3]
    assert lines[4].startswith("1 of 2 layers tuned for an error of at most 0.05, 1 left to torch: ")
