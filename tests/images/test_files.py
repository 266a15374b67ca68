"""No half-written file ever stands where a whole one was."""

import os
import stat

import pytest

from scram.images.files import replacing


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    path = tmp_path / "a.png"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.suffix == ".png"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.png"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["error", "Ctrl-C"])
def test_an_error_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "a.png"
    path.write_text("old")

    def half():
        with replacing(path) as temporary:
            temporary.write_text("ne")
            raise error

    with pytest.raises(error):
        half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.png"]


def test_links_and_rights_are_those_of_an_ordinary_file(tmp_path):
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    with replacing(tmp_path / "link.txt") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"
    (tmp_path / "plain.txt").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("real.txt", "plain.txt")}
    assert len(modes) == 1
    with replacing("/dev/null") as temporary:
        temporary.write_text("nothing is replaced")
    assert not os.path.isfile("/dev/null")


def test_errors_name_the_file_that_was_asked_for(tmp_path):
    def missing():
        with replacing(tmp_path / "no" / "a.png") as temporary:
            temporary.write_text("")

    with pytest.raises(FileNotFoundError) as caught:
        missing()
    assert caught.value.filename == str(tmp_path / "no" / "a.png")
