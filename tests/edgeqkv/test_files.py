import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeqkv.errors import EdgeQKVError
from edgeqkv.files import new_folder, refuse_existing


def test_a_folder_appears_whole(tmp_path):
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/a").read_text() == "1"


def test_a_failure_leaves_nothing_and_keeps_what_was_there(tmp_path):
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("old")
    with (
        pytest.raises(IsADirectoryError),
        new_folder(tmp_path / "out", overwrite=True) as folder,
    ):
        folder.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/a").read_text() == "old"


def test_a_full_disk_is_told_of_the_output(tmp_path):
    """A write does not say which file it was for."""
    with (
        pytest.raises(OSError, match=str(tmp_path / "out")),
        new_folder(tmp_path / "out"),
        Path("/dev/full").open("w") as full,
    ):
        full.write("x")


def test_folders_made_for_an_output_go_with_it_where_they_end_empty(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        new_folder(tmp_path / "a/kept"),
        new_folder(tmp_path / "a/b/c/out"),
    ):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
    with (
        new_folder(tmp_path / "a/kept"),
        contextlib.suppress(ZeroDivisionError),
        new_folder(tmp_path / "a/b/out"),
    ):
        1 / 0  # noqa: B018
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["kept"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_an_output_where_no_folder_can_be_made_is_told_before_work():
    with pytest.raises(EdgeQKVError, match="/proc/a/b cannot be made in /proc: "):
        refuse_existing(Path("/proc/a/b"), False)


def test_an_existing_output_is_refused_or_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/stale").touch()
    with pytest.raises(EdgeQKVError, match="exists"), new_folder(tmp_path / "out"):
        pass
    with new_folder(tmp_path / "out", overwrite=True) as folder:
        (folder / "fresh").touch()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["fresh"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_file_in_the_way_is_refused_even_with_overwrite(tmp_path):
    (tmp_path / "out").write_text("mine")
    with (
        pytest.raises(EdgeQKVError, match="is a file"),
        new_folder(tmp_path / "out", overwrite=True),
    ):
        pass
    assert (tmp_path / "out").read_text() == "mine"


def test_a_killed_process_leaves_no_output_and_the_next_one_cleans_up(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from edgeqkv.files import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as f:\n"
        "    (f / 'half').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "out"], env={**os.environ}, check=False)
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == 1  # the temporary sibling
    with new_folder(tmp_path / "out") as folder:
        (folder / "whole").touch()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(os.name != "posix", reason="permissions as POSIX knows them")
def test_what_is_written_may_be_read_as_the_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        with new_folder(tmp_path / "out") as folder:
            (folder / "sub").mkdir(mode=0o700)
            (folder / "sub/a").touch(mode=0o600)
    finally:
        os.umask(before)
    modes = [oct((tmp_path / "out" / p).stat().st_mode & 0o777) for p in (".", "sub", "sub/a")]
    assert modes == ["0o755", "0o755", "0o644"]


def test_an_interrupt_that_was_swallowed_still_leaves_nothing(tmp_path):
    """As torch's tracing does now and then."""
    with (
        pytest.raises(KeyboardInterrupt),
        new_folder(tmp_path / "out"),
        contextlib.suppress(KeyboardInterrupt),
    ):
        signal.raise_signal(signal.SIGINT)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
