"""Greedy generation by llama.cpp through its Python package, driven call by call through standard input.

    python llama_cpp_decode.py '{"model": "FILE.gguf", "threads": 1, "texts": 16, "places": 1024}'
    python llama_cpp_decode.py '{"model": "FILE.gguf", "quantise": {"q8_0": "OUT.gguf"}}'

`places`: of all texts together; `"repacked": false`: weights stay in the order of the file. Each line on standard
input is a JSON object: `prompts` (equally long lists of token ids) and `tokens` (new tokens a text). The answer is a
line of JSON: `seconds` of one decode step (all texts in one batch; the least), `prefill_seconds`, and the `tokens` of
each text. With `quantise`, files of other types ("f32", "q8_0", "q4_0") are made, and that is all.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from types import SimpleNamespace

import llama_cpp as api  # type: ignore[import-not-found]
import numpy as np

KINDS = {"f32": 0, "q8_0": 7, "q4_0": 2}  # llama_ftype


@api.llama_log_callback
def silent(level, text, data):
    """Says nothing."""


def quantised(model, kind, out):
    """Make a file of another type; what is rounded already is rounded again."""
    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = KINDS[kind], True, 1
    if api.llama_model_quantize(model.encode(), out.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not write {out}")


class Session:
    """A model and a context; batches of (token, position, text, whether its logits are wanted)."""

    def __init__(self, s):
        loading = api.llama_model_default_params()
        loading.use_extra_bufts = getattr(s, "repacked", True)
        self.model = api.llama_model_load_from_file(s.model.encode(), loading)
        params = api.llama_context_default_params()
        params.n_ctx = s.places
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = s.texts
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = s.threads
        self.context = api.llama_init_from_model(self.model, params)
        self.width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(512, 0, 1)

    def step(self, rows):
        """The likeliest tokens behind the rows that want them."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, position, text, wanted) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = token, position, 1, text, wanted
        if api.llama_decode(self.context, b):
            raise SystemExit("llama_decode failed")
        found = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = np.ctypeslib.as_array(api.llama_get_logits_ith(self.context, i), (self.width,))
                found.append(int(logits.argmax()))
        return found

    def answer(self, prompts, tokens):
        """Generate exactly `tokens` tokens for every prompt."""
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        length = len(prompts[0])
        started, last = time.perf_counter(), []
        rows = [(token, i, n, i == length - 1) for n, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
        for first in range(0, len(rows), 512):
            last += self.step(rows[first : first + 512])
        times, texts = [time.perf_counter()], [[token] for token in last]
        for past in range(length, length + tokens - 1):
            last = self.step([(token, past, n, True) for n, token in enumerate(last)])
            times.append(time.perf_counter())
            for text, token in zip(texts, last, strict=True):
                text.append(token)
        steps = [b - a for a, b in zip(times, times[1:], strict=False)]
        return {"seconds": min(steps, default=0.0), "prefill_seconds": times[0] - started, "tokens": texts}


def main():
    """Answer until standard input ends."""
    s = SimpleNamespace(**json.loads(sys.argv[1]))
    api.llama_log_set(silent, None)
    api.llama_backend_init()
    if hasattr(s, "quantise"):
        for kind, out in s.quantise.items():
            quantised(s.model, kind, out)
        return
    session = Session(s)
    print(json.dumps({"ready": f"llama-cpp-python {api.__version__}"}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(session.answer(question["prompts"], question["tokens"])), flush=True)


if __name__ == "__main__":
    main()
