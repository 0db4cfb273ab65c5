"""A file's digest is one whichever way it is made; errors of the disk are errors."""

import os

import pytest

from compass_jax.weights import digests

PIECE = digests.PIECE
SIZES = (0, 1, 4096, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 4097)


@pytest.mark.parametrize("size", SIZES)
def test_mapped_read_and_in_memory_give_one_digest(size, tmp_path, monkeypatch):
    data = os.urandom(size)
    (tmp_path / "x").write_bytes(data)
    expected = digests.of_bytes(data)
    assert expected.size == size
    assert digests.of_files(tmp_path, ["x"]) == {"x": expected}
    monkeypatch.setattr(digests, "_mapped", lambda descriptor, start: None)
    assert digests.of_files(tmp_path, ["x"]) == {"x": expected}


def test_a_page_that_cannot_be_populated_is_read_instead(tmp_path):
    """Asking for pages of a piece fails where the file ends before it; nothing is touched then."""
    (tmp_path / "x").write_bytes(b"x" * 100)
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    try:
        assert digests._mapped(descriptor, PIECE) is None
        assert digests._mapped(descriptor, 0)[0] == 100
        os.ftruncate(write := os.open(tmp_path / "x", os.O_RDWR), 0)
        os.close(write)
        assert digests._mapped(descriptor, 0) is None
    finally:
        os.close(descriptor)


def test_what_the_system_refuses_to_populate_is_read(tmp_path, monkeypatch):
    """A kernel before 5.14 does not know the request."""
    (tmp_path / "x").write_bytes(b"x" * 5000)
    expected = digests.of_bytes(b"x" * 5000)
    monkeypatch.setattr(digests, "_POPULATE_READ", 9999)
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    assert digests._mapped(descriptor, 0) is None
    os.close(descriptor)
    assert digests.of_files(tmp_path, ["x"]) == {"x": expected}


def test_a_file_that_is_not_there_is_an_error_of_its_own(tmp_path):
    found = digests.of_files(tmp_path, ["gone"])
    assert isinstance(found["gone"], FileNotFoundError)
