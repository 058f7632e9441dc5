"""The whole and right inputs that cases damage: texts, tokenizers, prepared data, small models, checkpoints, GGUF."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import safetensors.numpy
import tokenizers

from mpitp.cli import main
from tests.convert.test_gguf import SENTENCEPIECE, hf_tensors, sentencepiece_keys, write_gguf

TEXT = "The cat sat on the mat. Über die Wiese, 漢字!\n" * 30
RUN_FILE = """\
[model]
{fields}
dropout.attn = 0.1
[data]
train = "d"
valid = "d"
valid_sequences = 2
seq_len = 16
[mesh]
tp = 0
[train]
steps = 2
micro_batch_size = 2
global_batch_size = 4
seed = 3
run_dir = "r"
eval_every = 2
log_every = 1
invariant = false
signals = ["USR1"]
watchdog = "30m"
[optim]
lr = 1e-3
betas = [0.9, 0.95]
eps = 1e-8
weight_decay = 0.1
clip_norm = 1.0
warmup_steps = 0
schedule = "constant"
[checkpoint]
every = 1
keep = 3
"""
_LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"attention_bias": True, "tie_word_embeddings": False},
    "qwen2": _LLAMA | {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "initializer_range": 0.2},
}


def make_bases(root: Path) -> None:
    """Fill `root` with a folder for each base. Changes the working folder: call it in a process of its own."""
    (root / "t.txt").write_text(TEXT, encoding="utf-8")
    for kind, fields in FIELDS.items():
        _train(root / kind, kind, fields, root / "t.txt")
        _copied(root / f"model-{kind}", root / kind / "r" / "model", "m")
    os.chdir(root)
    (root / "model-llama" / "prompts.txt").write_text("The cat\nOn the mat\nÜber\n", encoding="utf-8")
    shutil.copytree(root / "llama", root / "untrained", ignore=shutil.ignore_patterns("r"))
    _shard(root / "sharded", root / "model-llama")
    _copied(root / "texts", root / "t.txt", "t.txt")
    for name, tokenizer in (("bytes", None), ("words", _byte_level_words()), ("pieces", _pieces())):
        _tokenizer(root / f"tokenizer-{name}", tokenizer, root)
    for name in GGUF_FILES:
        (root / f"gguf-{name}").mkdir()
        write_gguf_file(root / f"gguf-{name}" / "model.gguf", name)
    shutil.copytree(root / "llama", root / "everything")
    for other in ("model-llama", "texts", "gguf-plain"):
        shutil.copytree(root / other, root / "everything", dirs_exist_ok=True)


GGUF_FILES: dict[str, dict[str, Any]] = {
    "plain": {},
    "quantised": {"quantise": gguf.GGMLQuantizationType.Q8_0},
    "pieces": {"tokenizer": sentencepiece_keys()},
}


def write_gguf_file(path: Path, name: str, **changes: Any) -> None:
    """One of the GGUF files, with changes of its metadata as `write_gguf` takes them."""
    tensors = hf_tensors(vocab_size=len(SENTENCEPIECE["tokens"]) if name == "pieces" else None)
    write_gguf(path, tensors, **GGUF_FILES[name], **changes)


def run(*words: str) -> None:
    """A command that must succeed."""
    if code := main(list(words)):
        raise AssertionError(f"mpitp {' '.join(words)} gave {code}")


def _train(folder: Path, kind: str, fields: dict[str, Any], text: Path) -> None:
    """A folder with a run file, prepared data `d`, a run `r` of two steps with two checkpoints, and its timeline."""
    folder.mkdir()
    os.chdir(folder)
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {"model_type": kind, **fields}.items())
    (folder / "run.toml").write_text(RUN_FILE.format(fields=lines))
    run("data", "prepare", str(text), "--tokenizer", "bytes", "--out", "d")
    run("train", "run.toml", "--trace", "t.json")


def _copied(folder: Path, source: Path, name: str) -> None:
    folder.mkdir()
    (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)


def _shard(folder: Path, model: Path) -> None:
    """The model in two shards with an index."""
    shutil.copytree(model, folder)
    whole = folder / "m" / "model.safetensors"
    tensors = safetensors.numpy.load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in part}, folder / "m" / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    size = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "m" / "model.safetensors.index.json").write_text(json.dumps(index))


def _tokenizer(folder: Path, document: Any, root: Path) -> None:
    """A text and a tokenizer `tok`: the byte tokenizer, or a document with files beside it that declare more tokens."""
    shutil.copytree(root / "texts", folder)
    if document is None:
        shutil.copytree(root / "untrained" / "d" / "tokenizer", folder / "tok")
        return
    (folder / "tok").mkdir()
    (folder / "tok" / "tokenizer.json").write_text(json.dumps(document))
    new = 1 + max([*document["model"]["vocab"].values(), *(token["id"] for token in document["added_tokens"])])
    beside = {
        "tokenizer_config.json": {
            "eos_token": document["added_tokens"][-1]["content"],
            "add_bos_token": False,
            "added_tokens_decoder": {str(new): {"content": "<|new|>", "special": True, "normalized": False}},
        },
        "added_tokens.json": {"<|new|>": new},
        "special_tokens_map.json": {"eos_token": {"content": document["added_tokens"][-1]["content"]}},
    }
    for name, content in beside.items():
        (folder / "tok" / name).write_text(json.dumps(content))


def _byte_level_words() -> Any:
    """A byte-level BPE tokenizer with merges, as GPT-2's."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return _learnt(tokenizer, ["<s>", "<|end|>"], tokenizers.pre_tokenizers.ByteLevel.alphabet())


def _pieces() -> Any:
    """A BPE tokenizer of the SentencePiece kind, as Llama's."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = "\u2581"
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend(space), tokenizers.normalizers.Replace(" ", space)]
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace(space, " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return _learnt(tokenizer, ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))], [])


def _learnt(tokenizer: tokenizers.Tokenizer, special: list[str], alphabet: list[str]) -> Any:
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][: special.index("</s>") + 1 if "</s>" in special else None]
    return document
