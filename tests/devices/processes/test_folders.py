"""Folders that hostile code has filled are emptied."""

import os

import pytest

from compass_jax.devices.processes.folders import empty_folder, remove_folder

DEEP = 3000  # deeper than Python's recursion, and than a path may be long


def deep(folder, mode=0o700):
    here = os.getcwd()
    os.chdir(folder)
    for _ in range(DEEP):
        os.mkdir("d")
        os.chdir("d")
    for _ in range(DEEP):
        os.chdir("..")
        os.chmod("d", mode)
    os.chdir(here)


@pytest.mark.parametrize("mode", [0o700, 0, 0o500])
def test_depth_and_permissions_do_not_matter(tmp_path, mode):
    deep(tmp_path, mode)
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "file").write_text("x")
    (tmp_path / "closed").chmod(0)
    tmp_path.chmod(mode)
    empty_folder(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_links_are_removed_and_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("x")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "folder").symlink_to(tmp_path / "outside")
    (inside / "file").symlink_to(tmp_path / "outside" / "file")
    (inside / "nowhere").symlink_to("absent")
    os.mkfifo(inside / "pipe")
    os.mkdir(os.fsencode(inside) + b"/\xff\xfe")
    empty_folder(str(inside))
    assert os.listdir(inside) == [] and (tmp_path / "outside" / "file").read_text() == "x"


def test_a_link_in_the_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError):
        empty_folder(str(tmp_path / "link"))
    assert (tmp_path / "real" / "file").exists()
    remove_folder(str(tmp_path / "absent"))
    remove_folder(str(tmp_path / "real"))
    assert not (tmp_path / "real").exists()
