"""The command line: what it prints, what it writes, how it fails."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import sleep

import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import scram
from scram.cli import console as console_module
from scram.cli import main
from scram.cli.app import app
from scram.cli.features import PatchFeatures, read_picture
from scram.cli.pca import principal_axes
from scram.cli.pictures import offsets, wheel_colours

SMALL = Path(__file__).parent.parent / "src/scram/cli/data/city_a.jpg"
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
    for meaning in (
        "recall@1: share of queries",
        "captured mass: share of the exact",
        "output error: |output - exact output|",
    ):
        assert meaning in printed
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
    assert "pip install '.[cli]'" in complaint


def test_hints_name_the_extras_as_the_readme_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "skimage", None)  # type: ignore[arg-type]
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    complaint = call("denoise", "camera", "--out", tmp_path)[2]
    assert complaint.startswith("scram: scikit-image is not installed")
    assert complaint.count("\n") == 1
    assert complaint[complaint.index("pip install") :].strip() in readme
    (tmp_path / "a.png").write_bytes(SMALL.read_bytes())
    monkeypatch.setitem(sys.modules, "cv2", None)  # type: ignore[arg-type]
    printed = call("denoise", tmp_path / "a.png", "--add-noise", 25, "--out", tmp_path)[1]
    hint = next(line for line in printed.splitlines() if line.startswith("skimage, cv2 are not installed"))
    assert hint.endswith("pip install '.[cli,bench]'")


LIGHT = """
import sys
from scram.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["scram", *line.split()]
    try:
        main()
    except SystemExit as stop:
        heavy = [name for name in ("torch", "numpy", "numba", "matplotlib", "PIL") if name in sys.modules]
        print(f"@{line}|{stop.code}|{heavy}", flush=True)
"""


def test_help_and_wrong_arguments_import_nothing_heavy(tmp_path: Path) -> None:
    right = ("--help", "--version", "match --help", "bench --help")
    wrong = (
        "sideways", "demo --sise 3", "demo --size tall", "demo --size 3", "match a.png", "match none.png none.png",
        "match --sample citty", "match --sample city --scale nan", "denoise cofee", "denoise camera --patch 4",
        "denoise camera --device tpu", "figures --only everything", "figures --data none", "bench --sizes a",
        "bench --widths 5000", "bench --parts sideways", "bench --out {}/file/x",
    )  # fmt: skip
    (tmp_path / "file").write_text("")
    lines = [line.format(tmp_path) for line in (*right, *wrong)]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], input="\n".join(lines), capture_output=True, text=True, check=True, cwd=tmp_path
    )
    found = [line[1:].split("|") for line in done.stdout.splitlines() if line.startswith("@")]
    assert found == [[line, "0" if line in right else "2", "[]"] for line in lines]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_flags_take_no_value_in_the_help() -> None:
    for name in ("", "demo", "match", "denoise", "figures", "bench", "coherence", "info"):
        printed = call(*name.split(), "--help")[1]
        assert "--help" in printed
        assert "<bool>" not in printed
    assert re.search("--json +Print", call("info", "--help")[1])


INTERRUPTED = """
import signal, sys, time
from scram.cli import demo, main
def wait(*_):
    print("ready", flush=True, file=sys.__stdout__)  # rich redirects sys.stdout
    time.sleep(60)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it
demo.pair_of = wait
sys.argv = ["scram", "demo", "--out", "new/folder"]
main()
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_interrupt_is_one_line_at_once(terminal: bool, tmp_path: Path) -> None:
    screen, stderr = os.openpty() if terminal else os.pipe()
    printed: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the end of a terminal
            while text := os.read(screen, 1 << 12):
                printed.append(text)

    reader = Thread(target=read)
    reader.start()
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=-1, stderr=stderr, cwd=tmp_path)
    os.close(stderr)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == 130
        finally:
            process.kill()
            reader.join()
            os.close(screen)
    text = b"".join(printed).decode()
    assert "scram: interrupted" in text
    assert "Traceback" not in text
    assert terminal or text == "scram: interrupted\n"
    assert not (tmp_path / "new").exists()


def test_a_folder_is_kept_once_it_holds_something(tmp_path: Path) -> None:
    with pytest.raises(KeyError), console_module.output_folder(tmp_path / "new" / "empty"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    with pytest.raises(KeyError), console_module.output_folder(tmp_path / "old"):
        raise KeyError
    assert (tmp_path / "old").exists()
    with console_module.output_folder(tmp_path / "new" / "full"):
        (tmp_path / "new" / "full" / "row").write_text("")
    assert (tmp_path / "new" / "full" / "row").exists()


def test_unknown_photograph_lists_the_samples(tmp_path: Path) -> None:
    code, printed, complaint = call("denoise", "cofee", "--out", tmp_path / "new")
    assert (code, printed) == (2, "")
    for words in (
        "cofee: No such file or sample",
        "did you mean coffee?",
        "astronaut, camera, chelsea, coffee, retina",
    ):
        assert words in complaint
    assert "did you mean" not in call("denoise", "zzz")[2]


def test_each_stage_has_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(console_module, "console", lambda stderr=False: screen)
    with console_module.progress() as step:
        step("first")
        sleep(1.3)
        step("second")
        sleep(0.3)
    assert isinstance(screen.file, io.StringIO)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.file.getvalue())
    clocks = {stage: set(re.findall(rf"{stage} ([\d:]+)", text)) for stage in ("first", "second")}
    assert clocks == {"first": {"0:00:00", "0:00:01"}, "second": {"0:00:00"}}


def test_demo_names_measuring_apart_from_searching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stages: list[str] = []
    screen = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(console_module, "console", lambda stderr=False: screen)
    monkeypatch.setattr(console_module.Progress, "reset", lambda self, task, description: stages.append(description))
    call("demo", "--size", 20, "--out", tmp_path)
    for name in ("paper", "default"):
        compiles, runs, measures = (stage for stage in stages if stage.startswith(f"{name} setting"))
        assert "may compile" in compiles
        assert "search and attend" in runs
        assert "exact attention" in measures


@pytest.mark.parametrize("points", [torch.rand(20, 5, dtype=torch.float64), torch.full((20, 5), torch.nan)])
def test_pca_runs_on_one_thread_and_gives_the_others_back(
    points: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, used = torch.linalg.eigh, []

    def eigh(x: torch.Tensor) -> torch.Tensor:
        used.append(torch.get_num_threads())
        return real(x)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        mean, variances, axes = principal_axes(points)
        around = points - mean
        torch.testing.assert_close(axes.T @ (around.T @ around) @ axes / 20, variances.diag())
    except torch.linalg.LinAlgError:
        assert points.isnan().all()
    finally:
        after = torch.get_num_threads()
        torch.set_num_threads(before)
    assert (used, after) == ([1], before + 1)


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
