"""A trained reward model with all that scoring needs: calibrated signals, one preference in [0, 1], and the gate of relevance.

A moment of the past is judged by what was known then: what its user did later is in the totals of training, in how often items were given a signal and in which
items are liked together, and each of them would tell which of two items he was going to take. So a user of even row is compared in spaces that those of odd rows
made, and the other way round (``halves``), and ``Past`` says what is to be left out of the totals.

Artifact ``rewards/...``: ``config.json`` and ``model.safetensors`` (the network), ``items.parquet`` (item and how it fared), ``users.parquet`` (user and what is
known of him), ``vectors.safetensors`` (what the search and the gate compare), ``text.safetensors`` (how the content of later items is read), ``reward.json``
(signals' calibrations, the preference, the gates, figures).
Legend: N items, M later items, B groups, G items of a group, X pairs, S signals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from semantide.shared.errors import Conflict, Corrupt
from semantide.shared.models.calibration import Calibration, calibration_of
from semantide.shared.models.interest_search import FloatArray, IntArray
from semantide.shared.models.item_spaces import ItemSpaces
from semantide.shared.models.relevance_gate import RelevanceGate, relevance_features
from semantide.shared.models.reward import RewardBatch, RewardNetwork
from semantide.shared.models.reward_pairs import Histories, item_features, pairs, user_features
from semantide.shared.models.text_features import TextFeatures

_PAIRS = 8192  # scored at a time
_CARD = "reward.json"
_SPACES = ("all", "even", "odd")  # whose likes lie in the spaces of a stored model
_ALL = -1


@dataclass(frozen=True)
class UserTable:
    """What is known of users: how much they were shown and what they did with it, before the end of training.

    Shapes: ``shown_U``, ``given_US``.
    """

    row_of: Mapping[str, int]
    shown_U: IntArray
    given_US: IntArray


@dataclass(frozen=True)
class ItemTable:
    """How items fared in training. Shapes: ``shown_N``, ``given_NS``."""

    shown_N: IntArray
    given_NS: IntArray


@dataclass(frozen=True)
class Past:
    """What was known when each group was at a moment of the past.

    Shapes: ``shown_B``, ``given_BS`` what its user had been shown and had given by then; ``later_shown_X``, ``later_given_XS`` how often the user was shown the pair's
    item since, and gave what, as far as that is in the totals of training.
    """

    shown_B: IntArray
    given_BS: IntArray
    later_shown_X: IntArray
    later_given_XS: IntArray


@dataclass(frozen=True)
class Judged:
    """What a model says of pairs. Shapes: ``probabilities_XS``; others [X]."""

    probabilities_XS: FloatArray
    preference_X: FloatArray
    relevance_X: FloatArray
    gate_X: npt.NDArray[np.bool_]


def combined(probabilities_XS: npt.NDArray[Any], signals: Sequence[str], weights: Mapping[str, float]) -> FloatArray:
    """One preference in [0, 1]: the weighted mean of what is liked, less the weighted sum of what is disliked by the same measure.

    Raises: ValueError where no signal has a positive weight.
    """
    weights_S = np.array([float(weights.get(name, 0.0)) for name in signals])
    total = weights_S[weights_S > 0].sum()
    if not total > 0 or not np.isfinite(weights_S).all():
        known = ", ".join(signals)
        raise ValueError(f"the preference gives {dict(weights)}: give a positive weight to at least one of the signals that the model knows ({known})")
    return np.asarray(np.clip(probabilities_XS.astype(np.float64) @ weights_S / total, 0.0, 1.0), dtype=np.float32)


@dataclass(frozen=True)
class PreferenceModel:
    """See the top of this file. ``header`` is what ``reward.json`` says besides."""

    network: RewardNetwork
    item_ids: tuple[str, ...]
    items: ItemTable
    spaces: ItemSpaces
    halves: tuple[ItemSpaces, ItemSpaces]
    users: UserTable
    usual_S: FloatArray
    calibrations: tuple[Calibration, ...]
    weights: Mapping[str, float]
    gate: RelevanceGate
    past_gate: RelevanceGate
    header: Mapping[str, Any]

    @property
    def signals(self) -> tuple[str, ...]:
        """The feedback signals that it foresees."""
        return self.network.config.signals

    def weighted(self, weights: Mapping[str, float]) -> PreferenceModel:
        """The same with another preference.

        Raises: ValueError where no signal has a positive weight.
        """
        combined(np.zeros((1, len(self.signals))), self.signals, weights)
        return replace(self, weights=dict(weights))

    def user_rows(self, users: Sequence[str | None]) -> IntArray:
        """Rows of the users' table, -1 for who is new."""
        return np.array([-1 if user is None else self.users.row_of.get(user, -1) for user in users], dtype=np.int64)

    def judge(
        self,
        users_B: IntArray,
        histories: Histories,
        offsets_B1: IntArray,
        group_X: IntArray,
        items_X: IntArray,
        valid_X: npt.NDArray[np.bool_] | None = None,
        past: Past | None = None,
    ) -> Judged:
        """Judge items for users: ``users_B`` rows of the users' table, ``group_X`` whose each item is, ``items_X`` rows, -1 for what is none; ``past`` where they are
        judged as of a moment that is over.

        In float64, so that it does not depend on how many threads add up; given back in float32.
        """
        config = self.network.config
        begins_B, ends_B = offsets_B1[:-1], offsets_B1[1:]
        latest_B = np.maximum(begins_B, ends_B - config.max_history)
        counts_BA = histories.action_counts(len(config.actions), latest_B, ends_B)
        shown_B, given_BS = self._known(users_B) if past is None else (past.shown_B, past.given_BS)
        user_BU = user_features(shown_B, given_BS, self.usual_S, ends_B - latest_B, counts_BA)
        valid_X = items_X >= 0 if valid_X is None else valid_X & (items_X >= 0)
        probabilities_XS, relevance_X = np.zeros((len(items_X), len(self.signals))), np.zeros(len(items_X), np.float32)
        gate_X = np.zeros(len(items_X), dtype=np.bool_)
        network = self.network.double().eval()
        half_B = np.where(users_B >= 0, users_B % 2, _ALL) if past is not None else np.full(len(users_B), _ALL)
        for half in np.unique(half_B):
            spaces = self.spaces if half == _ALL else self.halves[half]
            gate = self.gate if half == _ALL else self.past_gate
            vectors_ND = spaces.search_vectors()
            # The gate compares with events that have a vector: of whom has none of them, nothing is known.
            has_vector_N = (vectors_ND != 0).any(1)
            told_E = (histories.items_E >= 0) & (has_vector_N[histories.items_E.clip(0)] if len(has_vector_N) else False)
            num_told = np.concatenate([[0], np.cumsum(told_E)])
            mine = np.flatnonzero(half_B[group_X] == half)
            for begin in range(0, len(mine), _PAIRS):
                part = mine[begin : begin + _PAIRS]
                group, items = group_X[part], items_X[part]
                item_XI = self._fared(items, None if past is None else (past.later_shown_X[part], past.later_given_XS[part]))
                batch = pairs(config, vectors_ND, histories, latest_B[group], ends_B[group], items, user_BU[group], item_XI)
                with torch.no_grad():
                    logits_XS = network(_double(batch)).numpy()
                probabilities_XS[part] = np.stack([each(logits_XS[:, column]) for column, each in enumerate(self.calibrations)], 1)
                found = batch.events_XM[:, : config.num_found].numpy()
                features = relevance_features((spaces.content_NC, spaces.collaborative_NG), histories.items_E, latest_B[group], ends_B[group], items, found)
                relevance_X[part] = gate.relevance(features)
                known_X = num_told[ends_B[group]] > num_told[latest_B[group]]
                gate_X[part] = gate.passes(relevance_X[part], valid_X[part], known_X)
        preference_X = np.where(valid_X, combined(probabilities_XS, self.signals, self.weights), 0).astype(np.float32)
        return Judged(probabilities_XS.astype(np.float32), preference_X, relevance_X, gate_X)

    def _known(self, users_B: IntArray) -> tuple[IntArray, IntArray]:
        """What users were shown and gave in all of training [B] and [B, S]; nothing of who is new."""
        known_B = users_B >= 0
        if not len(self.users.shown_U):
            return np.zeros(len(users_B), np.int64), np.zeros((len(users_B), len(self.signals)), np.int64)
        return np.where(known_B, self.users.shown_U[users_B.clip(0)], 0), np.where(known_B[:, None], self.users.given_US[users_B.clip(0)], 0)

    def _fared(self, items_X: IntArray, later: tuple[IntArray, IntArray] | None) -> FloatArray:
        """How items have fared, without what one user did later [X, 1 + S]; zeros for what is none or was never heard of."""
        known_X = (items_X >= 0) & (items_X < len(self.items.shown_N))
        if not known_X.any():
            return np.zeros((len(items_X), self.network.config.item_features), np.float32)
        rows_X = np.where(known_X, items_X, 0)
        shown_X, given_XS = self.items.shown_N[rows_X], self.items.given_NS[rows_X]
        if later is not None:
            shown_X, given_XS = (shown_X - later[0]).clip(0), (given_XS - later[1]).clip(0)
        return np.where(known_X[:, None], item_features(shown_X, given_XS, self.usual_S), 0).astype(np.float32)

    def widened(self, table: pa.Table) -> PreferenceModel:
        """The same with later items, known by what they are: their rows follow, in the table's order."""
        content = self.spaces.of_later(table)
        network = RewardNetwork(self.network.config)
        network.load_state_dict({name: tensor for name, tensor in self.network.state_dict().items()})
        network.widen(torch.from_numpy(content) if network.config.content_size else torch.zeros(table.num_rows, 0))
        even, odd = self.halves
        return replace(
            self,
            network=network,
            item_ids=(*self.item_ids, *table["item"].to_pylist()),
            spaces=self.spaces.widened(content),
            halves=(even.widened(content), odd.widened(content)),
        )

    def save(self, folder: Path) -> None:
        """Write the artifact's files."""
        self.network.float().save_pretrained(folder)
        for name, ids, shown, given in (
            ("item", self.item_ids, self.items.shown_N, self.items.given_NS),
            ("user", list(self.users.row_of), self.users.shown_U, self.users.given_US),
        ):
            table = pa.table({name: pa.array(ids, pa.string()), "shown": shown, "given": pa.array(list(given), pa.list_(pa.int64()))})
            pq.write_table(table, folder / f"{name}s.parquet")
        spaces = self.spaces
        arrays = {"content": spaces.content_NC, "usual": self.usual_S}
        for name, each in zip(_SPACES, (spaces, *self.halves), strict=True):
            arrays |= each.liked(name)
        save_file({name: np.ascontiguousarray(array, dtype=np.float32) for name, array in arrays.items()}, folder / "vectors.safetensors")
        if spaces.text is not None:
            text = spaces.text
            save_file({"buckets": text.buckets, "idf": text.idf, "components": np.ascontiguousarray(text.components)}, folder / "text.safetensors")
        card = {
            **self.header,
            "signals": list(self.signals),
            "calibrations": [each.as_dict() for each in self.calibrations],
            "preference": dict(self.weights),
            "gate": self.gate.as_dict(),
            "past_gate": self.past_gate.as_dict(),
            "embedded": spaces.embedded,
            "hash_bits": spaces.text.hash_bits if spaces.text is not None else 0,
        }
        (folder / _CARD).write_text(json.dumps(card, indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path) -> PreferenceModel:
        """Read a ``rewards`` artifact.

        Raises: Conflict for a folder that holds another kind of model, Corrupt for one whose files do not fit together.
        """
        if not (folder / _CARD).exists():
            raise Conflict(f"{folder.name} holds no reward model: name one (rewards/...), GET /v1/reward lists them")
        network = RewardNetwork.from_pretrained(folder)
        try:
            card = json.loads((folder / _CARD).read_text())
            items, users = pq.read_table(folder / "items.parquet"), pq.read_table(folder / "users.parquet")
            arrays = load_file(folder / "vectors.safetensors")
            text = None
            if card["hash_bits"]:
                read = load_file(folder / "text.safetensors")
                text = TextFeatures(card["hash_bits"], read["buckets"], read["idf"], read["components"])
            content = ItemSpaces(arrays["content"], np.zeros((0, 0), np.float32), text, card["embedded"])
            spaces, even, odd = (content.with_liked(arrays, name) for name in _SPACES)
            num_signals = len(network.config.signals)
            return cls(
                network=network,
                item_ids=tuple(items["item"].to_pylist()),
                items=ItemTable(items["shown"].to_numpy(), _matrix(items["given"], num_signals)),
                spaces=spaces,
                halves=(even, odd),
                users=UserTable(
                    {user: row for row, user in enumerate(users["user"].to_pylist())}, users["shown"].to_numpy(), _matrix(users["given"], num_signals)
                ),
                usual_S=arrays["usual"],
                calibrations=tuple(calibration_of(each) for each in card["calibrations"]),
                weights=card["preference"],
                gate=RelevanceGate.of(card["gate"]),
                past_gate=RelevanceGate.of(card["past_gate"]),
                header=card,
            )
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise Corrupt(f"{folder.name} is no whole reward model ({type(error).__name__} {error}): train it again, or copy it again") from error


def _matrix(column: pa.ChunkedArray, width: int) -> IntArray:
    return np.asarray(column.combine_chunks().flatten().to_numpy(), dtype=np.int64).reshape(-1, width)


def _double(batch: RewardBatch) -> RewardBatch:
    return batch.changed(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
