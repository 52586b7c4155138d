import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_bench.workload import Workload, expand, parse_counts, parse_pair
from edgeqkv.errors import UsageError


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("128", [128]),
        ("0,512", [0, 512]),
        ("128-512+128", [128, 256, 384, 512]),
        ("64-512*2", [64, 128, 256, 512]),
        ("0-8*2", [0, 1, 2, 4, 8]),
        ("1-4", [1, 2, 3, 4]),
        ("512, 0,512", [512, 0]),
        ("100-250+100,7", [100, 200, 7]),
    ],
)
def test_lists_and_ranges(text, counts):
    assert parse_counts(text, "-d") == counts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "-d is ''"),
        ("12x", "allowed: numbers"),
        ("-5", "allowed: numbers"),
        ("9-3", "runs backwards"),
        ("1-9*1", "never ends"),
        ("1-9+0", "never ends"),
        ("3000000000", "fit 31 bits"),
        ("1-3000000000", "fit 31 bits"),
        ("9" * 5000, "allowed: numbers"),
        ("1-100000000", "-d 1-100000000 makes 100000000 values; allowed: 1000 at most"),
        ("1-1000,0", "makes 1001 values"),
        (",".join(map(str, range(1001))), "-d is a list that makes 1001 values"),
    ],
)
def test_nonsense_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        parse_counts(text, "-d")


def test_threads_start_at_one():
    with pytest.raises(UsageError, match="-t is 0; it must be at least 1"):
        parse_counts("0,1", "-t", low=1)


@pytest.mark.parametrize(
    ("p", "n", "d", "label"),
    [
        (128, 0, 0, "pp128"),
        (0, 32, 0, "tg32"),
        (0, 32, 512, "tg32 @ d512"),
        (8, 4, 2, "pp8+tg4 @ d2"),
    ],
)
def test_labels_are_llama_bench_s(p, n, d, label):
    assert Workload(p, n, d, 1, 5, 1, 0, 0).label == label


@given(st.integers(0, 2**31), st.integers(1, 3))
def test_a_sweep_is_every_configuration_once_in_the_order_of_its_seed(seed, bundles):
    asked = {"repetitions": 2, "seed": seed, "bundles": bundles}
    plan = expand([128, 0], [32], [0, 512], [1, 2], **asked)
    assert len({(b, *w.sizes) for b, w in plan}) == len(plan) == bundles * 2 * 2 * 2
    assert [w.order for _, w in plan] == list(range(len(plan)))
    assert plan == expand([128, 0], [32], [0, 512], [1, 2], **asked)


def test_the_processes_of_a_configuration_are_a_round_apart():
    plan = expand([128], [32], [0, 512], [1], repetitions=2, seed=4, bundles=2, processes=3)
    rounds = [plan[i : i + 8] for i in (0, 8, 16)]
    for number, each in enumerate(rounds):
        assert {w.process for _, w in each} == {number}
        assert len({(b, *w.sizes) for b, w in each}) == 8
    orders = [[(b, w.label) for b, w in each] for each in rounds]
    assert orders[0] != orders[1]


def test_nothing_to_run_is_an_error():
    with pytest.raises(UsageError, match="both -p and -n are 0"):
        expand([0], [0], [0], [1], repetitions=1, seed=0)


def test_a_sweep_that_never_ends_is_an_error():
    with pytest.raises(UsageError, match="ask for 3000000000 runs in all; allowed: 100000"):
        expand(range(1, 1001), [0], range(1000), [1], repetitions=1, seed=0, processes=3000)
    with pytest.raises(UsageError, match="allowed: 100000"):
        expand([1], [0], [0], [1], repetitions=1, seed=0, processes=10**12)


def test_tokens_are_drawn_below_the_used_vocabulary():
    workload = Workload(40, 8, 16, 1, 1, 1, 7, 0)
    ids = workload.ids(10)
    assert ids.shape == (workload.n_tokens,) == (64,)
    assert ids.min() >= 0
    assert ids.max() < 10
    np.testing.assert_array_equal(ids, workload.ids(10))


def test_a_pair_runs_both_in_one_configuration():
    plan = expand([0], [0], [16], [1], repetitions=1, seed=0, pairs=[parse_pair("128, 32")])
    assert [w.label for _, w in plan] == ["pp128+tg32 @ d16"]
    for text in ("128", "0,32", "128,0", "a,b", "1,2,3"):
        with pytest.raises(UsageError, match="-pg"):
            parse_pair(text)
