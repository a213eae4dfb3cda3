"""A trained reward model with all that scoring needs: calibrated signals, one preference in [0, 1], and the gate of relevance.

Artifact ``rewards/...``: ``config.json`` and ``model.safetensors`` (the network), ``items.parquet`` (item and how it fared), ``users.parquet`` (user and what is
known of him), ``vectors.safetensors`` (what the search and the gate compare), ``text.safetensors`` (how the content of later items is read), ``reward.json``
(signals' calibrations, the preference, the gate, figures).
Legend: N items, M later items, B groups, G items of a group, X pairs, S signals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from semantide.shared.models.linear_map import LinearMap, unit_rows
from semantide.shared.models.relevance_gate import RelevanceGate, relevance_features
from semantide.shared.models.reward import RewardBatch, RewardNetwork
from semantide.shared.models.reward_pairs import Histories, pairs, user_features
from semantide.shared.models.text_features import TextFeatures

_PAIRS = 8192  # scored at a time
_CARD = "reward.json"


@dataclass(frozen=True)
class ItemSpaces:
    """What items are, and who likes them together: unit rows, of zeros where nothing is known.

    Shapes: ``content_NC``, ``collaborative_NG``. ``text`` reads the content of later items, ``embedded`` says that content are given embeddings, and
    ``collaborative_of`` predicts who would like an item by what it is.
    """

    content_NC: FloatArray
    collaborative_NG: FloatArray
    text: TextFeatures | None = None
    embedded: bool = False
    collaborative_of: LinearMap | None = None

    def search_vectors(self) -> FloatArray:
        """Both beside each other, of length one [N, C + G]."""
        return self._joined

    @cached_property
    def _joined(self) -> FloatArray:
        return unit_rows(np.concatenate([self.content_NC, self.collaborative_NG], axis=1))

    def later(self, table: pa.Table) -> tuple[FloatArray, FloatArray]:
        """The vectors of items that came later, from their descriptions."""
        width, num = self.content_NC.shape[1], table.num_rows
        content = np.zeros((num, width), np.float32)
        if self.text is not None and not self.embedded:
            content = self.text(table)
        elif self.embedded and "embedding" in table.column_names:
            for row, vector in enumerate(table["embedding"].to_pylist()):
                if vector is not None and len(vector) == width:
                    content[row] = vector
            content = unit_rows(content)
        known = np.linalg.norm(content, axis=1) > 0.5
        collaborative = np.zeros((num, self.collaborative_NG.shape[1]), np.float32)
        if self.collaborative_of is not None and known.any():
            collaborative[known] = unit_rows(self.collaborative_of(content[known]))
        return content, collaborative


@dataclass(frozen=True)
class UserTable:
    """What is known of users: how much they were shown and what they did with it, before the end of training.

    Shapes: ``shown_U``, ``given_US``.
    """

    row_of: Mapping[str, int]
    shown_U: IntArray
    given_US: IntArray


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
    item_NI: FloatArray
    spaces: ItemSpaces
    users: UserTable
    usual_S: FloatArray
    calibrations: tuple[Calibration, ...]
    weights: Mapping[str, float]
    gate: RelevanceGate
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
        self, users_B: IntArray, histories: Histories, offsets_B1: IntArray, group_X: IntArray, items_X: IntArray, valid_X: npt.NDArray[np.bool_] | None = None
    ) -> Judged:
        """Judge items for users: ``users_B`` rows of the users' table, ``group_X`` whose each item is, ``items_X`` rows, -1 for what is none.

        In float64, so that it does not depend on how many threads add up; given back in float32.
        """
        config, spaces = self.network.config, self.spaces
        begins_B, ends_B = offsets_B1[:-1], offsets_B1[1:]
        latest_B = np.maximum(begins_B, ends_B - config.max_history)
        counts_BA = histories.action_counts(len(config.actions), latest_B, ends_B)
        known_B = users_B >= 0
        shown_B = np.where(known_B, self.users.shown_U[users_B.clip(0)] if len(self.users.shown_U) else 0, 0)
        given_BS = np.where(known_B[:, None], self.users.given_US[users_B.clip(0)] if len(self.users.shown_U) else 0, 0)
        user_BU = user_features(shown_B, given_BS, self.usual_S, ends_B - latest_B, counts_BA)
        vectors_ND = spaces.search_vectors()
        network = self.network.double().eval()
        outputs: list[tuple[FloatArray, FloatArray]] = []
        for begin in range(0, len(items_X), _PAIRS):
            part = slice(begin, begin + _PAIRS)
            group, items = group_X[part], items_X[part]
            item_XI = np.where((items >= 0)[:, None], self.item_NI[items.clip(0)], 0).astype(np.float32)
            batch = pairs(config, vectors_ND, histories, latest_B[group], ends_B[group], items, user_BU[group], item_XI)
            with torch.no_grad():
                logits_XS = network(_double(batch)).numpy()
            features = relevance_features(
                (spaces.content_NC, spaces.collaborative_NG),
                histories.items_E,
                latest_B[group],
                ends_B[group],
                items,
                batch.events_XM[:, : config.num_found].numpy(),
            )
            outputs.append((np.stack([each(logits_XS[:, column]) for column, each in enumerate(self.calibrations)], 1), self.gate.relevance(features)))
        probabilities_XS = np.concatenate([np.zeros((0, len(self.signals))), *(each for each, _ in outputs)])
        relevance_X = np.concatenate([np.zeros(0, np.float32), *(each for _, each in outputs)])
        valid_X = items_X >= 0 if valid_X is None else valid_X & (items_X >= 0)
        # The gate compares with events that have a vector: of whom has none of them, nothing is known.
        has_vector_N = (vectors_ND != 0).any(1)
        told_E = (histories.items_E >= 0) & (has_vector_N[histories.items_E.clip(0)] if len(has_vector_N) else False)
        num_told = np.concatenate([[0], np.cumsum(told_E)])
        known_X = (num_told[ends_B] > num_told[latest_B])[group_X]
        preference_X = np.where(valid_X, combined(probabilities_XS, self.signals, self.weights), 0).astype(np.float32)
        return Judged(probabilities_XS.astype(np.float32), preference_X, relevance_X, self.gate.passes(relevance_X, valid_X, known_X))

    def widened(self, table: pa.Table) -> PreferenceModel:
        """The same with later items, known by what they are: their rows follow, in the table's order."""
        content, collaborative = self.spaces.later(table)
        spaces = replace(
            self.spaces,
            content_NC=np.concatenate([self.spaces.content_NC, content]),
            collaborative_NG=np.concatenate([self.spaces.collaborative_NG, collaborative]),
        )
        network = RewardNetwork(self.network.config)
        network.load_state_dict({name: tensor for name, tensor in self.network.state_dict().items()})
        if network.config.content_size:
            network.widen(torch.from_numpy(content))
        else:
            network.widen(torch.zeros(table.num_rows, 0))
        fared = np.concatenate([self.item_NI, np.zeros((table.num_rows, self.item_NI.shape[1]), np.float32)])
        return replace(self, network=network, item_ids=(*self.item_ids, *table["item"].to_pylist()), spaces=spaces, item_NI=fared)

    def save(self, folder: Path) -> None:
        """Write the artifact's files."""
        self.network.float().save_pretrained(folder)
        pq.write_table(pa.table({"item": self.item_ids, "fared": pa.array(list(self.item_NI), pa.list_(pa.float32()))}), folder / "items.parquet")
        users = pa.table(
            {
                "user": pa.array(list(self.users.row_of), pa.string()),
                "shown": self.users.shown_U,
                "given": pa.array(list(self.users.given_US), pa.list_(pa.int64())),
            }
        )
        pq.write_table(users, folder / "users.parquet")
        spaces = self.spaces
        arrays = {"content": spaces.content_NC, "collaborative": spaces.collaborative_NG, "usual": self.usual_S}
        if spaces.collaborative_of is not None:
            arrays |= {"map.weight": spaces.collaborative_of.weight, "map.bias": spaces.collaborative_of.bias}
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
            mapped = LinearMap(arrays["map.weight"], arrays["map.bias"]) if "map.weight" in arrays else None
            num_signals = len(network.config.signals)
            return cls(
                network=network,
                item_ids=tuple(items["item"].to_pylist()),
                item_NI=_matrix(items["fared"], network.config.item_features, np.float32),
                spaces=ItemSpaces(arrays["content"], arrays["collaborative"], text, card["embedded"], mapped),
                users=UserTable(
                    {user: row for row, user in enumerate(users["user"].to_pylist())}, users["shown"].to_numpy(), _matrix(users["given"], num_signals, np.int64)
                ),
                usual_S=arrays["usual"],
                calibrations=tuple(calibration_of(each) for each in card["calibrations"]),
                weights=card["preference"],
                gate=RelevanceGate.of(card["gate"]),
                header=card,
            )
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise Corrupt(f"{folder.name} is no whole reward model ({type(error).__name__} {error}): train it again, or copy it again") from error


def _matrix(column: pa.ChunkedArray, width: int, dtype: Any) -> npt.NDArray[Any]:
    return np.asarray(column.combine_chunks().flatten().to_numpy(), dtype=dtype).reshape(-1, width)


def _double(batch: RewardBatch) -> RewardBatch:
    return batch.changed(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
