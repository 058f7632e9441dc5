"""The run file: what is accepted, and that every mistake is one message that helps."""

import dataclasses

import pytest

from mpitp import config
from mpitp.errors import ConfigError
from mpitp.run_file import load_run_config

MINIMAL = """
[model]
from = "models/tiny"
[data]
train = "data/train"
seq_len = 128
[train]
steps = 10
run_dir = "runs/first"
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text=MINIMAL, *overrides):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return load_run_config(path, overrides)

    return load_text


def test_a_minimal_file_gets_defaults(load):
    run = load()
    assert run.model.from_ == "models/tiny" and run.model.dtype == "float32"
    assert (run.mesh.tp, run.mesh.pp, run.mesh.dp, run.mesh.cp) == (0, 1, 1, 1)
    assert run.global_batch_size == run.train.micro_batch_size == 1
    assert run.optim.betas == (0.9, 0.95)


def test_a_step_left_out_gives_every_stage_of_every_replica_a_microbatch(load):
    run = load(MINIMAL + "micro_batch_size = 3\n[mesh]\ndp = 2\npp = 4\n")
    assert run.global_batch_size == 24


def test_a_full_file_is_read(load):
    run = load(
        MINIMAL + 'device = "gpu"\nmicro_batch_size = 4\nglobal_batch_size = 16\neval_every = 5\n'
        "[optim]\nlr = 1\nbetas = [0.9, 0.99]\n[checkpoint]\nevery = 3\n[mesh]\ndp = 2\n",
        "data.valid=data/valid",
    )
    assert run.optim.lr == 1.0 and isinstance(run.optim.lr, float)
    assert run.optim.betas == (0.9, 0.99) and run.train.device == "gpu" and run.data.valid == "data/valid"
    assert run.checkpoint.every == 3 and run.global_batch_size == 16


def test_a_model_may_be_given_by_its_own_fields(load):
    text = MINIMAL.replace('from = "models/tiny"', 'model_type = "llama"\nhidden_size = 64\ndropout = { resid = 0.1 }')
    run = load(text, "model.rope_scaling={ rope_type = 'linear', factor = 2.0 }")
    assert run.model.fields == {
        "model_type": "llama",
        "hidden_size": 64,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    assert run.model.dropout.resid == 0.1 and run.model.dropout.attn is None


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.steps=100", lambda run: run.train.steps == 100),
        ("optim.lr = 1e-3", lambda run: run.optim.lr == 1e-3),
        ("optim.betas=[0.8, 0.9]", lambda run: run.optim.betas == (0.8, 0.9)),
        ("train.run_dir=7", lambda run: run.train.run_dir == "7"),
        ('train.run_dir="a b"', lambda run: run.train.run_dir == "a b"),
        ("train.device=gpu", lambda run: run.train.device == "gpu"),
        ("train.invariant=true", lambda run: run.train.invariant is True),
        ("model.dropout.attn=0.2", lambda run: run.model.dropout.attn == 0.2),
        ("model.from=other/a=b", lambda run: run.model.from_ == "other/a=b"),
    ],
)
def test_overrides(load, override, read):
    assert read(load(MINIMAL, override))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=1", ['unknown key train.stepz: did you mean "steps"', "known keys are steps, run_dir"]),
        ("trian.steps=1", ['unknown section [trian]: did you mean "train"']),
        ("optim.learning_rate=1", ["unknown key optim.learning_rate", "known keys are lr"]),
        ("model.dtyp=float64", ['did you mean "dtype"']),
        ("model.dropout.residual=0.1", ["unknown key model.dropout.residual", 'did you mean "resid"']),
        ("model.dropout=0.1", ["model.dropout must be a table"]),
        ("train.steps=0", ["train.steps = 0", "a whole number of at least 1"]),
        ("train.steps=1e3", ["train.steps = 1000.0", "a whole number", "written 1000"]),
        ("train.steps=true", ["train.steps = true", "a whole number"]),
        ("train.steps=many", ['train.steps = "many"', "a whole number"]),
        ("optim.lr=nan", ["optim.lr = nan", "a finite number above 0"]),
        ("optim.lr=inf", ["optim.lr = inf"]),
        ("optim.lr=-1", ["optim.lr = -1", "above 0"]),
        ("optim.lr=0", ["optim.lr = 0", "above 0"]),
        ("optim.betas=[0.9]", ["optim.betas = [0.9]", "a list of 2 numbers"]),
        ("optim.betas=[0.9, 1.0]", ["optim.betas", "not including, 1"]),
        ("optim.schedule=linear", ['optim.schedule = "linear"', '"cosine", "constant"']),
        ("optim.min_lr=1", ["optim.min_lr=1.0 is above optim.lr"]),
        ("mesh.tp=-1", ["mesh.tp = -1", "at least 0"]),
        ("optim.zero=1", ["optim.zero=1 deals", "mesh.dp=1", "set mesh.dp to the number of replicas", "optim.zero=0"]),
        ("optim.zero=4", ["optim.zero = 4", "0, 1, 2, 3"]),
        ("optim.bucket_mib=0", ["optim.bucket_mib", "above 0"]),
        ("train.seed=-1", ["train.seed = -1"]),
        ("train.run_dir=", ["train.run_dir", "not empty"]),
        ("data.seq_len=0", ["data.seq_len = 0"]),
        ("train.device=tpu", ['"cpu", "gpu"']),
        ("train.micro_batch_size=3", None),
        ("train.eval_every=5", ["train.eval_every=5 needs held-out text", "data.valid"]),
        ("train.invariant_blocks=4", ["train.invariant"]),
        ("model.config=x/config.json", ["exactly one of model.from", "model.from and model.config came"]),
        ("train=3", ["--set train=3", "SECTION.KEY=VALUE"]),
        ("train.steps", ["SECTION.KEY=VALUE"]),
        ("train.steps.x=3", ["steps is a value, not a section"]),
    ],
)
def test_mistakes_are_named(load, override, words):
    overrides = (override,) if words else (override, "train.global_batch_size=4")
    with pytest.raises(ConfigError) as caught:
        load(MINIMAL, *overrides)
    for word in words or ["train.global_batch_size=4 must be a multiple of train.micro_batch_size=3"]:
        assert word in str(caught.value)
    assert caught.value.exit_code == 3


def test_what_the_invariant_mode_cannot_deal(load):
    settings = ("mesh.dp=2", "train.invariant=true")
    load(MINIMAL, *settings, "optim.zero=1")
    with pytest.raises(ConfigError, match="optim.zero=2 adds gradients rows by rows.*set optim.zero=1 or 0"):
        load(MINIMAL, *settings, "optim.zero=2")


def test_what_context_parallelism_cannot_cut(load):
    with pytest.raises(ConfigError, match=r"mesh.cp=3 cuts each sequence into 2 \* 3 = 6 pieces, .* use mesh.cp = 2"):
        load(MINIMAL, "mesh.cp=3", "data.seq_len=5")
    with pytest.raises(ConfigError, match=r"mesh.cp=2 and train.invariant can't go together"):
        load(MINIMAL, "mesh.cp=2", "train.invariant=true")
    assert load(MINIMAL, "mesh.cp=3", "data.seq_len=6", 'mesh.cp_form="heads"').mesh.cp_form == "heads"


def test_missing_keys_and_sections_are_named(load):
    with pytest.raises(ConfigError, match="data.train is missing"):
        load(MINIMAL.replace('train = "data/train"', ""))
    with pytest.raises(ConfigError, match="say which model"):
        load(MINIMAL.replace('from = "models/tiny"', ""))
    with pytest.raises(ConfigError, match="train.steps is missing"):
        load(MINIMAL[: MINIMAL.index("[train]")])
    with pytest.raises(ConfigError, match="data must be a section"):
        load("data = 3\n")


def test_a_slip_of_our_own_keys_among_model_fields_is_caught(load):
    text = MINIMAL.replace('from = "models/tiny"', 'model_type = "llama"\nsave_dtyp = "float16"')
    with pytest.raises(ConfigError, match='did you mean "save_dtype"'):
        load(text)


def test_unreadable_files_are_one_message(load, tmp_path):
    with pytest.raises(ConfigError, match="can't read the run file"):
        load_run_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="not a TOML file"):
        load("steps = \n")
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    with pytest.raises(ConfigError, match="not a TOML file"):
        load_run_config(tmp_path / "latin.toml")


def test_sections_made_in_python_keep_the_same_rules():
    with pytest.raises(ConfigError, match=r"optim.lr = nan"):
        config.OptimSection(lr=float("nan"))
    assert config.OptimSection(lr=1).lr == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.OptimSection().lr = 2


def test_the_key_table_names_every_key():
    table = config.key_table()
    for cls in config.SECTIONS.values():
        for field in dataclasses.fields(cls):
            if "help" in field.metadata:
                assert field.metadata["help"] in table
    assert "relative to the current directory" in table
    assert max(map(len, table.splitlines())) <= 120


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lr=1" + "0" * 400, "optim.lr: a whole number of 1329 bits; expected one below 2"),
        ("optim.lr=1" + "0" * 9000, "optim.lr = "),
        ("optim.lr=0x" + "f" * 9000, "optim.lr: a whole number of 36000 bits"),
        ("optim.lr=1e999", "optim.lr = inf: expected a finite number"),
        ("train.steps=9223372036854775808", "train.steps: a whole number of 64 bits"),
        ("train.global_batch_size=1" + "0" * 30, "train.global_batch_size: a whole number"),
        ("train.global_batch_size=100000000", "train.global_batch_size=100000000 sequences a step: expected at most"),
        ("train.micro_batch_size=100000000", "train.global_batch_size=100000000 sequences a step: expected at most"),
        ("train.seed=[" * 1 + "[" * 5000 + "]" * 5001, "train.seed = "),
        ("train.run_dir=" + "x" * 300, "train.run_dir = .*a name in a path has at most 255 bytes"),
        ("train.run_dir=" + "x/" * 3000, "train.run_dir = .*a path has at most 4095 bytes"),
        ('data.train="a\\u0000b"', "data.train = .*a path has no NUL character"),
    ],
)
def test_absurd_values_are_one_message(load, override, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load(MINIMAL, override)
    assert len(str(caught.value)) < 500


def test_more_sequences_than_can_be_counted(load):
    with pytest.raises(ConfigError, match="train.steps=.* of 2 sequences each: expected below 2"):
        load(MINIMAL, "train.steps=9223372036854775807", "train.micro_batch_size=2")


def test_a_file_nested_beyond_all_reason_is_one_message(load):
    with pytest.raises(ConfigError, match="not a TOML file"):
        load("a = " + "[" * 100_000)


def test_absurd_values_of_a_section_built_in_python():
    with pytest.raises(ConfigError, match="optim.lr = 1000.*: expected a finite number"):
        config.OptimSection(lr=10**400)
    with pytest.raises(ConfigError, match="train.steps = .*expected a whole number of at least 1, below 2"):
        config.TrainSection(steps=2**63, run_dir="r")
    with pytest.raises(ConfigError, match="a whole number of thousands of digits"):
        config.TrainSection(steps=10**5000, run_dir="r")
