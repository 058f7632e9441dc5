"""The data order: every window once an epoch, decided by seed and sample number alone."""

import numpy as np
import pytest

from mpitp.data.prepare import prepare
from mpitp.data.sampler import Sampler, windows_of
from mpitp.data.token_file import TokenFile
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.errors import ConfigError


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(32, 127)))
    prepare([tmp_path / "a"], byte_tokenizer(), tmp_path / "out")
    return TokenFile(tmp_path / "out")  # 95 bytes and the end


@pytest.mark.parametrize("num_windows", [1, 2, 7, 64, 1000])
def test_every_window_once_an_epoch_in_another_order(num_windows):
    epochs = windows_of(range(3 * num_windows), num_windows, seed=5).reshape(3, num_windows)
    for epoch in epochs:
        assert sorted(epoch) == list(range(num_windows))
    if num_windows > 6:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[0], windows_of(range(num_windows), num_windows, seed=6))


def test_a_sample_does_not_depend_on_the_batch_it_is_in():
    together = windows_of(range(40), 11, seed=1)
    alone = [int(windows_of([i], 11, seed=1)[0]) for i in range(40)]
    assert together.tolist() == alone
    assert windows_of([39, 3, 17], 11, seed=1).tolist() == [alone[39], alone[3], alone[17]]


def test_the_order_is_fixed():
    """Were it to change, a run could not be repeated with a newer version."""
    assert windows_of(range(10), 10, seed=1).tolist() == [8, 2, 4, 0, 6, 5, 3, 1, 9, 7]


def test_batches(tokens):
    sampler = Sampler(tokens, seq_len=10, seed=None)
    assert sampler.num_windows == 9
    inputs, targets = sampler.batch(range(9))
    assert inputs.shape == targets.shape == (9, 10) and inputs.dtype == targets.dtype == np.int64
    assert inputs.reshape(-1).tolist() == list(range(32, 122))
    np.testing.assert_array_equal(targets, inputs + 1)
    shuffled, _ = Sampler(tokens, 10, seed=3).batch(range(9))
    assert sorted(shuffled[:, 0]) == sorted(inputs[:, 0]) and not np.array_equal(shuffled, inputs)


def test_a_text_that_just_fits(tokens):
    assert Sampler(tokens, 95, seed=0).num_windows == 1
    with pytest.raises(ConfigError, match=r"data.seq_len=96 needs at least 97 tokens, but .* has 96"):
        Sampler(tokens, 96, seed=0)
