"""Files that several commands are tried on."""

import numpy as np
import pytest
from PIL import Image

from scram.cli.features import sample_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A photograph and the same moved by (2, -3), as files, and the true offsets."""
    folder = tmp_path_factory.mktemp("pair")
    a = (sample_pair(48)[0] * 255).byte()
    Image.fromarray(a.numpy()).save(folder / "a.png")
    Image.fromarray(a.roll((2, -3), (0, 1)).numpy()).save(folder / "b.png")
    truth = np.tile(np.array([-3.0, 2.0], np.float32), (*a.shape[:2], 1))
    truth[-8:], truth[:, :9] = np.nan, np.inf  # what left the picture
    np.save(folder / "truth.npy", truth)
    return folder
