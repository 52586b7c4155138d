import ctypes

from device_bench import malloc_chunks


def test_the_block_that_a_step_writes_is_told_from_equal_ones():
    blocks = [ctypes.create_string_buffer(4096) for _ in range(3)]
    addresses = [ctypes.addressof(b) for b in blocks]

    def step():
        blocks[1][100] = b"x"

    assert malloc_chunks.written(addresses, 4096, step) == [addresses[1]]
    assert malloc_chunks.written(addresses, 4096, lambda: None) == []
