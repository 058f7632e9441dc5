"""The tokenizer in a GGUF file as a tokenizer.json: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

A GGUF file keeps vocabulary, merges or scores, token types, and the *name* of a pre-tokenizer, the rule that cuts text
into words before BPE. What the names mean was published with each model's own tokenizer.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from mpitp.convert.gguf_file import GgufFile
from mpitp.data.tokenizer import Tokenizer
from mpitp.errors import FileError

MOST_CHARACTERS = 1024  # of a token
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)

# How GPT-2's successors cut words; they differ in how many digits make one.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

GPT2_NAMES = ("gpt-2", "gpt2", "mpt", "olmo", "jais")
SINGLE_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell")
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
# Ends of a turn or a message, by their spelling: few files name them by a key. llama.cpp knows them the same way.
TURN_ENDS = """
    <|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <|end_of_turn|> <EOT> _<EOT> [EOT]
    <end_of_utterance>
""".split()
PRE_TOKENIZERS = (*GPT2_NAMES, *SINGLE_DIGIT_NAMES, *LLAMA3_NAMES, *QWEN2_NAMES)


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """The file's tokenizer, with tokenizer_config.json (special tokens, chat template)."""
    kind = file.get("tokenizer.ggml.model", str)
    tokens = _strings(file, "tokenizer.ggml.tokens")
    if longest := [token for token in tokens if len(token) > MOST_CHARACTERS]:
        raise FileError(f"{file.path}: a token has {len(longest[0])} characters, expected at most {MOST_CHARACTERS}")
    types = file.get("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise FileError(f"{file.path}: {len(tokens)} tokens ({len(set(tokens))} different) have {len(types)} types")
    if odd := [value for value in types if type(value) is not int or not UNDEFINED <= value <= BYTE]:
        raise FileError(
            f"{file.path}: tokenizer.ggml.token_type must be made of whole numbers from {UNDEFINED} to {BYTE}, got "
            f"{odd[0]!r:.60}"
        )
    if kind == "gpt2":
        backend = _byte_level(file, tokens)
    elif kind == "llama":
        backend = _sentencepiece(file, tokens, types)
    else:
        raise FileError(f"{file.path}: a tokenizer of kind {kind!r} can't be converted; supported: gpt2, llama")
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (CONTROL, USER_DEFINED) and token:
            backend.add_tokens([AddedToken(token, special=token_type == CONTROL, normalized=False)])
    config = _tokenizer_config(file, tokens)
    if config["add_bos_token"]:
        bos, bos_id = config["bos_token"], file.metadata["tokenizer.ggml.bos_token_id"]
        single, pair = f"{bos} $A", f"{bos} $A {bos} $B"
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=[(bos, bos_id)])
    files = {"tokenizer.json": json.loads(backend.to_str()), "tokenizer_config.json": config}
    return Tokenizer(
        {name: json.dumps(content, ensure_ascii=False, indent=1).encode() for name, content in files.items()},
        f"{file.path}",
    )


def special_ids(file: GgufFile) -> dict[str, Any]:
    """bos, eos and pad ids for config.json and generation_config.json; eos is a list where there are several."""
    ids: dict[str, Any] = {}
    for role in ("bos", "eos"):
        if f"tokenizer.ggml.{role}_token_id" in file.metadata:
            ids[f"{role}_token_id"] = file.get(f"tokenizer.ggml.{role}_token_id", int)
    if "tokenizer.ggml.padding_token_id" in file.metadata:
        ids["pad_token_id"] = file.get("tokenizer.ggml.padding_token_id", int)
    ends = [ids[key] for key in ("eos_token_id",) if key in ids]
    by_key = [file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eot", "eom")]
    by_text = [i for i, token in enumerate(_strings(file, "tokenizer.ggml.tokens")) if token in TURN_ENDS]
    ends = list(dict.fromkeys([*ends, *(end for end in by_key if end is not None), *by_text]))
    if ends:
        ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return ids


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name == "default":
        raise FileError(
            f"{file.path} doesn't say how its text is cut into words (tokenizer.ggml.pre is missing, or 'default'): an "
            "old converter made it; convert the model again with a current one (llama.cpp's convert_hf_to_gguf.py)"
        )
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise FileError(
            f"{file.path}: the pre-tokenizer {name!r} isn't known, so text can't be cut as it must be; known: {known}"
        )
    merges = []
    for merge in _strings(file, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise FileError(f"{file.path}: the merge {merge!r} is not two tokens with a space between them")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in LLAMA3_NAMES))
    except Exception as error:  # the library raises Exception itself
        raise FileError(f"{file.path}: the vocabulary and the merges don't fit: {error}") from error
    if name in QWEN2_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name in GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in SINGLE_DIGIT_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = _WORDS.replace("DIGITS", r"\p{N}{1,3}" if name in LLAMA3_NAMES else r"\p{N}")
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: neighbours whose token has the highest score are merged; unknown characters are bytes."""
    scores = file.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise FileError(f"{file.path}: {len(tokens)} tokens have {len(scores)} scores")
    if odd := [score for score in scores if type(score) not in (int, float) or math.isnan(score)]:
        raise FileError(f"{file.path}: tokenizer.ggml.scores must be made of numbers, got {odd[0]!r:.60}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    merges = merges_from_scores(tokens, scores, types)
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in types)
    backend = tokenizers.Tokenizer(model)
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Merge rules equivalent to SentencePiece's scores: each way to put a token together from two others, the tokens in
    falling order of their scores.
    """
    mergeable = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED, UNUSED)}
    merges = []
    for token in sorted(mergeable, key=lambda token: (-scores[mergeable[token]], mergeable[token])):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in mergeable and pair[1] in mergeable]
        merges += sorted(known, key=lambda pair: (mergeable[pair[0]], mergeable[pair[1]]))
    return merges


def _tokenizer_config(file: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    is_sentencepiece = file.metadata["tokenizer.ggml.model"] == "llama"
    adds_bos = is_sentencepiece or file.metadata.get("tokenizer.ggml.pre") in LLAMA3_NAMES
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", bool, adds_bos),
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            if type(token) is not int or not 0 <= token < len(tokens):
                raise FileError(
                    f"{file.path}: tokenizer.ggml.{key}_token_id={token} is not one of the {len(tokens)} tokens"
                )
            config[f"{role}_token"] = tokens[token]
    if config["add_bos_token"] and "bos_token" not in config:
        raise FileError(f"{file.path}: a bos token is to be added, but tokenizer.ggml.bos_token_id is missing")
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.get("tokenizer.chat_template", str)
    return config


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.get(key, list)
    if not all(isinstance(value, str) for value in values):
        raise FileError(f"{file.path}: {key} must be a list of strings")
    return values
