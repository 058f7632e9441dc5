"""A text that isn't what its manifest says is refused on every rank before anything is computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mpitp.comm import Group, run_threads
from mpitp.data import token_file
from mpitp.data.token_file import TokenFile
from mpitp.errors import FileError
from mpitp.train.setup import check_texts, open_data
from tests.train.run_case import config, make_data, run


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepared text in chunks of 500 bytes."""
    monkeypatch.setattr(token_file, "CHUNK_BYTES", 500)
    return make_data(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("part", ["train", "valid"])
@pytest.mark.parametrize("harm", ["zeros", "one byte near the end"])
def test_other_tokens_of_the_same_size(tmp_path: Path, data: Path, ranks: int, part: str, harm: str) -> None:
    path = data / part / "tokens.bin"
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)) if harm == "zeros" else content[:-4] + b"x" + content[-3:])
    with pytest.raises(FileError, match=f"{part}/tokens.bin is damaged: what comes from byte"):
        run(ranks, config(data, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks", [1, 3])
def test_manifest_of_an_earlier_version(tmp_path: Path, data: Path, ranks: int) -> None:
    manifest = json.loads((data / "train/manifest.json").read_text())
    del manifest["crc32"]
    (data / "train/manifest.json").write_text(json.dumps(manifest))
    settings = config(data, tmp_path / "run", train_steps=1)
    run(ranks, settings)
    path = data / "train/tokens.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(FileError, match="is damaged: its sha256 is"):
        run(ranks, config(data, tmp_path / "other"))


def test_ranks_share_one_file_and_read_their_own_copy_whole(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(data / "train", tmp_path / "copy")
    shares: list[tuple[int, str, int, int]] = []

    def check_share(self: TokenFile, share: int, of: int) -> None:
        shares.append((ranks_of[self], str(self.directory.name), share, of))

    ranks_of: dict[TokenFile, int] = {}
    monkeypatch.setattr(TokenFile, "check_share", check_share)

    def rank(group: Group) -> None:
        place = data / "train" if group.rank in (0, 3) else tmp_path / "copy"
        settings = config(data, tmp_path / "run", data_train=str(place), data_valid=None, train_eval_every=0)
        opened = open_data(settings)
        ranks_of[opened.train.tokens] = group.rank
        check_texts(group, opened, opened.vocab_size, "the model")

    run_threads(4, rank)
    assert sorted(shares) == [(0, "train", 0, 2), (1, "copy", 0, 2), (2, "copy", 1, 2), (3, "train", 1, 2)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_file_that_goes_while_it_is_read(tmp_path: Path, data: Path, ranks: int) -> None:
    opened = open_data(config(data, tmp_path / "run"))
    (data / "valid/tokens.bin").unlink()

    def rank(group: Group) -> str:
        with pytest.raises(FileError) as caught:
            check_texts(group, opened, opened.vocab_size, "the model")
        return str(caught.value)

    assert set(run_threads(ranks, rank)) == {f"can't read {data}/valid/tokens.bin: No such file or directory"}
