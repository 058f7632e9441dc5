"""`mpitp eval pairs|labels|words|masked|images`: what a run has taught a model, on data that it hasn't seen.

The data, the batches and the scores are those of the training task of the same kind (`train/kinds.py`), whose held-out
part is all of what is given here.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpitp.config import DTYPES
from mpitp.errors import ConfigError, UsageError
from mpitp.paths import input_path, path_option

if TYPE_CHECKING:
    from mpitp.config import RunConfig
    from mpitp.models.any_config import AnyConfig
    from mpitp.models.batch import Batch
    from mpitp.train.task import Judgement, Task

MOST_TOKENS = 512  # of a text, where nothing is said and the model has more


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of evaluation. `task`: of a run file; `of`: the models that it is for; `head`: what they must have;
    `scores`: what is told; `example`: a call of it.
    """

    task: str
    help: str
    data: str
    of: str
    head: str
    scores: str
    example: str


KINDS = {
    "pairs": Kind(
        task="translation",
        help="of an encoder-decoder on pairs",
        data="source TAB target, or JSON lines",
        of="an encoder with a decoder",
        head="",
        scores="the part of right tokens of the targets, and of targets that are right from beginning to end",
        example="--model runs/translation/model held-out.tsv",
    ),
    "labels": Kind(
        task="classification",
        help="of a classifier on labelled texts",
        data="label TAB text, or JSON lines",
        of="an encoder",
        head="classification",
        scores="the part of texts whose class is right",
        example="--model runs/sentiment/model held-out.tsv",
    ),
    "words": Kind(
        task="token-classification",
        help="of a classifier of words on tagged text",
        data="CoNLL's columns",
        of="an encoder",
        head="tokens",
        scores="the part of words whose label is right, and the F1 of the spans that labels make",
        example="--model runs/names/model held-out.conll",
    ),
    "masked": Kind(
        task="masked",
        help="of a masked language model on prepared text",
        data="made by mpitp data prepare",
        of="an encoder",
        head="masked",
        scores="the part of hidden tokens that are told right",
        example="--model models/rxnfp data/valid",
    ),
    "images": Kind(
        task="image",
        help="of a vision transformer on images",
        data="a folder, .npz or IDX file",
        of="a vision transformer",
        head="classification",
        scores="the part of images whose class is right",
        example="--model runs/digits/model test/",
    ),
}


def add_kinds(kinds: Any, formatter: Any) -> None:
    """The parsers of all of them."""
    for name, kind in KINDS.items():
        parser = kinds.add_parser(name, help=kind.help, formatter_class=formatter)
        parser.description = f"Measure {kind.of} on data that it hasn't seen:\n{kind.scores}; and the mean loss."
        calls = (f"mpitp eval {name} {kind.example}", f"mpitp launch -n 2 -- eval {name} {kind.example} --json")
        parser.epilog = "examples:\n  " + "\n  ".join(calls)
        parser.add_argument("data", type=input_path, metavar="DATA", help=kind.data)
        parser.add_argument("--model", required=True, type=path_option, metavar="DIR", help="Hugging Face directory")
        if name != "images":
            parser.add_argument(
                "--seq-len", type=int, metavar="N", help="tokens of a text; default the model's, <= 512"
            )
        parser.add_argument("--batch", type=int, default=16, metavar="B", help="samples at a time; default 16")
        parser.add_argument("--seed", type=int, default=0, metavar="S", help="of what is masked; default 0")
        parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
        parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays live")
        parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure; every rank runs this, rank 0 prints."""
    from mpitp.checkpoint.together import together
    from mpitp.comm.agreement import agree, call_facts
    from mpitp.comm.start import start_job
    from mpitp.error_stream import tell
    from mpitp.layers.site import make_site
    from mpitp.optim.adamw import AdamW, AdamWSettings
    from mpitp.train.deal import Deal
    from mpitp.train.facts import run_facts
    from mpitp.train.kinds import open_task
    from mpitp.train.step import TrainStep

    if args.batch < 1:
        raise UsageError(f"--batch {args.batch}: expected at least 1")
    group, device = start_job(args.device)
    config = together(group, lambda: _run_config(args))
    agree(group, lambda: call_facts("eval", args, ["model", "data"]) | run_facts(config))
    task = together(group, lambda: _checked(open_task(config), args))
    if group.rank == 0:
        tell(task.notices())
    task.check(group)
    site = make_site(group, dtype=args.dtype, device=device)
    model, counted = task.source.make(site), [0]
    step = TrainStep(model, AdamW([], AdamWSettings(), model.dtype))  # nothing is updated
    found = task.judge(step, _counting(task.held_out_batches(Deal.on(site.mesh)), counted))
    if group.rank == 0:
        _say(args, found, counted[0])
    return 0


def _stored(args: argparse.Namespace) -> AnyConfig:
    """The directory's config. Raises ConfigError for a model of another kind."""
    from mpitp.checkpoint.encoder_decoder import load_encoder_decoder_config
    from mpitp.checkpoint.encoder_source import load_other_config
    from mpitp.checkpoint.hf_directory import read_config
    from mpitp.models.encoder_config import EncoderConfig
    from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
    from mpitp.models.kinds import is_encoder_decoder
    from mpitp.models.vision_config import VisionConfig

    raw, kind = read_config(args.model), KINDS[args.what]
    config: AnyConfig | None = None
    if is_encoder_decoder(raw):
        config = load_encoder_decoder_config(args.model)
    else:
        config = load_other_config(args.model)
    of_types: dict[type, str] = {
        EncoderDecoderConfig: "pairs", EncoderConfig: "labels, words, masked", VisionConfig: "images"
    }  # fmt: skip
    suited = of_types.get(type(config), "perplexity")
    if config is None or args.what not in suited.split(", "):
        raise ConfigError(
            f"{args.model} (model_type {raw.get('model_type')!r:.60}) isn't {kind.of}; measure it with mpitp eval "
            f"{suited}"
        )
    head = getattr(config, "head", "")
    if kind.head != head:
        raise ConfigError(
            f"{args.model} has no head for {kind.task}: its architecture says {head!r}; mpitp train with [task] "
            f'kind = "{kind.task}" gives it one'
        )
    return config


