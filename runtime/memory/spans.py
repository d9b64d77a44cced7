"""Which blocks are streamed, how many of them are on the device at once, and what host memory they take. No torch."""

from collections.abc import Collection, Sequence

LARGEST = 2 * 2**30  # bytes of one allocation, at most: so much is held twice while its blocks move into it


def picked(total: int, count: int) -> tuple[int, ...]:
    """`count` of `total` blocks, evenly over the depth: each copy hides behind the resident ones between."""
    count = min(count, total)
    return tuple((2 * index + 1) * total // (2 * count) for index in range(count))


def together(chosen: Collection[int], total: int, group: int) -> int:
    """How many of the chosen blocks are recomputed at once where `group` blocks are; `total` without checkpointing."""
    return max(
        (sum(first <= i < first + group for i in chosen) for first in range(0, total, group)), default=0
    )


def in_flight(total: int, count: int, group: int) -> int:
    """Streamed blocks on the device at the peak of a step: those in use at once, and the next one."""
    return together(picked(total, count), total, group) + (count > 1)


def host_bytes(sizes: Sequence[int]) -> int:
    """Of streamed blocks of `sizes` bytes, with what pinned allocations are rounded up to."""
    total, rest = 0, list(sizes)
    for shared in runs(sizes):
        total, rest = total + rounded(sum(rest[:shared])), rest[shared:]
    return total


def runs(sizes: Sequence[int]) -> list[int]:
    """How many blocks, in order, share each allocation of host memory.

    torch rounds a pinned allocation up to a power of two: a published block of 0.63 GiB alone would take 1 GiB. Of
    numbers that waste as little the least, for what shares an allocation is held twice at once.
    """
    found: list[int] = []
    while (first := sum(found)) < len(sizes):
        best, least = 1, float("inf")
        for count in range(1, len(sizes) - first + 1):
            size = sum(sizes[first : first + count])
            if count > 1 and size > LARGEST:
                break
            waste = rounded(size) / max(size, 1)  # a block that is all trained has nothing to stream
            if waste < least:
                best, least = count, waste
        found.append(best)
    return found


def rounded(size: int) -> int:
    return 1 << (size - 1).bit_length()
