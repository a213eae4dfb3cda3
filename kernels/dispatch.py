"""A kernel: a readable torch reference that runs everywhere, and faster functions registered per kind of device.

Works like ``functools.singledispatch``, only that the choice falls by the device of the first tensor among the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Kernel(Generic[P, R]):
    """A function with one implementation per device type; the decorated body is the reference."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        self._registry: dict[str, Callable[P, R]] = {}
        update_wrapper(self, reference)

    def register(self, device: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate the implementation for tensors whose ``device.type`` is ``device``."""

        def add(function: Callable[P, R]) -> Callable[P, R]:
            self._registry[device] = function
            return function

        return add

    @property
    def registry(self) -> Mapping[str, Callable[P, R]]:
        """Device types that have an implementation of their own."""
        return dict(self._registry)

    def implementation(self, device: str) -> Callable[P, R]:
        """What runs for tensors on this kind of device."""
        return self._registry.get(device, self.reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what is registered for the first tensor's device."""
        return self.implementation(_device_of(args, kwargs))(*args, **kwargs)


def kernel(reference: Callable[P, R]) -> Kernel[P, R]:
    """Make a reference function a kernel, to which faster implementations can be registered."""
    return Kernel(reference)


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type
    raise ValueError("no tensor among the arguments: a kernel chooses its implementation by the device of the first one")
