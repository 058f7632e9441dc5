"""Models in 8 and 4 bits behind a server that speculates: the texts that come without either, on one rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpitp.checkpoint.load import load_model
from mpitp.cli import main
from mpitp.comm import SerialGroup
from mpitp.convert.rounding import round_weights
from mpitp.data.tokenizer import load_tokenizer, save_tokenizer
from mpitp.infer.generate import generate
from mpitp.infer.sampling import Sampling
from mpitp.layers.site import make_site
from mpitp.ops.groupwise import Grouping
from tests.data.test_tokenizer import SENTENCEPIECE
from tests.serve.served import Served, make_directory, served
from tests.serve.test_server import ask

pytest.importorskip("fastapi")
SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
ASKED = [({"temperature": 0}, Sampling(), 1), ({"temperature": 0.6, "seed": 3, "n": 2}, Sampling(0.6, seed=3), 2)]
PROMPT = "open open open open "


def expected_texts(directory: Path) -> list[list[str]]:
    """Of one rank, without a server."""
    model, tokenizer = load_model(directory, make_site(SerialGroup(), invariant_blocks=3)), load_tokenizer(directory)
    ids = tokenizer.encode(PROMPT)
    return [
        [tokenizer.decode_after(ids, text.tokens) for text in generate(model, [ids] * count, 50, sampling, ())]
        for _, sampling, count in ASKED
    ]


def metric(running: Served, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", ask(f"{running.url}/metrics")[1], re.MULTILINE)
    assert found
    return float(found[1])


@pytest.mark.parametrize(("bits", "how", "ranks"), [(8, "lookup", 1), (4, "draft", 2)])
def test_a_server_gives_the_same_texts(tmp_path: Path, bits: int, how: str, ranks: int) -> None:
    floats, rounded = make_directory(tmp_path / "floats", **SIZES), tmp_path / "rounded"
    round_weights(floats, rounded, Grouping(bits))
    how = f"draft:{floats}" if how == "draft" else how
    options = ("--invariant", "--invariant-blocks", "3", "--cache-tokens", "256", "--quiet", "--speculate", how)
    with served(rounded, *options, ranks=ranks, mpirun=ranks > 1) as running:
        for (words, _, _), expected in zip(ASKED, expected_texts(rounded), strict=True):
            body = {"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, **words}
            status, answer = ask(f"{running.url}/v1/completions", body)
            assert status == 200 and [choice["text"] for choice in answer["choices"]] == expected
        assert 0 < metric(running, "mpitp_accepted_tokens_total") <= metric(running, "mpitp_drafted_tokens_total")
        assert metric(running, "mpitp_text_steps_total") > 0
        assert metric(running, "mpitp_cache_held_tokens") == 0
        running.end()


def test_a_model_with_another_tokenizer_cannot_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = make_directory(tmp_path / "tiny"), make_directory(tmp_path / "other", template=False)
    (other / "tokenizer_config.json").unlink()
    save_tokenizer(SENTENCEPIECE, other)
    assert main(["generate", "--model", str(model), "--prompt", "a", "--speculate", f"draft:{other}"]) == 3
    assert "its tokenizer has other tokens" in capsys.readouterr().err
