"""Which NPUs of one node a pod gets. Sets of NPUs are bit masks: bit i stands for the NPU with index i.

A ring is a run of ``ring`` neighbours that talk to each other without leaving their switch. An allocation of up to a ring stays
inside one; a larger one takes whole rings and one part at most. Inside a ring, halves are filled before others are broken (as in a
buddy allocator), so that a pair stays a pair and four stay four.
"""

from __future__ import annotations

from functools import lru_cache


def mask_of(npus: tuple[int, ...] | list[int] | range) -> int:
    """The mask with these indices."""
    mask = 0
    for npu in npus:
        mask |= 1 << npu
    return mask


def indices_of(mask: int) -> tuple[int, ...]:
    """The indices in a mask, ascending."""
    return tuple(index for index in range(mask.bit_length()) if mask >> index & 1)


def ring_masks(capacity: int, ring: int) -> list[int]:
    """One mask per ring; ``ring`` 0 means that all NPUs of the node form one."""
    size = ring if 0 < ring < capacity else max(capacity, 1)
    return [((1 << min(size, capacity - begin)) - 1) << begin for begin in range(0, capacity, size)]


def _pick(free: int, begin: int, size: int, count: int) -> int:
    """``count`` of the free NPUs among ``size`` neighbours, from the half that they fill best."""
    inside = free & ((1 << size) - 1) << begin
    if inside.bit_count() == count:
        return inside
    half = size // 2
    lower, upper = inside & ((1 << half) - 1) << begin, inside & ((1 << (size - half)) - 1) << begin + half
    parts = [(lower.bit_count(), begin, half), (upper.bit_count(), begin + half, size - half)]
    fitting = [part for part in parts if part[0] >= count]
    if fitting:
        _, at, length = min(fitting)
        return _pick(free, at, length, count)
    fuller, other = sorted(parts, key=lambda part: (-part[0], part[1]))
    return _pick(free, fuller[1], fuller[2], fuller[0]) | _pick(free, other[1], other[2], count - fuller[0])


@lru_cache(maxsize=1 << 16)
def choose(free: int, capacity: int, ring: int, count: int) -> int:
    """The mask that one pod of ``count`` NPUs gets of ``free``, or 0 where it does not fit."""
    if count < 1 or free.bit_count() < count:
        return 0
    rings = ring_masks(capacity, ring)
    size = rings[0].bit_count()
    whole, rest = divmod(count, size)
    chosen = 0
    for mask in rings:
        if whole and free & mask == mask and mask.bit_count() == size:
            chosen, whole = chosen | mask, whole - 1
    if whole:
        return 0
    if rest:
        fitting = [(part.bit_count(), at) for at, mask in enumerate(rings) if (part := free & ~chosen & mask).bit_count() >= rest]
        if not fitting:
            return 0
        mask = rings[min(fitting)[1]]
        begin = (mask & -mask).bit_length() - 1
        chosen |= _pick(free & ~chosen, begin, mask.bit_count(), rest)
    return chosen


@lru_cache(maxsize=1 << 16)
def pods_that_fit(free: int, capacity: int, ring: int, count: int) -> int:
    """How many pods of ``count`` NPUs find room side by side."""
    pods = 0
    while chosen := choose(free, capacity, ring, count):
        free, pods = free & ~chosen, pods + 1
    return pods


@lru_cache(maxsize=1 << 16)
def worth(free: int, capacity: int, ring: int) -> int:
    """What a node's free NPUs are good for: NPUs that pods of 4, of 8, of 16, ... could use, added up.

    Smaller pods find room in what those leave; counting them too would fill a gap to an even number rather than the smallest gap.
    """
    total, count = 0, min(4, capacity)
    while 0 < count <= capacity:
        total += count * pods_that_fit(free, capacity, ring, count)
        count *= 2
    return total


@lru_cache(maxsize=1 << 16)
def largest_run(free: int, capacity: int, ring: int) -> int:
    """The most free NPUs in one ring."""
    return max(((free & mask).bit_count() for mask in ring_masks(capacity, ring)), default=0)
