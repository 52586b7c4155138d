"""Files dropped from the page cache, and seen to be."""

from __future__ import annotations

import mmap

import pytest

from device_bench.cold import cached_pages, evict, supported

pytestmark = pytest.mark.skipif(not supported, reason="no posix_fadvise here")
PAGES = 64


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"w" * (PAGES * mmap.PAGESIZE - 100))
    return path


def test_a_file_just_written_is_dropped(written, tmp_path):
    (tmp_path / "empty").touch()
    assert cached_pages(written) == PAGES
    if not evict([written, tmp_path / "empty"]):
        pytest.skip("this file system is the page cache itself")
    assert cached_pages(written) == 0
    assert written.read_bytes()[-1:] == b"w"
    assert cached_pages(written) == PAGES


def test_a_file_that_someone_maps_stays_and_is_told(written):
    with written.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:: mmap.PAGESIZE] == b"w" * PAGES  # touched: in the page table
        assert evict([written]) is False
        assert cached_pages(written) > 0
