"""Hugging Face directories: slices reach the right ranks, what is saved is the same bytes at every rank count, and a
directory that isn't whole is refused before anything is computed."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from mpitp.backend.device import CpuDevice
from mpitp.checkpoint import (
    Documents,
    HfWeights,
    hf_directory,
    load_config,
    load_model,
    raise_together,
    read_config,
    save_model,
)
from mpitp.checkpoint.hf import expected_tensors, plan_shards
from mpitp.checkpoint.load import ModelSource
from mpitp.comm.serial import SerialGroup
from mpitp.comm.threads import run_threads
from mpitp.errors import ConfigError, FileError, UsageError
from mpitp.layers.placement import Part
from mpitp.layers.site import make_site
from mpitp.models.ends import TOKENIZER, notices_of, with_ends
from tests.sharded import StrictDevice, weights

GOLDEN = Path(__file__).resolve().parent.parent / "parity" / "golden"
MODELS = ["gpt2", "llama-gqa", "llama-mqa-bias", "qwen2"]
RANKS = [1, 2, 3, 4, 5]


def stored_tensors(directory):
    """All tensors of a directory, read by the reference library."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(file)
    return tensors


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def model_dir(tmp_path):
    """A copy of the Llama directory that a test may damage."""
    return Path(shutil.copytree(GOLDEN / "llama-gqa", tmp_path / "model"))


def rewrite(directory, change):
    """Change the tensors of a single-file directory."""
    tensors = stored_tensors(directory)
    change(tensors)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_load_and_save_keep_every_tensor(name, ranks, tmp_path):
    target = tmp_path / "saved"

    def rank_main(group):
        model = load_model(GOLDEN / name, make_site(group, dtype="float64"))
        save_model(model, target, group, Documents(model.config.hf), save_dtype="float64")

    run_threads(ranks, rank_main)
    expected, saved = stored_tensors(GOLDEN / name), stored_tensors(target)
    assert saved.keys() == expected.keys()
    for tensor, values in expected.items():
        np.testing.assert_array_equal(saved[tensor], values, err_msg=tensor)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("save_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "llama-mqa-bias"])
def test_the_same_bytes_at_every_rank_count(name, save_dtype, tmp_path):
    def rank_main(group, target):
        model = load_model(GOLDEN / name, make_site(group))
        extra = {"tokenizer.json": b"{}"}
        save_model(model, target, group, Documents(model.config.hf, extra_files=extra), save_dtype=save_dtype)

    for ranks in RANKS:
        run_threads(ranks, rank_main, tmp_path / str(ranks))
    first = contents(tmp_path / "1")
    assert set(first) == {"config.json", "model.safetensors", "tokenizer.json"}
    config = json.loads(first["config.json"])
    assert config.get("dtype", config.get("torch_dtype")) == save_dtype
    for ranks in RANKS[1:]:
        assert contents(tmp_path / str(ranks)) == first


@pytest.mark.parametrize("name", MODELS)
def test_parameters_on_a_device_pass_through_host_memory(name, tmp_path):
    def rank_main(group, target, device):
        model = load_model(GOLDEN / name, make_site(group, device=device))
        save_model(model, target, group, Documents(model.config.hf))

    run_threads(2, rank_main, tmp_path / "device", StrictDevice())
    run_threads(1, rank_main, tmp_path / "host", CpuDevice())
    assert contents(tmp_path / "device") == contents(tmp_path / "host")


@pytest.mark.parametrize("ranks", [1, 3])
def test_sharded_files_are_saved_and_read_back(ranks, tmp_path):
    def rank_main(group):
        model = load_model(GOLDEN / "llama-gqa", make_site(group))
        save_model(model, tmp_path / "m", group, Documents(model.config.hf), max_shard_bytes=30_000)

    run_threads(ranks, rank_main)
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-0000{len(files)}.safetensors"
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(4 * array.size for array in stored_tensors(tmp_path / "m").values())
    load_model(tmp_path / "m", make_site(SerialGroup()))


def test_shards_are_filled_in_the_order_of_names():
    shapes = {"c": (4,), "a": (2, 2), "b": (100,)}
    assert plan_shards(shapes, "F32", 32) == {
        "model-00001-of-00003.safetensors": {"a": ("F32", (2, 2))},
        "model-00002-of-00003.safetensors": {"b": ("F32", (100,))},
        "model-00003-of-00003.safetensors": {"c": ("F32", (4,))},
    }
    assert list(plan_shards(shapes, "F32", 10_000)) == ["model.safetensors"]


def test_names_without_their_first_word_are_found(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "gpt2", tmp_path / "bare"))
    tensors = {name.removeprefix("transformer."): array for name, array in stored_tensors(directory).items()}
    tensors["h.0.attn.bias"] = np.zeros((1, 1, 4, 4), np.float32)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    bare, whole = load_model(directory, make_site(SerialGroup())), load_model(GOLDEN / "gpt2", make_site(SerialGroup()))
    for (name, a), (_, b) in zip(bare.named_params(), whole.named_params(), strict=True):
        np.testing.assert_array_equal(a.data, b.data, err_msg=name)


