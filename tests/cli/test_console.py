"""The console: a clock for each stage, folders that are removed when they stay empty."""

import io
import re
from pathlib import Path
from time import sleep

import pytest
from rich.console import Console

from scram.cli import console as console_module


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


def test_a_complaint_is_one_line_of_letters(capsys: pytest.CaptureFixture[str]) -> None:
    console_module.complain("a name\x1b[31m\x07 of\n\x0ca file: größer")
    assert capsys.readouterr().err == "scram: a name?[31m? of a file: größer\n"


@pytest.mark.slow
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
