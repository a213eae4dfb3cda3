"""The sum of all ranks' gradients: parameters lie in buckets, and a full bucket travels while the backward pass goes on.

The layout of the buckets and the order in which they travel are the same on every rank and in every run, so the sums are too. A rank without samples
sends zeros. What no rank has a gradient for stays without one, as in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from semantide.services.training.world import Pending, World

_MOST_BYTES, _LEAST_BYTES, _BUCKETS = 16 * 1024**2, 256 * 1024, 4
"""A bucket holds a quarter of the gradients, within these bounds: smaller ones cost more calls than they hide."""


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    flat: Tensor
    missing: int = 0
    pending: Pending | None = None

    def views(self) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = self.flat[: sum(sizes)].split(sizes)
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    @property
    def present(self) -> Tensor:
        """How many ranks have a gradient of each parameter."""
        return self.flat[-len(self.parameters) :]


class GradientSum:
    """Sums gradients over a world: ``begin``, one backward pass, ``finish``; other backward passes are left alone. On a world of one it does nothing."""

    def __init__(self, world: World, parameters: Sequence[nn.Parameter], *, bucket_bytes: int = _MOST_BYTES, overlap: bool = True) -> None:
        self._world, self._overlap = world, overlap
        self._buckets: list[_Bucket] = []
        self._home: dict[nn.Parameter, tuple[int, Tensor, Tensor]] = {}
        self._launched, self._begun = 0, False
        if world.size == 1:
            return
        # A small model has several buckets too: one alone would only be full when the backward pass is over.
        bucket_bytes = min(bucket_bytes, max(_LEAST_BYTES, sum(parameter.nbytes for parameter in parameters) // _BUCKETS))
        group: list[nn.Parameter] = []
        # The backward pass ends with the first layers: the last ones are ready, and travel, first.
        for parameter in [*reversed(parameters)]:
            alike = not group or (group[0].dtype == parameter.dtype and group[0].device == parameter.device)
            if group and (not alike or sum(p.nbytes for p in group) + parameter.nbytes > bucket_bytes):
                self._close(group)
                group = []
            group.append(parameter)
        if group:
            self._close(group)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _close(self, group: list[nn.Parameter]) -> None:
        bucket = _Bucket(group, torch.zeros(sum(p.numel() for p in group) + len(group), dtype=group[0].dtype, device=group[0].device))
        for place, (parameter, view) in enumerate(zip(group, bucket.views(), strict=True)):
            self._home[parameter] = (len(self._buckets), view, bucket.present[place])
        self._buckets.append(bucket)

    def begin(self) -> None:
        """Before the backward pass; gradients are None."""
        self._launched, self._begun = 0, True
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.missing, bucket.pending = len(bucket.parameters), None

    def _ready(self, parameter: Tensor) -> None:
        if not self._begun:
            return
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        index, view, present = self._home[parameter]
        view.copy_(parameter.grad)
        present.fill_(1)
        self._buckets[index].missing -= 1
        if self._overlap:
            # In order: a bucket that is full early waits for those before it, or ranks would send them in different orders.
            while self._launched < len(self._buckets) and self._buckets[self._launched].missing == 0:
                self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        bucket.pending = self._world.start_all_reduce_sum(bucket.flat)
        self._launched += 1

    @torch.no_grad()
    def finish(self) -> None:
        """After the backward pass: every gradient is the sum of all ranks'.

        Raises: RankLost when a rank is gone or does not answer in time.
        """
        self._begun = False
        while self._launched < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            for parameter, view, present in zip(bucket.parameters, bucket.views(), bucket.present.tolist(), strict=True):
                parameter.grad = view if present else None