def change_json(path, **changes):
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | changes))


def test_tensors_behind_the_word_of_a_wrapper_are_found(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "gpt2", tmp_path / "wrapped"))
    tensors = {f"module.{name}": array for name, array in stored_tensors(directory).items()}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    found, whole = (load_model(place, make_site(SerialGroup())) for place in (directory, GOLDEN / "gpt2"))
    for (name, a), (_, b) in zip(found.named_params(), whole.named_params(), strict=True):
        np.testing.assert_array_equal(a.data, b.data, name)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "union", "line"),
    [
        ([51, 52], [5, 7], (51, 52, 5, 7), "config.json names 51, 52; generation_config.json names 5, 7"),
        (5, [5, 7], (5, 7), "config.json names 5; generation_config.json names 5, 7"),
        (5, 5, (5,), None),
        (5, [5], (5,), None),
        ([5, 7], [7, 5], (5, 7), None),
        (5, None, (5,), None),
        (None, 7, (7,), None),
        (None, None, (), None),
    ],
)
def test_the_ends_of_text_of_both_configs_count(model_dir, in_config, in_generation, union, line):
    change_json(model_dir / "config.json", eos_token_id=in_config)
    change_json(model_dir / "generation_config.json", eos_token_id=in_generation)
    config = load_config(model_dir)
    assert config.eos_ids == union
    assert ([f"the ends of text differ: {line}; each of them ends a text"] if line else []) == notices_of(config)
    if in_generation is not None:
        assert config.hf["eos_token_id"] == (list(union) if len(union) > 1 else union[0])


def test_the_end_of_the_tokenizer_counts_beside_theirs(model_dir):
    config = load_config(model_dir)
    assert notices_of(with_ends(config, TOKENIZER, (52,))) == []
    added = with_ends(config, TOKENIZER, (9,))
    assert added.eos_ids == (51, 52, 9) and added.hf["eos_token_id"] == [51, 52, 9]
    assert "generation_config.json names 51, 52; the tokenizer names 9" in notices_of(added)[0]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [-1, True, "x", 53, [1, 10**30], {}, 1.0])
def test_ends_of_text_that_are_no_ids_are_refused(model_dir, file, value):
    change_json(model_dir / file, eos_token_id=value)
    with pytest.raises(ConfigError, match="eos_token_id|end-of-text id"):
        load_config(model_dir)


@pytest.mark.parametrize("value", [-1, True, "x", 53])
def test_a_beginning_of_text_that_is_no_id_is_refused(model_dir, value):
    change_json(model_dir / "generation_config.json", bos_token_id=value)
    with pytest.raises(ConfigError, match="generation_config.json: bos_token_id=.* is not one of the 53 ids"):
        load_config(model_dir)


def test_a_tied_model_that_is_stored_as_its_head_alone(tmp_path):
    """What `safetensors.torch.save_model` writes: of two names for one tensor the first in the alphabet."""
    for name, embedding in (("gpt2", "transformer.wte.weight"), ("llama-gqa", "model.embed_tokens.weight")):
        directory = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
        change_json(directory / "config.json", tie_word_embeddings=True)
        rewrite(directory, lambda tensors: tensors.pop("lm_head.weight", None))
        usual = load_model(directory, make_site(SerialGroup()))
        rewrite(directory, lambda tensors, old=embedding: tensors.update({"lm_head.weight": tensors.pop(old)}))
        expected = weights(SerialGroup(), usual.named_params())
        for ranks in (1, 3):
            found = run_threads(
                ranks, lambda group, where=directory: weights(group, load_model(where, make_site(group)).named_params())
            )[0]
            assert found.keys() == expected.keys()
            for tensor, values in expected.items():
                np.testing.assert_array_equal(found[tensor], values, err_msg=tensor)
        ModelSource(load_config(directory), directory, blocks=range(1)).make(make_site(SerialGroup()))


def test_an_untied_model_still_needs_both(model_dir):
    rewrite(model_dir, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "1 missing: model.embed_tokens.weight" in refusal(model_dir)


def test_one_file_of_weights_beside_the_index_of_others_is_refused(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "llama-mqa-bias", tmp_path / "both"))
    shutil.copy(GOLDEN / "llama-gqa" / "model.safetensors", directory)
    assert "holds two models: model.safetensors, and model.safetensors.index.json of model-00001" in refusal(directory)


def test_an_index_of_the_one_file_is_no_second_model(model_dir):
    index = {"weight_map": dict.fromkeys(stored_tensors(model_dir), "model.safetensors")}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    load_model(model_dir, make_site(SerialGroup()))