def _run_config(args: argparse.Namespace) -> RunConfig:
    """The run that the same task would be learnt by, all of whose data is held out."""
    from mpitp.run_file import make_run_config

    most = getattr(_stored(args), "max_positions", 0) or MOST_TOKENS
    length = min(most, MOST_TOKENS) if getattr(args, "seq_len", None) is None else args.seq_len
    if length < 1:
        raise UsageError(f"--seq-len {length}: expected at least 1")
    return make_run_config(
        {
            "model": {"from": args.model, "dtype": args.dtype},
            "task": {"kind": KINDS[args.what].task},
            "data": {"train": args.data, "valid": args.data, "seq_len": length, "valid_sequences": 0},
            "train": {
                **{"steps": 1, "micro_batch_size": args.batch, "global_batch_size": args.batch},
                **{"seed": args.seed, "run_dir": "-"},
            },
        }
    )


def _checked(task: Task, args: argparse.Namespace) -> Task:
    """The task, if the model's own head judges its data. Raises ConfigError where it would begin anew."""
    stored, wanted = _stored(args), task.model_config
    own, named = (getattr(config, "labels", ()) for config in (stored, wanted))
    if own != named:
        raise ConfigError(
            f"{args.model} has the classes {', '.join(own[:6])}, {args.data} has {', '.join(named[:6])}: name the "
            "model's (id2label in config.json) as the data do"
        )
    return task


def _counting(batches: Iterable[Batch], counted: list[int]) -> Iterator[Batch]:
    for batch in batches:
        counted[0] += batch.num_targets
        yield batch


def _say(args: argparse.Namespace, found: Judgement, count: int) -> None:
    what = {"pairs": "tokens of targets", "masked": "hidden tokens"}.get(
        args.what, args.what.replace("labels", "texts")
    )
    record: dict[str, Any] = {"loss": found.loss, "perplexity": math.exp(min(found.loss, 700.0))}
    record |= {"accuracy": found.accuracy, "targets": count}
    record |= {name: x for name, x in (("exact", found.exact), ("f1", found.f1)) if x is not None}
    if args.json:
        print(json.dumps(record))
        return
    exact = "" if found.exact is None else f", {found.exact:.4f} of the targets word for word"
    exact += "" if found.f1 is None else f", F1 of spans {found.f1:.4f}"
    print(
        f"accuracy {found.accuracy:.4f} over {count} {what}{exact}; loss {found.loss:.4f} "
        f"(perplexity {record['perplexity']:.4f})"
    )
