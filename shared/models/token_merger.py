"""Prompts in which an item is one vector: a learned linear merge of its codes' embeddings, so that a history of n items costs n places and not n times its levels.

Only what is read is merged. What is generated goes on code by code with the ordinary embeddings, at the places after the prompt, so the answer and the search
are those of any generator. Beside the codes an item of a prompt may have *side features*: what was done with it, and how long after the item before it.
Each is one more number of the item in the prompt and takes no place of its own.
Legend: T prompt tokens, B prompts, P places of all prompts, I items, L levels, F side features, S numbers of an item in a prompt (L + F), D hidden size, K values.
Source: GenRec (arXiv 2604.14878), asymmetric linear token merger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Separator = Literal["none", "kept", "merged"]
FEATURES = ("actions", "gaps")
GAP_BUCKETS = 32
"""Values of ``gaps``: 0 unknown, else one more than the binary logarithm of the seconds, which ends at 34 years."""


@dataclass(frozen=True)
class MergerConfig:
    """Whether and how the items of a prompt are merged."""

    enabled: bool = False
    separator: Separator = "none"
    """A learned vector between items: ``kept`` as a place of its own after each, ``merged`` with the item's codes, or ``none``."""
    features: tuple[str, ...] = ()
    """Side features of the items of a prompt, merged with their codes: ``actions``, what was done; ``gaps``, the time since the item before."""
    actions: tuple[str, ...] = ()
    """The actions that have a vector, where ``features`` has them; training takes those of its data."""

    def __post_init__(self) -> None:
        if self.separator not in ("none", "kept", "merged"):
            raise ValueError(f"merger.separator is {self.separator!r}: give one of none, kept, merged")
        if set(self.features) - set(FEATURES) or len(set(self.features)) != len(self.features):
            raise ValueError(f"merger.features is {list(self.features)}: give each at most once of {', '.join(FEATURES)}")
        if (self.features or self.separator != "none") and not self.enabled:
            raise ValueError(f"merger.features is {list(self.features)} and merger.separator {self.separator!r}: set merger.enabled to true, or leave them out")

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> MergerConfig:
        """From JSON.

        Raises: ValueError for an unknown name.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(said.keys() - known):
            raise ValueError(f"merger field {unknown[0]!r} is unknown: known are {', '.join(sorted(known))}")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """For ``config.json``."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Values of each side feature, 0 (unknown) included."""
        return {name: 1 + len(self.actions) if name == "actions" else GAP_BUCKETS for name in self.features}


@dataclass(frozen=True)
class PromptShape:
    """How the tokens of a prompt become places: after the first, every ``tokens_per_unit`` tokens are ``places_per_unit`` places.

    An item is ``units_per_item`` units. Without a merger every token is a place.
    """

    tokens_per_unit: int
    places_per_unit: int
    units_per_item: int

    @property
    def places_per_item(self) -> int:
        """Places of an item."""
        return self.units_per_item * self.places_per_unit

    @property
    def tokens_per_item(self) -> int:
        """Numbers that spell an item in a prompt."""
        return self.units_per_item * self.tokens_per_unit

    def places(self, tokens: int) -> int:
        """Places of a prompt of so many tokens; of a beginning of one, those that it decides alone."""
        return 1 + self.places_per_unit * ((tokens - 1) // self.tokens_per_unit) if tokens else 0


@dataclass(frozen=True)
class MergedRows:
    """What each code and each value of a side feature adds to an item: the merge of fixed weights, multiplied out, so that it is a sum of looked-up rows.

    Shapes: ``rows_KD`` of all levels' codes, then of all features' values; ``shift_S`` takes the numbers of an item to their rows.
    """

    rows_KD: Tensor
    shift_S: Tensor

    def __call__(self, numbers_IS: Tensor) -> Tensor:
        """One vector per item: [I, D]."""
        merged_ID: Tensor = F.embedding_bag(numbers_IS + self.shift_S, self.rows_KD, mode="sum")
        return merged_ID


class TokenMerger(nn.Module):
    """The mean of an item's codes plus a linear map of codes, separator and side features, which begins at zero: so at first an item is the mean of its codes.

    As a map of the codes alone this is any linear map; what weight decay pulls it to is the mean.
    """

    def __init__(self, config: MergerConfig, levels: int, size: int) -> None:
        super().__init__()
        self.config, self.levels = config, levels
        separated = config.separator == "merged"
        self.proj = nn.Linear((levels + separated + len(config.features)) * size, size, bias=False)
        self.separator = nn.Parameter(torch.empty(size)) if config.separator != "none" else None
        self.features = nn.ModuleDict({name: nn.Embedding(values, size) for name, values in config.feature_sizes.items()})

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        """Begin at the mean; what is looked up begins at random, else the map could not learn of it."""
        self.proj.weight.zero_()
        if self.separator is not None:
            self.separator.normal_(std=std)
        for table in self.features.values():
            assert isinstance(table, nn.Embedding)
            table.weight.normal_(std=std)

    @property
    def places(self) -> tuple[Tensor, ...]:
        """The vector [D] of the place between two items, where there is one."""
        return (self.separator,) if self.separator is not None and self.config.separator == "kept" else ()

    @torch.no_grad()
    def rows(self, codes: Sequence[Tensor], firsts: Sequence[int]) -> MergedRows:
        """The same map as a sum of rows; ``codes`` are the embeddings [K, D] of each level's codes, ``firsts`` the tokens where they begin."""
        size, levels = self.proj.out_features, self.levels
        maps = list(self.proj.weight.split(size, 1))
        mean = torch.eye(size, dtype=self.proj.weight.dtype, device=self.proj.weight.device) / levels
        rows = [embedded @ (own + mean).T for embedded, own in zip(codes, maps[:levels], strict=True)]
        if self.separator is not None and self.config.separator == "merged":
            rows[0] = rows[0] + maps[levels] @ self.separator  # the same for every item, and each has one code of the first level
        tables = [table.weight for table in self.features.values()]
        rows += [values @ own.T for values, own in zip(tables, maps[len(maps) - len(tables) :], strict=True)]
        starts = [0, *accumulate(map(len, rows))][:-1]
        shifts = [start - first for start, first in zip(starts, [*firsts, *[0] * len(tables)], strict=True)]
        return MergedRows(torch.cat(rows), torch.tensor(shifts, device=self.proj.weight.device))

    def forward(self, codes_ILD: Tensor, side_IF: Tensor) -> Tensor:
        """One vector per item: [I, D]."""
        parts = [codes_ILD.flatten(1)]
        if self.separator is not None and self.config.separator == "merged":
            parts.append(self.separator.expand(len(codes_ILD), -1))
        parts += [table(side_IF[:, column]) for column, table in enumerate(self.features.values())]
        merged_ID: Tensor = codes_ILD.mean(1) + self.proj(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
        return merged_ID
