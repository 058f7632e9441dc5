"""Greedy generation by Hugging Face transformers on one thread, driven call by call through standard input.

    python transformers_decode.py '{"model": "DIR"}'

Each line on standard input is a JSON object: `prompts` (equally long lists of token ids) and `tokens` (new tokens a
text). The answer is a line of JSON: `seconds` of one decode step (all texts together; the first token comes with the
prompts and doesn't count), `prefill_seconds`, and the `tokens` of each text.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):
    """Notes when each step's tokens are known; stops nothing."""

    def __init__(self):
        self.times = [time.perf_counter()]

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def answer(model, prompts, tokens):
    """Generate exactly `tokens` tokens for every prompt."""
    ids, clock = torch.tensor(prompts), Clock()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    times = clock.times
    return {
        "seconds": (times[-1] - times[1]) / (tokens - 1),
        "prefill_seconds": times[1] - times[0],
        "tokens": out[:, ids.shape[1] :].tolist(),
    }


def main():
    """Answer until standard input ends."""
    s = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(s.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ready = f"transformers {transformers.__version__}, PyTorch {torch.__version__}"
    print(json.dumps({"ready": ready}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(answer(model, question["prompts"], question["tokens"])), flush=True)


if __name__ == "__main__":
    main()
