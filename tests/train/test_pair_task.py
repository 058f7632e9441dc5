"""Training of encoder-decoders on pairs: alike in every layout, resumed, scored, put to use, and refused."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitp.cli import main
from mpitp.config import RunConfig, run_config_from
from mpitp.data.pairs import read_pairs
from mpitp.errors import ConfigError, FileError
from mpitp.train.run import RunResult
from tests.command_on_threads import command_on_threads
from tests.train.run_case import changed, numbers, run

T5 = {
    **{"model_type": "t5", "d_model": 12, "d_kv": 4, "num_heads": 3, "d_ff": 10, "num_layers": 2},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "feed_forward_proj": "gated-gelu"},
}
BART = {
    **{"model_type": "bart", "d_model": 12, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 16},
    **{"encoder_attention_heads": 3, "decoder_attention_heads": 2, "encoder_ffn_dim": 9, "decoder_ffn_dim": 10},
    **{"activation_dropout": 0.1, "attention_dropout": 0.1},
}
MODELS = {"t5": T5, "bart": BART}
ALIKE = 1e-9  # float64 over other sums


def reversed_words(count: int, seed: int) -> str:
    """Lines of words and their letters from the last to the first."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abc"), size=int(rng.integers(1, 5)))) for _ in range(count)]
    return "".join(f"{word}\t{word[::-1]}\n" for word in words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "train.tsv").write_text(reversed_words(60, 1))
    (folder / "valid.tsv").write_text(reversed_words(7, 2))
    return folder


def settings(folder: Path, model: str, name: str, **changes: Any) -> RunConfig:
    data = {"train": str(folder / "train.tsv"), "valid": str(folder / "valid.tsv"), "tokenizer": "bytes", "seq_len": 8}
    tables: dict[str, Any] = {
        "model": {**MODELS[model], "dtype": "float64"},
        "task": {"kind": "translation"},
        "data": data,
        "train": {"steps": 4, "global_batch_size": 6, "micro_batch_size": 3, "run_dir": str(folder / name)},
        "optim": {"lr": 1e-2, "schedule": "constant"},
        "checkpoint": {"every": 2},
    }
    return run_config_from(changed(tables, changes))


HELD_OUT = ("valid_loss", "valid_accuracy", "valid_exact")


