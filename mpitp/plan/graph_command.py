"""`mpitp plan graph`: the operators of a model on a mesh, with flops, bytes, types and collectives."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitp.paths import path_option

if TYPE_CHECKING:
    from mpitp.config import RunConfig
    from mpitp.plan.machine_file import Machine
    from mpitp.plan.step_graph import StepGraph

USUAL_SEQ = 512  # tokens of a sequence

HELP = "the operators of a model, how each is cut, and what is sent"

_DESCRIPTION = """\
Draw a training step as a graph of operators: what each computes, reads and keeps, what its arrays are along each axis
of the mesh, and every collective as a node of its own. One block is opened, the others are folded. By formula, for any
number of ranks; nothing is allocated. Cuts within operators (their shards exchange arrays) and between them (stages
send messages) have colours of their own. Every kind of model is known; one that gives features alone is drawn under a
head of two classes, and an encoder with its decoder for sources and targets of as many tokens.
"""

_EPILOG = """\
examples:
  mpitp plan graph --model models/smollm2 --ranks 4
  mpitp plan graph --model models/smollm2 --ranks 8 --mesh tp=4,pp=2 --format svg --out graph.svg
  mpitp plan graph --config run.toml --ranks 64 --open 3 --machine machine.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp plan graph`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=path_option, metavar="DIR", help="a Hugging Face directory, or a config.json")
    which.add_argument("--config", type=path_option, metavar="RUN.toml", help="what `mpitp train` takes")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="of the job")
    parser.add_argument("--mesh", default="", metavar="AXES", help="ranks along axes, such as tp=2,pp=2")
    parser.add_argument(
        "--seq",
        type=int,
        metavar="N",
        help="with --model: tokens a sequence; default 512, or as many as the model has positions",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="with --model: sequences a microbatch; default 1")
    parser.add_argument(
        "--microbatches", type=int, metavar="N", help="with --model: of a replica in a step; default one a stage"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of a run file")
    parser.add_argument(
        "--open",
        default="",
        metavar="BLOCK",
        help="which block, or layer, is opened, such as 3 or encoder.blocks.0; default the first",
    )
    parser.add_argument("--machine", type=path_option, metavar="FILE", help="a machine file: seconds of each node too")
    parser.add_argument("--format", choices=("text", "svg", "json"), help="default text, or by the name of --out")
    parser.add_argument("--out", type=path_option, metavar="FILE", help="write there, in place of standard output")


def run(args: argparse.Namespace) -> int:
    """Draw."""
    from mpitp.error_stream import tell
    from mpitp.files import check_place, replace_file
    from mpitp.plan.auto import settled
    from mpitp.plan.graph_text import block_of
    from mpitp.plan.machine_file import read_machine

    if args.out:
        check_place(args.out, "draw to")
    machine = read_machine(args.machine) if args.machine else None
    config, lines = settled(_config(args), args.ranks, machine)
    tell(lines)
    graph = graph_of(config, args.ranks)
    opened = block_of(graph, args.open)
    drawn = _drawn(args, graph, opened, machine, config.model.dtype)
    if args.out:
        replace_file(Path(args.out), drawn)
        print(f"written: {args.out}")
    else:
        print(drawn.rstrip("\n"))
    return 0


def _drawn(args: argparse.Namespace, graph: StepGraph, opened: str, machine: Machine | None, dtype: str) -> str:
    from mpitp.plan.graph_json import graph_json
    from mpitp.plan.graph_picture import graph_svg
    from mpitp.plan.graph_text import graph_text
    from mpitp.plan.node_seconds import node_seconds

    seconds = (lambda node: node_seconds(node, machine, graph.sizes, dtype)) if machine else None
    suffix = Path(args.out).suffix[1:] if args.out else ""
    kind = args.format or (suffix if suffix in ("svg", "json") else "text")
    if kind == "json":
        return json.dumps(graph_json(graph, seconds), indent=1) + "\n"
    return (graph_svg if kind == "svg" else graph_text)(graph, opened, seconds).rstrip("\n") + "\n"


def graph_of(config: RunConfig, ranks: int) -> StepGraph:
    """The graph of a run. Raises ConfigError for one that can't be laid on so many ranks."""
    from mpitp.comm.mesh import abstract_mesh
    from mpitp.plan.graph_models import config_of, source_of
    from mpitp.plan.layout import tell_of_shares
    from mpitp.plan.step_graph import step_graph
    from mpitp.train.setup import mesh_sizes
    from mpitp.train.stages import check_layout

    tell_of_shares(config)
    model = config_of(config)
    check_layout(config, source_of(config, model), abstract_mesh(mesh_sizes(config), 0, ranks))
    return step_graph(config, model, ranks)


def _config(args: argparse.Namespace) -> RunConfig:
    """The run file; or one that is made of the options."""
    from mpitp.errors import UsageError
    from mpitp.models.vision_config import VisionConfig
    from mpitp.plan.counts import MOST_RANKS, check_counts
    from mpitp.plan.graph_models import config_of
    from mpitp.run_file import load_run_config, make_run_config

    check_counts(MOST_RANKS, ranks=args.ranks)
    mesh = _mesh(args.mesh)
    if args.config:
        given = [name for name in ("seq", "batch", "microbatches") if getattr(args, name) is not None]
        if given:
            raise UsageError(f"--{given[0]} goes with --model; in a run file it is a key: change it with --set")
        return load_run_config(args.config, [*(f"mesh.{axis}={size}" for axis, size in mesh.items()), *args.set])
    kind = _kind(args.model)
    if kind == "image" and args.seq is not None:
        raise UsageError("--seq goes with texts; an image has as many tokens as patches, and one more")
    tables = _tables(args, mesh, kind)
    if args.seq is None:
        model = config_of(make_run_config({**copy.deepcopy(tables), "mesh": {}}))
        positions = 0 if isinstance(model, VisionConfig) else model.max_positions  # 0: as many as there are
        most = min(USUAL_SEQ, positions or USUAL_SEQ)
        tables["data"]["seq_len"] = most
    return make_run_config(tables, args.set)


def _kind(path: str) -> str:
    """What the model in a directory would be trained to do. Raises ConfigError for one of no type that is known."""
    from mpitp.files import read_json
    from mpitp.models.encoders import encoder_config_from_hf
    from mpitp.models.kinds import is_encoder, is_encoder_decoder, is_vision
    from mpitp.plan.graph_models import KINDS

    file = Path(path)
    raw = read_json(file / "config.json" if file.is_dir() else file)
    if not isinstance(raw, dict):
        return "text"
    if is_encoder_decoder(raw):
        return "translation"
    if is_vision(raw):
        return "image"
    return KINDS[encoder_config_from_hf(raw).head] if is_encoder(raw) else "text"


def _tables(args: argparse.Namespace, mesh: dict[str, int], kind: str) -> dict[str, dict[str, Any]]:
    """A run of the model in a directory, as its run file would have it."""
    from mpitp.plan.counts import MOST, check_counts

    sizes = {"seq": 1, "batch": 1, "microbatches": mesh.get("pp", 1)}
    sizes |= {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    check_counts(MOST, **sizes)
    size = sizes["batch"] * sizes["microbatches"] * mesh.get("dp", 1) * mesh.get("ep", 1)
    return {
        "model": {"config": str(args.model)},
        "task": {"kind": kind},
        "data": {"train": "text", "seq_len": sizes["seq"]},
        "mesh": dict(mesh),
        "train": {"steps": 1, "run_dir": "run", "micro_batch_size": sizes["batch"], "global_batch_size": size},
    }


def _mesh(words: str) -> dict[str, int]:
    """tp=2,pp=2 as sizes. Raises UsageError for what isn't written so."""
    from mpitp.comm.mesh import AXES
    from mpitp.errors import UsageError
    from mpitp.plan.counts import MOST_RANKS, count_in

    sizes = {}
    for word in filter(None, words.split(",")):
        axis, equals, size = word.partition("=")
        if not equals or axis not in AXES or not count_in(size, MOST_RANKS):
            raise UsageError(f"--mesh {words}: expected ranks along the axes tp, pp, dp, ep or cp, such as tp=2,pp=2")
        sizes[axis] = int(size)
    return sizes
