"""Names of string options: the types of signatures and the values that are checked are the same."""

import inspect
from pathlib import Path
from typing import get_args

import pytest
import torch

import scram
from scram import options
from scram.engines import dispatch
from scram.nn import NonLocalBlock
from scram.spec.schedule import PROPAGATE

GRID = torch.randn(1, 1, 8, 8, 4)


def test_checks_read_the_types():
    assert get_args(options.ScoreName) == options.SCORES
    assert get_args(options.Weight) == options.WEIGHTS
    assert get_args(options.Method) == options.METHODS
    assert get_args(options.Impl) == options.IMPLS
    assert get_args(options.Form) == NonLocalBlock.FORMS


def test_data_of_the_engines_have_the_names_of_the_types():
    assert get_args(options.Propagate) == tuple(PROPAGATE)
    assert get_args(options.Impl)[1:] == tuple(name for name, _ in dispatch.implementations())


@pytest.mark.parametrize("method", get_args(options.Method))
@pytest.mark.parametrize("propagate", get_args(options.Propagate))
@pytest.mark.parametrize("start", get_args(options.Start))
def test_every_name_of_a_search_is_taken(method, propagate, start):
    made = scram.Search(method, propagate=propagate, start=start)
    assert (made.propagate, made.start) == (propagate, start)


def test_every_score_and_weight_is_taken_and_is_another():
    how = {"search": scram.Search(seed=0), "impl": "reference"}
    names = [(score, weight) for score in get_args(options.ScoreName) for weight in get_args(options.Weight)]
    outs = [scram.attention(GRID, GRID, GRID, score=score, weight=weight, **how) for score, weight in names]
    for n, one in enumerate(outs):
        assert not any(torch.allclose(one, other) for other in outs[:n]), names[n]


def test_public_signatures_name_their_options():
    """No option with a set of names is a plain str."""
    shown = {
        "impl": "Impl",
        "weight": "Weight",
        "method": "Method",
        "propagate": "Propagate",
        "start": "Start",
        "score": "Score",
        "form": "Form",
        "layout": "JudgedLayout",
        "search": "Auto",
        "tail": "Auto",
        "grid": "Auto",
    }
    public = [getattr(scram, name) for name in scram.__all__]
    functions = [x for x in public if inspect.isfunction(x)]
    seen = set()
    for function in [*functions, scram.Search, scram.nn.GridAttention, scram.nn.NonLocalBlock]:
        for name, one in inspect.signature(function).parameters.items():
            plain = str(one.annotation).split(" | ")
            if name in shown and isinstance(one.default, str):
                assert {shown[name], "Tail"} & set(plain), (function, name, plain)  # Tail of scram.nn holds Auto
                assert "str" not in plain, (function, name)
                seen.add(name)
    assert seen == set(shown)


def test_the_package_has_one_place_for_them():
    package = Path(scram.__file__).parent
    others = [path.name for path in package.rglob("*.py") if 'Literal["' in path.read_text() and path.stem != "options"]
    assert others == []
