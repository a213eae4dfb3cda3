"""RecTools' HSTU in a process of its own: each line of standard input is a number of batches to train, answered by targets and seconds as JSON.

Runs under an interpreter that has ``rectools`` and ``pytorch-lightning``; knows nothing of the project.
Usage: python rectools_hstu.py SEQUENCES THREADS   (a file with lines ``user item item ...``)
"""

import json
import logging
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import pandas as pd  # type: ignore[import-untyped]  # noqa: E402
import pytorch_lightning as lightning  # type: ignore[import-not-found]  # noqa: E402
import torch  # noqa: E402
from rectools import Columns  # type: ignore[import-not-found]  # noqa: E402
from rectools.dataset import Dataset  # type: ignore[import-not-found]  # noqa: E402
from rectools.models import HSTUModel  # type: ignore[import-not-found]  # noqa: E402

BATCH, WARM = 128, 2


class Clock(lightning.Callback):  # type: ignore[misc]
    """Counts real targets and seconds from batch to batch, after the first ones."""

    def __init__(self) -> None:
        self.targets, self.seconds, self.mark = 0, 0.0, 0.0

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:  # type: ignore[no-untyped-def]
        """After each step: loading, forward, backward, update."""
        now = time.perf_counter()
        if index >= WARM:
            self.seconds += now - self.mark
            self.targets += int((batch["yw"] > 0).sum())
        self.mark = now


def main(sequences: Path, threads: int) -> None:
    """Build the data set once, then train as often as asked."""
    torch.set_num_threads(threads)
    users, items, moments = [], [], []
    for line in sequences.read_text().splitlines():
        user, *row = line.split()
        users += [user] * len(row)
        items += row
        moments += range(len(row))
    frame = pd.DataFrame({Columns.User: users, Columns.Item: items, Columns.Weight: 1.0, Columns.Datetime: pd.to_datetime(moments, unit="D")})
    dataset = Dataset.construct(frame)
    print("ready", flush=True)
    for line in sys.stdin:
        batches = int(line) + WARM

        def trainer(batches: int = batches) -> lightning.Trainer:
            return lightning.Trainer(
                max_epochs=1, limit_train_batches=batches, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, callbacks=[Clock()],
            )  # fmt: skip

        model = HSTUModel(
            n_blocks=2, n_heads=2, n_factors=64, session_max_len=50, loss="sampled_softmax", n_negatives=64, batch_size=BATCH, dropout_rate=0.2,
            relative_time_attention=False, relative_pos_attention=True, get_trainer_func=trainer, deterministic=False, dataloader_num_workers=0,
        )  # fmt: skip
        model.fit(dataset)
        clock = next(callback for callback in model.fit_trainer.callbacks if isinstance(callback, Clock))  # the model trains with a copy
        print(json.dumps({"targets": clock.targets, "seconds": clock.seconds}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
