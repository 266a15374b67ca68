"""Torch's operators on one thread, in this Python thread alone, and the number that it had."""

import threading

import pytest
import torch

from scram._compat import openmp
from scram._compat.openmp import ONE_THREAD, num_threads


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def mkl_threads():
    read = getattr(openmp._library(), "MKL_Get_Max_Threads", None)
    return 1 if read is None else read()


def test_the_private_parts_of_torch_are_what_they_were():
    assert openmp._library() is not None


def test_operators_take_one_thread_inside_and_as_many_as_before_outside():
    before = mkl_threads()
    with ONE_THREAD:
        with ONE_THREAD:
            assert (torch.get_num_threads(), mkl_threads(), num_threads()) == (1, 1, 2)
        assert (torch.get_num_threads(), mkl_threads(), num_threads()) == (1, 1, 2)
    assert (torch.get_num_threads(), mkl_threads(), num_threads()) == (2, before, 2)


def test_an_error_inside_gives_the_threads_back():
    with pytest.raises(KeyError), ONE_THREAD:
        raise KeyError
    assert (torch.get_num_threads(), num_threads()) == (2, 2)


def test_other_python_threads_keep_theirs():
    seen = []
    with ONE_THREAD:
        other = threading.Thread(target=lambda: seen.append((torch.get_num_threads(), num_threads())))
        other.start()
        other.join()
    assert seen == [(2, 2)]


def test_without_the_library_operators_keep_their_threads(monkeypatch):
    monkeypatch.setattr(openmp, "_library", lambda: None)
    with ONE_THREAD:
        assert (torch.get_num_threads(), num_threads()) == (2, 2)
    assert torch.get_num_threads() == 2
