"""Whether what ended a job is an accelerator that failed, told by the name and the words of the exception: torch, and the vendors' parts of it, are not loaded for it."""

from __future__ import annotations

import re

_RAISED_BY = ("torch", "torch_npu")
_ACCELERATOR_ERROR = "AcceleratorError"
# What the runtimes of NVIDIA, AMD and Ascend say; Ascend's codes of six digits that begin with 5 are of the device and its runtime, those with 1 and 2 of the caller.
_SAID = re.compile(
    r"^(?:CUDA|HIP|cuDNN|MIOpen)\b[^\n]{0,20}\berror\b|^Triton Error \[(?:CUDA|HIP)\]"
    r"|\bNPU\b[^\n]{0,20}\berror\b.{0,400}?\berror code(?: is|:)? ?5\d{5}\b"
    r"|\b(?:HBM MULTI BIT ECC|UCE) ERROR\b|\bDEVICE MEM ERROR\b",
    re.DOTALL,
)
# The same again wherever it is tried: the work is larger than the device, or wrong.
_OF_THE_WORK = (
    "out of memory",
    "device-side assert",
    "no kernel image",
    "invalid device function",
    "invalid argument",
    "invalid configuration",
    "invalid device ordinal",
    "too many resources requested",
    "STATUS_ALLOC_FAILED",
    "STATUS_NOT_SUPPORTED",
    "STATUS_INVALID_VALUE",
    "STATUS_BAD_PARAM",
    "STATUS_ARCH_MISMATCH",
)


def device_failed(cause: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, says that a device does not work, which other devices may."""
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if _says_so(cause):
            return True
        cause = cause.__cause__
    return False


def _says_so(cause: BaseException) -> bool:
    said = str(cause)
    if any(words in said for words in _OF_THE_WORK) or not isinstance(cause, RuntimeError):
        return False
    named = any(kind.__name__ == _ACCELERATOR_ERROR and kind.__module__.partition(".")[0] in _RAISED_BY for kind in type(cause).__mro__)
    return named or _SAID.search(said) is not None
