"""A file's digest is one whichever way it is made; errors of the disk are errors."""

import os

import pytest

from compass_jax.weights import digests

PIECE = digests.PIECE
SIZES = (0, 1, 4096, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 4097)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_and_its_bytes_have_one_digest(size, tmp_path):
    data = os.urandom(size)
    (tmp_path / "x").write_bytes(data)
    expected = digests.of_bytes(data)
    assert expected.size == size
    assert digests.of_files(tmp_path, ["x"]) == {"x": expected}


def test_a_file_that_is_not_there_is_an_error_of_its_own(tmp_path):
    found = digests.of_files(tmp_path, ["gone"])
    assert isinstance(found["gone"], FileNotFoundError)
