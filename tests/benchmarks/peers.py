"""Other engines on the same weights, as functions from a prompt and a width to the codes found and their scores.

Legend: N items, L levels, W beams, t tokens of a prompt.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semantide.shared.models.generator import Generator
from semantide.shared.models.vocabulary import Vocabulary

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Found:
    """What an engine answered, best first; ``seconds`` where it measured them itself.

    Shapes: ``codes_WL`` [W, L], ``scores_W`` [W].
    """

    codes_WL: IntArray
    scores_W: npt.NDArray[np.float64]
    seconds: float | None = None


Engine = Callable[[Tensor, int], Found]


def hugging_face(folder: Path, vocabulary: Vocabulary, codes_NL: IntArray) -> Engine:
    """``generate`` with ``num_beams`` and a prefix constraint, as its documentation has it.

    A processor in front takes log-probabilities over the level's code row, which is what the model was trained on and what we rank by; it costs one small
    reduction per step.
    """
    from transformers import LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor, Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    levels, children = vocabulary.levels, {}
    for item in vocabulary.item_tokens(codes_NL).tolist():
        for level in range(levels):
            children.setdefault(tuple(item[:level]), set()).add(item[level])
    allowed = {prefix: sorted(tokens) for prefix, tokens in children.items()}

    class Row(LogitsProcessor):
        def __init__(self, length: int) -> None:
            self.length = length

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores - scores[:, vocabulary.row(input_ids.shape[1] - self.length)].logsumexp(1, keepdim=True)

    @torch.inference_mode()
    def search(prompt_t: Tensor, width: int) -> Found:
        length = len(prompt_t)
        constraint = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed.get(tuple(ids[length:].tolist()), [0]), width)
        answer = model.generate(
            prompt_t[None], attention_mask=torch.ones(1, length, dtype=torch.long), num_beams=width, num_return_sequences=width, do_sample=False,
            max_new_tokens=levels, min_new_tokens=levels, length_penalty=0.0, logits_processor=LogitsProcessorList([Row(length), constraint]), output_scores=True,
            return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return Found(_codes(vocabulary, answer.sequences[:, length:].numpy()), answer.sequences_scores.double().numpy())

    return search


class Vllm:
    """vLLM behind a pipe; see ``vllm_engine.py``. Its beam search is unconstrained."""

    def __init__(self, python: str, folder: Path, vocabulary: Vocabulary, threads: int, longest: int) -> None:
        script = Path(__file__).resolve().parent / "vllm_engine.py"
        self._vocabulary = vocabulary
        self._log = (folder / "vllm.log").open("w")
        self._process = subprocess.Popen(
            [python, str(script), str(folder), str(threads), str(longest)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM ended: {Path(self._log.name).read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __call__(self, prompt_t: Tensor, width: int) -> Found:
        """Search."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tokens": prompt_t.tolist(), "width": width, "steps": self._vocabulary.levels}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return Found(_codes(self._vocabulary, np.array(answer["sequences"])), np.array(answer["scores"]), answer["seconds"])

    def close(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.wait()
        self._log.close()


def same_weights(generator: Generator, prompt_t: Tensor, found: Found) -> bool:
    """Whether the score of an unconstrained engine's best sequence is what the generator's plain forward pass gives it."""
    vocabulary = generator.vocabulary
    firsts = np.array([vocabulary.first(level) for level in range(vocabulary.levels)])
    tokens = torch.cat([prompt_t, torch.as_tensor(found.codes_WL[0] + firsts)])
    with torch.inference_mode():
        logits = generator.all_logits(generator(tokens[:-1], torch.tensor([0, len(tokens) - 1]))[len(prompt_t) - 1 :])
        score = float(torch.log_softmax(logits, -1).gather(1, tokens[len(prompt_t) :, None]).sum())
    return abs(score - float(found.scores_W[0])) < 1e-2


def same_items(ours: Found, theirs: Found, atol: float = 1e-3) -> bool:
    """Whether two engines found the same items with the same scores; of items with nearly equal scores either may come first, or last and be left out."""
    if len(ours.scores_W) != len(theirs.scores_W) or not np.allclose(ours.scores_W, theirs.scores_W, atol=atol):
        return False
    edge = float(ours.scores_W[-1]) + atol
    mine, other = ({tuple(row) for row, score in zip(found.codes_WL.tolist(), found.scores_W, strict=True) if score > edge} for found in (ours, theirs))
    return len(mine - other) + len(other - mine) <= int(np.sum(np.abs(ours.scores_W - edge) <= atol))


def _codes(vocabulary: Vocabulary, tokens_WL: npt.NDArray[np.integer]) -> IntArray:
    firsts = np.array([vocabulary.first(level) for level in range(vocabulary.levels)])
    return np.asarray(tokens_WL - firsts, dtype=np.int64)
