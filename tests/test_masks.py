"""Mask arithmetic against brute force over every pair of positions."""

import itertools

import numpy as np
import pytest

from pallas_flash import masks
from pallas_flash.spec import AttentionSpec

SPECS = [
    AttentionSpec(),
    AttentionSpec(is_causal=True),
    AttentionSpec(local_window_size=(0, 0)),
    AttentionSpec(local_window_size=(3, 5)),
    AttentionSpec(local_window_size=(4, 9), is_causal=True),
    AttentionSpec(local_window_size=(2**30 - 1, 2)),
    AttentionSpec(local_window_size=(None, 1)),
    AttentionSpec(local_window_size=(4, None)),
]


def sees(spec: AttentionSpec, q: int, k: int) -> bool:
    if spec.is_causal and k > q:
        return False
    if spec.local_window_size is None:
        return True
    left, right = (10**9 if side is None else side for side in spec.local_window_size)
    return q - left <= k <= q + right


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_visible_is_the_definition(spec):
    q_pos, k_pos = np.arange(-5, 20)[:, None], np.arange(15)[None, :]
    expected = [[sees(spec, q, k) for k in range(15)] for q in range(-5, 20)]
    visible = masks.visible(spec, q_pos, k_pos)
    if visible is None:
        assert np.all(expected)
    else:
        np.testing.assert_array_equal(visible, expected)


def test_visible_knows_lengths_and_segments():
    q_pos, k_pos = np.arange(3)[:, None], np.arange(4)[None, :]
    q_segment, k_segment = np.array([[0], [1], [7]]), np.array([[1, 0, 1, 1]])
    visible = masks.visible(
        AttentionSpec(), q_pos, k_pos, key_length=3, q_segment=q_segment, k_segment=k_segment
    )
    np.testing.assert_array_equal(
        visible, [[False, True, False, False], [True, False, True, False], [False] * 4]
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_ranges_leave_out_nothing_and_are_tight(spec):
    length = 13
    for first, count, offset in itertools.product(range(0, 24, 3), (1, 4), (0, 6, -7)):
        last = first + count - 1
        seen = [
            k
            for k in range(length)
            if any(sees(spec, q + offset, k) for q in range(first, last + 1))
        ]
        assert_spans(masks.key_range(spec, first + offset, last + offset, length), seen)
        seen_by = [
            q
            for q in range(length)
            if any(sees(spec, q + offset, k) for k in range(first, last + 1))
        ]
        assert_spans(masks.query_range(spec, first, last, length, offset), seen_by)


def assert_spans(bounds, members: list[int]) -> None:
    """The range is the smallest that holds the members; without members it is empty."""
    start, stop = map(int, bounds)
    if members:
        assert (start, stop) == (members[0], members[-1] + 1)
    else:
        assert start >= stop


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks_hold_the_range(block_size):
    for start, stop in itertools.product(range(20), repeat=2):
        first, last = map(int, masks.blocks(start, stop, block_size))
        expected = sorted({position // block_size for position in range(start, stop)})
        assert list(range(first, last)) == expected


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_stretches_tell_needed_and_full_blocks(spec, block_size):
    """Both ways: key blocks that queries need, and query blocks that need keys."""
    length = 13
    for first, count, offset in itertools.product(range(0, 24, 3), (1, 4), (0, 6, -7)):
        mine = range(first, first + count)
        last = first + count - 1

        def is_key_seen(mine: int, other: int, offset: int = offset) -> bool:
            return sees(spec, mine + offset, other)

        def is_seen_by(mine: int, other: int, offset: int = offset) -> bool:
            return sees(spec, other + offset, mine)

        keys = masks.key_blocks(spec, first + offset, last + offset, length, block_size)
        assert_stretch(keys, is_key_seen, mine, length, block_size)
        queries = masks.query_blocks(spec, first, last, length, offset, block_size)
        assert_stretch(queries, is_seen_by, mine, length, block_size)


def assert_stretch(stretch, is_pair, mine: range, length: int, block_size: int) -> None:
    """By brute force: [first, last) are the blocks with a pair, the full ones are all pairs."""
    first, full_first, full_last, last = map(int, stretch)
    assert first <= full_first <= full_last <= last
    for block in range(-(-length // block_size)):
        others = range(block * block_size, (block + 1) * block_size)
        pairs = [j < length and is_pair(i, j) for i in mine for j in others]
        assert (first <= block < last) == any(pairs)
        assert (full_first <= block < full_last) == all(pairs)
