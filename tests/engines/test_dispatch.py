"""Which engine runs: every reason is given, a name never falls back."""

import pytest
import torch

import scram
from scram import engines
from scram.engines import dispatch

CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))


def reasons(name, **request):
    return dispatch.ENGINES[name].reasons(engines.Needs(**{"device": CPU, "dtype": torch.float32, **request}))


def test_reference_runs_everything():
    assert reasons("reference", device=META, dtype=torch.float64, callable_score=True) == []


def test_numba_is_for_cpu_tensors_and_named_scores():
    assert reasons("numba") == reasons("numba", dtype=torch.bfloat16) == reasons("numba", dtype=torch.float64) == []
    assert reasons("numba", device=CUDA) == ["it runs on CPU tensors, these are on cuda"]
    assert reasons("numba", callable_score=True) == ["a callable score runs in the reference only"]


def test_triton_is_for_cuda_tensors(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(engines, "INSTALLED", {"numba": True, "triton": True})
    assert reasons("triton", device=CUDA) == reasons("triton", device=CUDA, dtype=torch.bfloat16) == []
    assert reasons("triton", device=CPU) == ["it runs on CUDA tensors, these are on cpu"]
    assert reasons("triton", device=CPU, explicit=True) == ["it runs on CUDA tensors, these are on cpu"]
    assert "float64" in " ".join(reasons("triton", device=CUDA, dtype=torch.float64))
    assert "callable" in " ".join(reasons("triton", device=CUDA, callable_score=True))


def test_triton_takes_cpu_tensors_in_its_interpreter_by_name_only(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(engines, "INSTALLED", {"numba": True, "triton": True})
    assert reasons("triton", explicit=True) == []
    assert reasons("triton", explicit=False) == ["it runs on CUDA tensors, these are on cpu"]
    assert dispatch.choose("triton", CPU, torch.float32).name == "triton"
    assert dispatch.choose("auto", CPU, torch.float32).name == "numba"


def test_a_missing_package_is_a_reason(monkeypatch):
    monkeypatch.setattr(engines, "INSTALLED", {"numba": False, "triton": False})
    assert reasons("numba") == ["the package numba is not installed"]
    assert "the package triton is not installed" in reasons("triton", device=CUDA)
    assert dispatch.choose("auto", CPU, torch.float32).name == "reference"


@pytest.mark.parametrize(
    ("device", "dtype", "score", "chosen"),
    [
        (CPU, torch.float32, "dot", "numba"),
        (CPU, torch.float64, "l2", "numba"),
        (CPU, torch.float32, torch.dot, "reference"),
        (CUDA, torch.bfloat16, "dot", "triton"),
        (CUDA, torch.float64, "dot", "reference"),
        (CUDA, torch.float32, torch.dot, "reference"),
        (META, torch.float32, "dot", "reference"),
    ],
)
def test_auto_takes_the_first_that_can(monkeypatch, device, dtype, score, chosen):
    monkeypatch.setattr(engines, "INSTALLED", {"numba": True, "triton": True})
    assert dispatch.choose("auto", device, dtype, score).name == chosen


def test_a_name_never_falls_back_and_every_reason_is_given(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(engines, "INSTALLED", {"numba": False, "triton": False})
    with pytest.raises(ValueError, match="impl='triton' cannot run this call") as error:
        dispatch.choose("triton", CPU, torch.float64, torch.dot)
    message = str(error.value)
    for reason in ("triton: the package triton is not installed", "callable score", "these are on cpu", "float64"):
        assert reason in message
    assert "numba" not in message
    with pytest.raises(ValueError, match="these are on cuda"):
        dispatch.choose("numba", CUDA, torch.float32)


@pytest.mark.parametrize("call", [scram.search, scram.attend, scram.attention])
def test_public_functions_ask(call, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(1, 1, 4, 2)
    given = {scram.search: (x, x), scram.attend: (x, x, x, scram.exact_search(x, x)), scram.attention: (x, x, x)}[call]
    with pytest.raises(ValueError, match="impl='triton' cannot run this call"):
        call(*given, impl="triton")
    with pytest.raises(ValueError, match="impl must be one of 'auto', 'triton', 'numba', 'reference', got 'cuda'"):
        call(*given, impl="cuda")


def test_a_tile_search_of_many_matches_is_not_for_triton(monkeypatch):
    monkeypatch.setattr(engines, "INSTALLED", {"numba": True, "triton": True})
    assert dispatch.choose("auto", CUDA, torch.float32, tile_matches=32).name == "triton"
    assert dispatch.choose("auto", CUDA, torch.float32, tile_matches=33).name == "reference"
    with pytest.raises(ValueError, match="its tile search keeps at most 32 matches, got 33; method='query' keeps any"):
        dispatch.choose("triton", CUDA, torch.float32, tile_matches=33)


def test_a_tile_search_is_not_for_numba():
    assert dispatch.choose("auto", CPU, torch.float32, tile_matches=1).name == "reference"
    q, k = torch.randn(1, 1, 5, 4, 2), torch.randn(1, 1, 3, 4, 2)
    settings = scram.Search("tile", sweeps=1, seed=0)
    for call in (
        lambda: scram.search(q, k, search=settings, impl="numba"),
        lambda: scram.attention(q, k, k, search=settings, impl="numba"),
    ):
        with pytest.raises(ValueError, match="numba: it has no tile search; the reference does, on any device"):
            call()
    found = scram.search(q, k, search=settings)
    assert torch.equal(found.index, scram.search(q, k, search=settings, impl="reference").index)


def test_the_engine_that_was_chosen_runs(monkeypatch):
    ran = []

    class Noted(dict):
        def get(self, name):
            ran.append(name)
            return super().get(name)

    monkeypatch.setattr(dispatch, "loaded", Noted(dispatch.loaded))
    x = torch.zeros(1, 1, 4, 2)
    for impl, expected in (("reference", "reference"), ("numba", "numba"), ("auto", "numba")):
        scram.attention(x, x, x, search=scram.Search(), tail=None, impl=impl)
        assert ran == [expected, expected]  # search and attend
        ran.clear()


def test_implementations_lists_all():
    assert [name for name, _ in dispatch.implementations()] == ["triton", "numba", "reference"]
    assert dict(dispatch.implementations("cuda"))["numba"] == ["it runs on CPU tensors, these are on cuda"]
