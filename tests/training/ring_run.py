"""Training runs in processes of their own: checkpoints at every step, one line per step, results at the end. Made to be killed.

Each line of standard input, ``FOLDER PAUSE_SECONDS``, starts one run in a fork (torch is imported once); its process id and then its end are printed.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # optimisers import it at their first step: once here rather than in every fork

from semantide.services.training.batches import Sampler
from semantide.services.training.evaluate import Case, evaluate
from semantide.services.training.objective import NextToken
from semantide.services.training.rankers import GeneratorRanker
from semantide.services.training.recipes import tiny
from semantide.services.training.trainer import Listener, Trainer
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.trie import Trie


def main(folder: Path, pause_seconds: float) -> None:
    codes = np.stack([np.arange(24) // 6, np.arange(24) % 6], 1).astype(np.int64)
    config = replace(
        tiny(), epochs=4, items_per_batch=40, ema=0.9, muon_rate=0.01, skip_rate=0.1, crop="random", max_items=6, log_every=1, warmup_steps=3, patience=3
    )
    torch.manual_seed(0)
    shape = GeneratorConfig((4, 6), num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16, dropout=0.2, token_dropout=0.1)
    model = Generator(shape)
    histories = [(start + np.arange(3 + start % 7)) % 24 for start in range(36)]
    ranker = GeneratorRanker(model, Trie.build(codes), codes, np.arange(24), 6, 10)
    cases = [Case(user, history, np.array([(history[-1] + 1) % 24])) for user, history in enumerate(histories)]

    def validate() -> dict[str, float]:
        return evaluate(ranker, cases, ks=(10,), num_items=24, exclude_seen=False)

    def hear(step: int, values: dict[str, float]) -> None:
        with (folder / "steps.txt").open("a") as stream:
            stream.write(f"{step} {values.get('loss', 0)!r}\n")
        time.sleep(pause_seconds)

    trainer = Trainer(
        config,
        NextToken(model, torch.from_numpy(model.vocabulary.item_tokens(codes)), config),
        Sampler(histories, config, 5),
        validate,
        Listener(time.monotonic, metric=hear),
        folder / "checkpoints",
        seed=5,
        checkpoint_seconds=0,
    )
    state = trainer.run()
    model.save_pretrained(folder / "model")
    (folder / "result.json").write_text(json.dumps({"losses": state.losses, "validations": state.validations}))


if __name__ == "__main__":
    for line in sys.stdin:
        run_folder, pause = line.split()
        child = os.fork()
        if child == 0:
            main(Path(run_folder), float(pause))
            os._exit(0)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
