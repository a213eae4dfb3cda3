"""Beam search by vLLM, in an environment of its own: JSON lines in, JSON lines out. ``peers.py`` starts it.

    python vllm_engine.py FOLDER THREADS LONGEST

It has no token constraint in beam search, so its sequences need not be items.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def number_tokenizer(folder: str, size: int) -> None:
    """A tokenizer of numbers, without which vLLM searches no beams."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t0").save_pretrained(folder)


def main() -> None:
    folder, threads, longest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to standard error
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with open(f"{folder}/config.json") as file:
        size = json.load(file)["vocab_size"]
    number_tokenizer(folder, size)
    import torch

    torch.set_num_threads(threads)
    from vllm import LLM
    from vllm.sampling_params import BeamSearchParams

    model = LLM(folder, enforce_eager=True, dtype="float32", block_size=32, max_model_len=longest + 8, max_num_seqs=512, max_logprobs=size)

    def say(what: dict) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    say({"ready": True, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        asked = json.loads(line)
        params = BeamSearchParams(beam_width=asked["width"], max_tokens=asked["steps"], ignore_eos=True)
        model.reset_prefix_cache()
        begin = time.perf_counter()
        found = model.beam_search([{"prompt_token_ids": asked["tokens"]}], params)[0].sequences
        seconds = time.perf_counter() - begin
        say(
            {
                "seconds": seconds,
                "sequences": [[int(token) for token in beam.tokens[-asked["steps"] :]] for beam in found],
                "scores": [beam.cum_logprob for beam in found],
            }
        )


if __name__ == "__main__":
    main()