def test_what_is_written_names_its_class_and_one_dtype(tmp_path):
    model = load_model(GOLDEN / "llama-gqa", make_site(SerialGroup()))
    config = {**model.config.hf, "dtype": "float64", "torch_dtype": "float16", "architectures": [None]}
    save_model(model, tmp_path / "m", SerialGroup(), Documents(config), save_dtype="bfloat16")
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["dtype"] == "bfloat16" and "torch_dtype" not in written


# What is refused


def refusal(directory, error=FileError):
    with pytest.raises(error) as caught:
        load_model(directory, make_site(SerialGroup()))
    return str(caught.value)


def test_missing_unexpected_and_misshaped_tensors_are_listed_together(model_dir):
    def change(tensors):
        for name in [name for name in tensors if "mlp.up_proj" in name]:
            del tensors[name]
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
        tensors |= {f"extra.{i}": np.zeros(1, np.float32) for i in range(7)}

    rewrite(model_dir, change)
    message = refusal(model_dir)
    assert "missing: model.layers.0.mlp.up_proj.weight" in message
    assert "7 unexpected: extra.0, extra.1, extra.2, extra.3, extra.4, ..." in message
    assert "1 mis-shaped: model.norm.weight (expected [" in message


def test_a_config_with_more_layers_than_the_files(model_dir):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    assert "9 missing: model.layers." in refusal(model_dir)


def test_a_tied_head_may_be_stored_when_it_is_equal(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "gpt2", tmp_path / "tied"))
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"]}))
    load_model(directory, make_site(SerialGroup()))
    rewrite(directory, lambda tensors: tensors["lm_head.weight"].__setitem__((40, 3), 9.0))
    assert "lm_head.weight is tied to another one" in refusal(directory)
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": np.zeros((1, 1), np.float32)}))
    assert "mis-shaped: lm_head.weight" in refusal(directory)


