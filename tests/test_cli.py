"""The command line: what it prints, what it writes, how it fails."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import scram
from scram.cli import main
from scram.cli.app import app
from scram.cli.features import PatchFeatures, read_picture
from scram.cli.pictures import offsets, wheel_colours

PICTURES = ("photo_a", "photo_b", "rebuilt", "matches_paper", "matches_default", "error", "demo")
MEASURES = ("recall", "captured_mass", "output_error", "psnr_db")


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_demo_writes_pictures_and_a_table(tmp_path: Path) -> None:
    code, printed, complaints = call("demo", "--size", 24, "--out", tmp_path / "new" / "folder")
    assert (code, complaints) == (0, "")
    for heading in ("grid", "time", "recall@1", "captured mass", "output error", "24 x 43", "dense, torch SDPA"):
        assert heading in printed
    for name in PICTURES:
        with Image.open(tmp_path / "new" / "folder" / f"{name}.png") as picture:
            assert picture.size == (43, 24) or name == "demo"
    numbers = json.loads((tmp_path / "new" / "folder" / "demo.json").read_text())
    for setting in ("paper", "default"):
        row = numbers["settings"][setting]
        assert all(math.isfinite(row[name]) for name in MEASURES)
        assert 0.5 < row["recall"] <= 1
        assert 0 < row["captured_mass"] <= 1 + 1e-5
        assert 0 <= row["output_error"] < 1
        assert all(seconds > 0 for seconds in row["seconds"].values())


def test_demo_prints_json_and_only_json(tmp_path: Path) -> None:
    code, printed, _ = call("demo", "--size", 20, "--json", "--seed", 3, "--out", tmp_path)
    assert code == 0
    assert json.loads(printed) == json.loads((tmp_path / "demo.json").read_text())
    assert json.loads(printed)["seed"] == 3


@pytest.mark.parametrize(("size", "queries", "extrapolated"), [(20, 20 * 36, False), (32, 1024, True)])
def test_demo_says_whether_dense_was_extrapolated(tmp_path: Path, size: int, queries: int, extrapolated: bool) -> None:
    printed = " ".join(call("demo", "--size", size, "--out", tmp_path)[1].split())
    dense = json.loads((tmp_path / "demo.json").read_text())["dense"]
    assert (dense["timed_queries"], dense["extrapolated"]) == (queries, extrapolated)
    assert ("extrapolated from 1024 queries" in printed) == extrapolated


def test_demo_repeats_itself(tmp_path: Path) -> None:
    first, second, other = (
        json.loads(call("demo", "--size", 24, "--json", "--seed", seed, "--out", tmp_path)[1])["settings"]
        for seed in (0, 0, 1)
    )
    assert [[row[name] for name in MEASURES] for row in first.values()] == [
        [row[name] for name in MEASURES] for row in second.values()
    ]
    assert first["paper"]["psnr_db"] != other["paper"]["psnr_db"]


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, printed, complaints = call("demo", "--size", 24, "--out", tmp_path / "file" / "folder")
    assert (code, printed) == (2, "")
    assert complaints.startswith("scram: ")
    assert complaints.count("\n") == 1
    assert str(tmp_path / "file") in complaints


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "scram", "info"], capture_output=True, text=True, check=True)
    assert scram.__version__ in done.stdout


def test_info_names_versions_and_implementations() -> None:
    code, printed, _ = call("info")
    assert code == 0
    assert scram.__version__ in printed
    assert torch.__version__ in printed
    assert "reference" in printed
    found = json.loads(call("info", "--json")[1])
    reference = next(one for one in found["implementations"] if one["name"] == "reference")
    assert reference["reasons"] == []


def test_version_and_help() -> None:
    assert call("--version") == (0, f"scram {scram.__version__}\n", "")
    code, printed, _ = call("--help")
    assert code == 0
    for word in ("demo", "info", "Examples"):
        assert word in printed


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "PIL", None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert "typer, pillow" in complaint
    assert 'pip install "scram-attention[cli]"' in complaint


def test_importing_scram_leaves_the_command_line_alone() -> None:
    code = "import sys, scram; print([m for m in ('scram.cli', 'typer', 'rich', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_features_are_the_projection_of_every_patch() -> None:
    picture = torch.rand(9, 12, 3, generator=torch.Generator().manual_seed(0))
    whole = PatchFeatures.fit(picture, width=75, patch=5, stride=1)(picture)
    padded = torch.nn.functional.pad(picture.movedim(-1, 0)[None], [2] * 4, mode="reflect")
    patches = torch.nn.functional.unfold(padded, 5)[0].T
    centred = torch.nn.functional.normalize(patches - patches.mean(0), dim=-1)
    torch.testing.assert_close(whole.norm(dim=-1), torch.ones(1, 1, 9, 12))
    # A full basis only turns the patches: their cosines stay.
    flat = whole.reshape(-1, 75)
    torch.testing.assert_close(flat @ flat.T, centred @ centred.T, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"patch": 4}, "odd"), ({"patch": 3, "width": 28}, "1..27"), ({"patch": 25}, "too small")],
)
def test_features_refuse_bad_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatchFeatures.fit(torch.rand(12, 12, 3), **settings)


def test_picture_keeps_its_aspect(tmp_path: Path) -> None:
    Image.new("L", (40, 20), 128).save(tmp_path / "grey.png")
    picture = read_picture(tmp_path / "grey.png", height=10)
    assert picture.shape == (10, 20, 3)
    torch.testing.assert_close(picture, torch.full_like(picture, 128 / 255))


def test_offsets_point_from_query_to_key() -> None:
    index = torch.tensor([[0, 1], [5, -1]], dtype=torch.int32).reshape(1, 1, 2, 2, 1)
    field = offsets(scram.Matches(index, torch.zeros(index.shape), (2, 3)))
    assert field[:, :, 0].tolist()[0] == [0, 0]
    assert field[1, 0].tolist() == [0, 2]
    assert field[1, 1].isnan().all()
    colours = wheel_colours(field, limit=4)
    assert colours[1, 1].tolist() == [0.5] * 3
    assert colours[0, 0].std() == 0
    red, green, blue = colours[1, 0].tolist()
    assert red > green == pytest.approx(blue)
