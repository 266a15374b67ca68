"""Sizes and rectangles of pictures."""

import pytest

from scram.cli.arguments import picture_size, rectangle


def test_sizes_and_rectangles_of_pictures():
    assert picture_size("320x240") == (320, 240)
    assert picture_size("320X") == (320, None)
    assert picture_size("x7") == (None, 7)
    assert rectangle("1, 2,3,4") == (1, 2, 3, 4)
    for wrong in ("1,2,3", "1,2,3,0", "a,2,3,4", "-1,2,3,4"):
        with pytest.raises(ValueError, match="left,top,width,height"):
            rectangle(wrong)
