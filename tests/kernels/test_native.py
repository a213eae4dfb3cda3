import logging
import shutil

import pytest
import torch

from semantide.kernels import native
from semantide.kernels.attention import beam_attention


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The loader as it is in another folder, with nothing loaded yet."""
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


@pytest.fixture(autouse=True)
def warnings_are_heard(caplog):
    """Also where an earlier test set another level."""
    caplog.set_level(logging.WARNING)


def attend():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(1, 2, 2, 4, generator=generator), *torch.randn(2, 3, 1, 4, generator=generator)
    own = torch.zeros(0, 1, 4)
    return beam_attention(q, k, v, torch.tensor([0, 3]), own, own, torch.zeros(1, 2, 0, dtype=torch.long))


def test_without_a_library_the_reference_runs_and_the_log_says_so_once(elsewhere, caplog):
    without = [attend() for _ in range(3)]
    assert len(caplog.records) == 1 and "not built" in caplog.text and "make native" in caplog.text
    assert native.instructions() is None
    native.library.cache_clear()
    torch.testing.assert_close(without[0], attend())


def test_a_damaged_library_is_passed_over(elsewhere, caplog):
    (elsewhere / f"_native{native.importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    assert native.library() is None and "cannot be loaded" in caplog.text
    attend()


def test_a_library_of_another_version_is_passed_over(tmp_path, monkeypatch, caplog):
    if native.library() is None:
        pytest.skip("the C++ kernels are not built: run `make native`")
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    native.library.cache_clear()
    try:
        assert native.library() is None and f"not {native.VERSION}" in caplog.text
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


def test_the_kernels_are_built_where_there_is_a_compiler():
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler on this machine")
    assert native.library() is not None
