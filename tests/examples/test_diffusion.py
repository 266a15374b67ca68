"""examples/diffusion.py: layers are found, tuned and compiled, and what is stored says so."""

import importlib.util
import warnings
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PATH = Path(__file__).parents[2] / "examples" / "diffusion.py"


@pytest.fixture(scope="module")
def example():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing diffusers has to say
        pytest.importorskip("diffusers")
    spec = importlib.util.spec_from_file_location("diffusion", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
def test_tuned_and_compiled(example, capsys):
    row = example.run(example.unet(16, width=16), example.inputs(16), 0.1, "aot_eager")
    assert len(row["layers"]) == 4
    assert {tuple(figures["grid"]) for figures in row["layers"].values()} == {(16, 16), (8, 8)}
    assert all(figures["calls"] == 6 for figures in row["layers"].values())  # tuned, thrice timed after one, compiled
    assert row["output_error"] < 0.1
    assert row["compiled_difference"] < 1e-5
    assert any("77 keys, which are not the same grid" in why for why in row["left_alone"])
    assert "4 of 4 layers tuned for an error of at most 0.1" in capsys.readouterr().out
    text = example.shown(row)
    assert f"{row['dense_seconds']:.3g} s dense" in text
    assert f"output {100 * row['output_error']:.2f} % off" in text
