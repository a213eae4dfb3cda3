"""How users are divided among variants: by a hash into buckets, and buckets among names.

A user's bucket never moves, and a change of shares moves only as many buckets as it must: a share that grows takes from the live model, one that
shrinks gives back to it. So nobody goes from one variant to another because a third one changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

BUCKETS = 10_000  # so that shares are kept to a hundredth of a percent

Range = tuple[int, int, str]  # first bucket, the one after the last, name


def bucket(who: str, salt: str) -> int:
    """The bucket of somebody; another salt shuffles everybody anew."""
    # The salt's length keeps ("a", "bc") apart from ("ab", "c").
    digest = hashlib.blake2b(f"{len(salt)}:{salt}{who}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % BUCKETS


def owner(ranges: Iterable[Range], number: int) -> str | None:
    """Name that a bucket was given to, if it was."""
    return next((name for first, end, name in ranges if first <= number < end), None)


def allocate(ranges: Iterable[Range], shares: Mapping[str, float]) -> tuple[Range, ...]:
    """New ranges for these shares (which sum to at most 1), moving as few buckets of the old ones as possible.

    Raises: ValueError for shares that are more than all.
    """
    wanted = {name: round(share * BUCKETS) for name, share in shares.items()}
    if sum(wanted.values()) > BUCKETS:
        raise ValueError(f"the variants' shares sum to {sum(shares.values()):.6g}: let them sum to at most 1; the live model has what they leave")
    names: list[str | None] = [None] * BUCKETS
    held = dict.fromkeys(wanted, 0)
    for first, end, name in ranges:
        for number in range(first, end):
            if held.get(name, 0) < wanted.get(name, 0):
                names[number] = name
                held[name] += 1
    free = iter([number for number, name in enumerate(names) if name is None])
    for name, count in wanted.items():
        for _ in range(count - held[name]):
            names[next(free)] = name
    return _runs(names)


def _runs(names: Sequence[str | None]) -> tuple[Range, ...]:
    runs: list[Range] = []
    for name, numbers in groupby(range(len(names)), key=names.__getitem__):
        members = list(numbers)
        if name is not None:
            runs.append((members[0], members[-1] + 1, name))
    return tuple(runs)
