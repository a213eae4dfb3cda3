"""What was cut off on its way to the disk, or from it, is found out by whoever reads it, and never anything else."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.tokenization.spelling import Spelled, build
from semantide.shared.catalog import Catalog
from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict, Corrupt, NotFound
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import Feedback
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.retriever import ItemVectors, Retriever, RetrieverConfig
from semantide.shared.models.sasrec import SASRec, SASRecConfig
from semantide.shared.models.tokenizer import Tokenizer, TokenizerConfig
from semantide.shared.negative_source import BeamLists
from semantide.shared.pages import Pages
from semantide.shared.rollouts import Rollouts, Scores, rollouts_of
from semantide.shared.stored_files import whole

from ..reward.shade_shop import write_shop
from ..tokenization.conftest import item_rows, write_dataset


def dataset(folder: Path) -> None:
    write_shop(folder)
    lists = {
        "items": pa.array([[1, 2], [3]], pa.list_(pa.int32())),
        "actions": pa.array([["click", "exposure"], ["order"]], pa.list_(pa.string())),
        "parts": pa.array([[0, 0], [1]], pa.list_(pa.int8())),
    }
    pq.write_table(pa.table({"user": pa.array([0, 1], pa.int32()), "time": [5, 6], **lists}), folder / "pages.parquet")


def rollouts(folder: Path) -> None:
    items = np.arange(6).reshape(2, 3)
    rollouts_of("datasets/sha256-0", [0, 1], [np.array([1, 2]), np.array([3])], [np.array([5, 6]), np.array([7])], items).save(folder)
    Scores(items.astype(np.float32) / 9, items.astype(np.float32), items > 2, items > 0).save(folder)


def retriever(folder: Path) -> None:
    model = Retriever(RetrieverConfig(hidden_size=16, num_layers=1, num_heads=2, max_items=5, time_buckets=16))
    model.save_pretrained(folder, torch.randn(9, 16), [f"i{row}" for row in range(9)])


def pages(folder: Path) -> Pages:
    return Pages.load(folder, {"click": 1.0, "order": 3.0, "exposure": 0.0})


WRITERS: dict[str, Callable[[Path], Any]] = {
    "dataset": dataset,
    "spelled": lambda folder: build(Dataset.load(write_dataset(folder.parent / "items", item_rows(60))), TokenizerConfig(level_sizes=(8, 8)), 0).save(folder),
    "rollouts": rollouts,
    "beams": lambda folder: BeamLists(np.arange(4), np.arange(12, dtype=np.int32).reshape(4, 3)).save(folder),
    "generator": lambda folder: Generator(GeneratorConfig((4, 5), num_layers=1, hidden_size=16, intermediate_size=16)).save_pretrained(folder),
    "retriever": retriever,
    "sasrec": lambda folder: SASRec(SASRecConfig(num_items=10, hidden_size=8, max_items=4)).save_pretrained(folder),
}
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "Dataset": ("dataset", Dataset.load),
    "EventActions": ("dataset", EventActions.load),
    "Feedback": ("dataset", Feedback.load),
    "Pages": ("dataset", pages),
    "Catalog": ("spelled", Catalog.load),
    "Tokenizer": ("spelled", Tokenizer.load),
    "Spelled": ("spelled", Spelled.load),
    "Rollouts": ("rollouts", Rollouts.load),
    "Scores": ("rollouts", Scores.load),
    "BeamLists": ("beams", BeamLists.load),
    "Generator": ("generator", Generator.from_pretrained),
    "Retriever": ("retriever", Retriever.from_pretrained),
    "ItemVectors": ("retriever", ItemVectors.load),
    "SASRec": ("sasrec", SASRec.from_pretrained),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    folders = {}
    for name, write in WRITERS.items():
        folders[name] = tmp_path_factory.mktemp("stored") / name
        write(folders[name])
    return folders


def is_read(read: Callable[[Path], Any], folder: Path, name: str) -> bool:
    (folder / name).rename(folder / "aside")
    try:
        read(folder)
        return False
    except (Corrupt, NotFound, Conflict) as error:
        assert "again" in str(error) or "anew" in str(error) or "does not exist" in str(error)
        return True
    finally:
        (folder / "aside").rename(folder / name)


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=6, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True), tail=st.integers(0, 3))
def test_a_file_that_was_cut_off_is_corrupt(reader: str, stored: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, share: float, tail: int) -> None:
    kind, read = READERS[reader]
    folder = tmp_path_factory.mktemp("torn") / kind
    shutil.copytree(stored[kind], folder)
    names = sorted(path.name for path in folder.iterdir() if is_read(read, folder, path.name))
    assert names, "it reads something"
    for name in names:
        whole_file = (folder / name).read_bytes()
        kept = whole_file[: len(whole_file) - tail] if tail else whole_file[: int(share * len(whole_file))]
        if kept.strip() == whole_file.strip():
            continue
        (folder / name).write_bytes(kept)
        with pytest.raises(Corrupt):
            read(folder)
        (folder / name).write_bytes(whole_file)
    read(folder)


def test_a_disk_that_does_not_answer_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="stale"), whole(tmp_path, "catalog", "tokenize anew"):
        raise OSError(errno.ESTALE, "stale file handle")
    with pytest.raises(Corrupt, match=r"no whole catalog \(FileNotFoundError.*tokenize anew"), whole(tmp_path, "catalog", "tokenize anew"):
        (tmp_path / "missing").read_text()