def test_incomplete_downloads(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "llama-mqa-bias", tmp_path / "sharded"))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    second = directory / "model-00002-of-00002.safetensors"
    kept = second.read_bytes()
    second.unlink()
    message = refusal(directory)
    assert "incomplete download: 1 of the 2 files" in message and second.name in message
    second.write_bytes(kept[:-4])
    assert "is truncated" in refusal(directory)
    second.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert "git-lfs pointer" in refusal(directory)
    second.write_bytes(kept)
    index["weight_map"]["model.norm.weight2"] = second.name
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "incomplete download: 1 tensors aren't in the files" in refusal(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../b"}}')
    assert "outside its directory" in refusal(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    assert "under weight_map" in refusal(directory)


def test_directories_that_are_none(model_dir, tmp_path):
    assert "doesn't exist" in refusal(tmp_path / "none")
    assert "is a file, not a directory" in refusal(model_dir / "config.json")
    assert "holds no config.json" in refusal(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "x.gguf is a file, not a directory; mpitp convert makes one of it" in refusal(tmp_path / "x.gguf")
    (model_dir / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor" in refusal(model_dir)
    (model_dir / "pytorch_model.bin").write_bytes(b"x")
    assert "pickled weights can run code" in refusal(model_dir)
    (model_dir / "config.json").write_text("{nonsense")
    assert "config.json is not JSON" in refusal(model_dir)
    (model_dir / "config.json").write_text("[1]")
    assert "must hold a JSON object" in refusal(model_dir)
    (model_dir / "config.json").write_text('{"model_type": "bert"}')
    message = refusal(model_dir, ConfigError)
    assert str(model_dir) in message and "'bert'" in message


# Saving: nothing half-written, one error for all


def save_on(ranks, target, **options):
    def rank_main(group):
        model = load_model(GOLDEN / "llama-gqa", make_site(group))
        errors = None
        try:
            save_model(model, target, group, Documents(model.config.hf), **options)
        except Exception as error:
            errors = f"{type(error).__name__}: {error}"
        return errors

    return run_threads(ranks, rank_main)


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_existing_directory_is_replaced_only_when_asked(ranks, tmp_path):
    target = tmp_path / "model"
    assert save_on(ranks, target) == [None] * ranks
    (target / "vocab.json").write_text("old")
    before = contents(target)
    refused = save_on(ranks, target)
    assert len(set(refused)) == 1 and "exists and is not empty" in refused[0]
    assert contents(target) == before
    assert save_on(ranks, target, overwrite=True) == [None] * ranks
    assert "vocab.json" not in contents(target)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_that_is_a_link_to_another_disk_stays_one(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(tmp_path / "scratch")
    for _ in range(2):  # the link leads to nothing; to a model
        assert save_on(ranks, tmp_path / "run" / "model", overwrite=True) == [None] * ranks
        assert (tmp_path / "run" / "model").is_symlink() and "config.json" in contents(tmp_path / "scratch")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "scratch"]


def test_overwriting_something_that_is_no_model_is_refused(tmp_path):
    target = tmp_path / "home"
    target.mkdir()
    (target / "letters.txt").write_text("dear")
    assert "holds letters.txt, which isn't" in save_on(1, target, overwrite=True)[0]
    assert (target / "letters.txt").exists()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_place_that_cannot_be_written_is_one_error_on_all_ranks(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    errors = save_on(ranks, tmp_path / "file" / "model")
    assert len(set(errors)) == 1 and errors[0].startswith("FileError: can't create") and "file/model" in errors[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kept", [False, True])
def test_a_failure_on_one_rank_leaves_nothing(ranks, kept, tmp_path, monkeypatch):
    target = tmp_path / "model"
    if kept:
        save_on(1, target)
    before = contents(target) if kept else None
    real, calls = os.pwrite, []

    def full_disk(*args):
        calls.append(args)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full_disk)
    errors = save_on(ranks, target, overwrite=True)
    assert len(set(errors)) == 1 and errors[0].endswith("No space left on device")
    assert list(tmp_path.iterdir()) == ([target] if kept else [])
    if kept:
        assert contents(target) == before


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    save_on(1, tmp_path / "whole")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, data[:101], offset))
    save_on(2, tmp_path / "short")
    assert contents(tmp_path / "short") == contents(tmp_path / "whole")


def test_the_old_directory_comes_back_when_publishing_fails(tmp_path, monkeypatch):
    target = tmp_path / "model"
    save_on(1, target)
    before = contents(target)
    real = Path.rename

    def rename(self, to):
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return real(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    assert "can't publish" in save_on(2, target, overwrite=True)[0]
    assert contents(target) == before and list(tmp_path.iterdir()) == [target]


def test_an_unknown_save_dtype(tmp_path):
    model = load_model(GOLDEN / "gpt2", make_site(SerialGroup()))
    with pytest.raises(UsageError, match="expected one of float64, float32"):
        save_model(model, tmp_path / "m", SerialGroup(), Documents({}), save_dtype="int8")


def test_an_element_that_nobody_owns_is_caught(tmp_path):
    """Were a rank's rows forgotten, zeros would be saved in their place."""
    model = load_model(GOLDEN / "gpt2", make_site(SerialGroup()))
    _, param = next(iter(model.named_params()))
    rows, *others = param.placement.parts[0].dims
    shorter = Part(param.placement.parts[0].name, (replace(rows, owned=range(1, rows.size)), *others))
    param.placement = replace(param.placement, parts=(shorter,))
    with pytest.raises(AssertionError, match="owned by no rank"):
        save_model(model, tmp_path / "m", SerialGroup(), Documents({}))


def test_raise_together():
    def rank_main(group, failing, error):
        try:
            raise_together(group, error if group.rank in failing else None)
        except Exception as caught:
            return f"{type(caught).__name__}: {caught}"
        return None

    assert run_threads(3, rank_main, (), FileError("x")) == [None] * 3
    assert run_threads(3, rank_main, (2,), FileError("x")) == ["FileError: x"] * 3
    assert (
        run_threads(3, rank_main, (1, 2), KeyError("x"))
        == ["RuntimeError: rank 1: KeyError: 'x'"] + ["KeyError: 'x'"] * 2
    )


@pytest.mark.parametrize("name", MODELS)
def test_each_rank_reads_only_its_own_bytes(name, monkeypatch):
    """The bytes read by all ranks are those of the weights, replicas read once by each holder, plus headers."""
    monkeypatch.setattr("mpitp.checkpoint.safetensors_file.PAGE_BYTES", 1)
    counted = []
    real = os.preadv

    def preadv(descriptor, buffers, offset):
        count = real(descriptor, buffers, offset)
        counted.append(count)
        return count

    monkeypatch.setattr(os, "preadv", preadv)

    def rank_main(group):
        model = load_model(GOLDEN / name, make_site(group))
        return sum(param.data.size for _, param in model.named_params())

    held = sum(run_threads(3, rank_main))
    with HfWeights(GOLDEN / name) as weights:
        total = sum(math.prod(shape) for shape in weights.shapes().values())
    itemsize = 8 if any(array.dtype == np.float64 for array in stored_tensors(GOLDEN / name).values()) else 4
    assert sum(counted) == held * itemsize
    assert held < 2 * total


def test_expected_tensors_are_the_stored_ones():
    for name in MODELS:
        model = load_model(GOLDEN / name, make_site(SerialGroup()))
        with HfWeights(GOLDEN / name) as weights:
            assert expected_tensors(model) == weights.shapes()
    assert read_config(GOLDEN / "gpt2")["model_type"] == "gpt2"
    assert hf_directory.FIRST_FEW == 5
