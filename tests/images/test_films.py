"""Films and folders of frames: read one at a time, written whole, kept playable after Ctrl-C."""

import os
from fractions import Fraction

import pytest
import torch

from scram.images.films import FolderWriter, Writer, open_film
from scram.images.reading import Picture, read, write


def frames(count, size=(48, 64)):
    row, column = torch.meshgrid(torch.linspace(0, 1, size[0]), torch.linspace(0, 1, size[1]), indexing="ij")
    return [Picture(torch.stack((row, column, torch.full_like(row, n / count)), -1)) for n in range(count)]


def test_a_folder_of_frames_there_and_back(tmp_path):
    (tmp_path / "in").mkdir()
    for n, picture in enumerate(frames(3)):
        write(Picture(picture.pixels, bits=16), tmp_path / "in" / f"f{n}.png")
    (tmp_path / "in" / "notes.txt").write_text("no picture")
    film = open_film(tmp_path / "in")
    assert (film.count, film.names) == (3, ["f0", "f1", "f2"])
    with FolderWriter(tmp_path / "out", film.names) as writer:
        for picture in film.frames:
            writer.write(picture)
    assert sorted(os.listdir(tmp_path / "out")) == ["f0.png", "f1.png", "f2.png"]
    again = read(tmp_path / "out" / "f1.png")
    assert again.bits == 16
    assert torch.equal(again.pixels, read(tmp_path / "in" / "f1.png").pixels)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="a folder without pictures"):
        open_film(tmp_path / "none")


@pytest.mark.parametrize("size", [(48, 64), (47, 63)], ids=["even", "odd"])
def test_a_film_there_and_back(tmp_path, size):
    pytest.importorskip("av")
    with Writer(tmp_path / "a.mp4", Fraction(30)) as writer:
        for picture in frames(5, size):
            writer.write(picture)
    assert os.listdir(tmp_path) == ["a.mp4"]
    film = open_film(tmp_path / "a.mp4")
    assert (film.count, film.rate) == (5, 30)
    for got, want in zip(film.frames, frames(5, size), strict=True):
        assert float((got.pixels - want.pixels).abs().mean()) < 0.03


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError], ids=["Ctrl-C", "error"])
def test_what_is_left_of_a_film(tmp_path, error):
    pytest.importorskip("av")
    (tmp_path / "a.mp4").write_text("an older film")

    def stopped():
        with Writer(tmp_path / "a.mp4", Fraction(25)) as writer:
            for picture in frames(3):
                writer.write(picture)
            raise error

    with pytest.raises(error):
        stopped()
    assert (tmp_path / "a.mp4").read_text() == "an older film"
    kept = {"a.mp4", "a-interrupted.mp4"} if error is KeyboardInterrupt else {"a.mp4"}
    assert set(os.listdir(tmp_path)) == kept
    if error is KeyboardInterrupt:
        assert len(list(open_film(tmp_path / "a-interrupted.mp4").frames)) == 3


def test_what_is_no_film(tmp_path):
    pytest.importorskip("av")
    with pytest.raises(FileNotFoundError):
        open_film(tmp_path / "none.mp4")
    (tmp_path / "a.mp4").write_text("text")
    with pytest.raises(ValueError, match="not a film that FFmpeg reads"):
        open_film(tmp_path / "a.mp4")
