"""Kept memory is not asked for again: counted in page faults, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from semantide.shared.allocator import keep_freed_memory
if not keep_freed_memory(sys.argv[1] == "keep"):
    print(-1)
    raise SystemExit
def work():
    return (torch.zeros(8 << 20) + 1).sum()
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(choice: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, choice], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_blocks_that_come_back_are_used_again() -> None:
    kept, returned = faults("keep"), faults("return")
    if kept < 0:
        pytest.skip("this system's allocator cannot be told")
    assert kept * 2 < returned