@cache
def one_rank(folder: Path, model: str) -> np.ndarray:
    run(1, settings(folder, model, f"{model}-one"))
    return numbers(folder / f"{model}-one", *HELD_OUT)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 3": (3, {}),
    "dp 2": (2, {"mesh_dp": 2}),
    "dp 2 x tp 2, ZeRO 2": (4, {"mesh_dp": 2, "optim_zero": 2}),
    "dp 3, ZeRO 3": (3, {"mesh_dp": 3, "optim_zero": 3}),
    "smaller microbatches": (1, {"train_micro_batch_size": 2}),
    "recompute": (2, {"train_recompute": "full"}),
    "invariant": (2, {"train_invariant": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_gives_the_same_numbers(folder: Path, model: str, layout: str) -> None:
    """With dropout everywhere that the types have it."""
    ranks, changes = LAYOUTS[layout]
    name = f"{model}-{layout}"
    run(ranks, settings(folder, model, name, **changes))
    np.testing.assert_allclose(numbers(folder / name, *HELD_OUT), one_rank(folder, model), rtol=ALIKE, atol=ALIKE)


def test_a_run_that_was_cut_goes_on_to_the_same_numbers(folder: Path) -> None:
    expected, name = one_rank(folder, "t5"), "t5-cut"
    run(1, settings(folder, "t5", name, train_steps=2))
    run(3, settings(folder, "t5", name), resume="auto")
    np.testing.assert_allclose(numbers(folder / name, *HELD_OUT), expected, rtol=ALIKE, atol=ALIKE)


@pytest.fixture(scope="module")
def learnt(folder: Path) -> tuple[RunResult, RunResult]:
    """Words turned round, learnt on 1 and on 3 ranks; no held-out word was learnt from (`scripts/train_reverse.py`)."""
    words = ["".join(letters) for length in (1, 2, 3) for letters in product("abcd", repeat=length)]
    order = np.random.default_rng(0).permutation(len(words))
    for name, chosen in (("known", order[12:]), ("unknown", order[:12])):
        (folder / f"{name}.tsv").write_text("".join(f"{words[i]}\t{words[i][::-1]}\n" for i in chosen))
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_layers": 1, "init_std": 0.2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 8}
    nothing = {"dropout": {"embd": 0.0, "attn": 0.0, "resid": 0.0}, "activation_dropout": 0.0, "attention_dropout": 0.0}
    data = {"train": str(folder / "known.tsv"), "valid": str(folder / "unknown.tsv"), "tokenizer": "bytes"}
    tables = {
        "model": {**BART, **sizes, **heads, **nothing},
        "task": {"kind": "translation"},
        "data": {**data, "seq_len": 6},
        "optim": {"lr": 1e-2, "warmup_steps": 10},
    }
    train = {"steps": 60, "global_batch_size": 48, "micro_batch_size": 48, "invariant": True, "log_every": 60}
    found = [
        run(ranks, run_config_from({**tables, "train": {**train, "run_dir": str(folder / f"learnt{ranks}")}}))
        for ranks in (1, 3)
    ]
    return found[0], found[1]


def test_words_are_turned_round_that_were_never_seen(learnt: tuple[RunResult, RunResult]) -> None:
    assert learnt[0].valid_exact is not None and learnt[0].valid_exact >= 0.75
    assert learnt[0].valid_exact == learnt[1].valid_exact and learnt[0].valid_loss == learnt[1].valid_loss


def test_what_is_trained_writes_texts(
    folder: Path, learnt: tuple[RunResult, RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    """The held-out score is that of greedy texts; a directory goes on being trained; beams and options are heeded."""
    result, model = learnt[1], str(folder / "learnt3" / "model")
    pairs = read_pairs(folder / "unknown.tsv")
    prompts = [word for source in pairs.sources for word in ("--prompt", source)]
    capsys.readouterr()
    assert command_on_threads(2, "generate", "--model", model, *prompts, "--max-new-tokens", "8", "--json") == [0, 0]
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    right = [
        record["text"] == target and record["finish_reason"] == "eos"
        for record, target in zip(told, pairs.targets, strict=True)
    ]
    assert result.valid_exact == pytest.approx(np.mean(right))
    assert main(["generate", "--model", model, "--prompt", "abc", "--beams", "3", "--length-penalty", "2"]) == 0
    assert capsys.readouterr().out == "cba\n"
    again = {"model": {"from": model}, "task": {"kind": "translation"}, "optim": {"lr": 1e-9}}
    data = {"train": str(folder / "known.tsv"), "valid": str(folder / "unknown.tsv"), "seq_len": 6}
    more = run(1, run_config_from({**again, "data": data, "train": {"steps": 1, "run_dir": str(folder / "again")}}))
    assert more.valid_loss == pytest.approx(result.valid_loss, abs=1e-5)
    generation = json.loads((folder / "again/model/generation_config.json").read_text())
    assert (generation["decoder_start_token_id"], generation["eos_token_id"]) == (2, [256])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--stream"], "--stream is not supported with an encoder and a decoder"),
        (["--beams", "2", "--temperature", "1"], "beams are the likeliest texts"),
        (["--beams", "0"], "beams must lie in 1 .. 1000"),
    ],
)
def test_options_that_do_not_go_together(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    one_rank(folder, "t5")
    model = str(folder / "t5-one" / "model")
    assert main(["generate", "--model", model, "--prompt", "a", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh_pp": 5}, "mesh.pp = 5 stages of at least one block each, but the model has 4"),
        ({"mesh_ep": 2}, "a model of type 't5' has none; give the ranks to mesh.dp"),
        ({"model_d_kv": 0}, "d_kv must lie in 1 .."),
        ({"model_feed_forward_proj": "gated-sine"}, "feed_forward_proj='gated-sine' is not supported"),
        ({"model_d_modle": 3}, "unknown key 'd_modle'.*did you mean 'd_model'"),
        ({"data_tokenizer": None}, "pairs and labelled texts need a tokenizer"),
        ({"model_vocab_size": 100, "model_eos_token_id": 99}, "has ids up to 255, but the model.s vocab_size is 100"),
    ],
)
def test_what_can_not_be_is_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        run(
            max([1, *(size for key, size in changes.items() if key.startswith("mesh_"))]),
            settings(folder, "t5", "refused", **changes),
        )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no tab\n", "line 1: expected source TAB target"),
        ("a\tb\n\tc\n", "line 2: the source is empty"),
        ("a\tb\tc\n", "line 1: more than one tab"),
        ('{"source": "a"}\n', 'expected a JSON object with "source" and "target"'),
        ("\n", "holds no pairs"),
    ],
)
def test_files_that_are_no_pairs(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "pairs").write_text(content)
    with pytest.raises(FileError, match=words):
        read_pairs(tmp_path / "pairs")
