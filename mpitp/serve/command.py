"""`mpitp serve`: answer requests over HTTP, as OpenAI's API does, with a model split over any number of ranks."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitp.config import ACTIVATIONS, ACTIVATIONS_HELP
from mpitp.error_stream import ErrorStream, tell
from mpitp.errors import FileError, LaunchError, MpitpError, RankKilled, UsageError
from mpitp.files import os_failure, read_regular
from mpitp.infer import shares_option, speculate_options
from mpitp.paths import path_option

if TYPE_CHECKING:
    import socket

    from mpitp.comm.group import Group
    from mpitp.data.tokenizer import Tokenizer
    from mpitp.infer.engine import Engine
    from mpitp.infer.executor import Executor
    from mpitp.infer.speculation import Speculation
    from mpitp.models.config import DecoderConfig
    from mpitp.models.model import CausalLM
    from mpitp.serve.service import Service
    from mpitp.serve.step_watch import StepWatch
    from mpitp.serve.web import WebThread

KEY_VARIABLE = "MPITP_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
STOP_SIGNALS = ("TERM", "INT", "USR1")
SAME_SECONDS = 1.0
WORDS_TAKE_SECONDS = 0.5  # for the last words to clients when a rank has died

_DESCRIPTION = """\
Serve a model over HTTP as OpenAI's API does: /v1/completions, /v1/chat/completions (streams too), /v1/models, and
/health, /metrics, /openapi.json; a chat page at /. An encoder answers /v1/embeddings. Many texts are computed together
on all ranks; rank 0 speaks HTTP. Needs the extra mpitp[serve]."""

_EPILOG = """\
examples:
  mpitp serve --model runs/first/model
  mpitp launch -n 4 -- serve --model DIR --port 8000 --texts 16
  mpitp serve --model DIR --host 0.0.0.0 --api-key-file keys.txt
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Once", "max_tokens": 20}'

SIGTERM, SIGUSR1 or Ctrl-C: what has been taken is finished, new requests are refused, then it ends with exit code 0; a
second one ends it at once. Open MPI's mpirun leaves no time after TERM or Ctrl-C: send it USR1, as `launch` does.
A key can also come from the variable MPITP_API_KEY."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp serve`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    model = parser.add_argument_group("the model")
    model.add_argument("--model", required=True, type=path_option, metavar="DIR", help="Hugging Face directory")
    model.add_argument("--name", metavar="NAME", help="what clients call it (default: the directory's name)")
    model.add_argument("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32")
    model.add_argument("--activations", choices=ACTIVATIONS, default="auto", help=ACTIVATIONS_HELP)
    model.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays live")
    model.add_argument("--invariant", action="store_true", help="a text has the same bits in any company, on any ranks")
    model.add_argument("--invariant-blocks", type=int, default=0, metavar="B", help="how many blocks (0: chosen)")
    shares_option.add_argument(model)
    speculate_options.add_arguments(model)
    web = parser.add_argument_group("where, and for whom")
    web.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only")
    web.add_argument("--port", type=int, default=8000, help="default 8000; 0: any free one, which is told")
    web.add_argument("--api-key-file", type=path_option, metavar="FILE", help="one key a line; clients must have one")
    web.add_argument("--quiet", action="store_true", help="no line a request on stderr")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--texts", type=int, default=16, metavar="N", help="computed together; default 16")
    limits.add_argument("--step-rows", type=int, metavar="N", help="tokens of one step (default: 256, or 2 x texts)")
    limits.add_argument(
        "--cache-tokens", type=int, metavar="N", help="room of the KV cache (default: as memory allows)"
    )
    limits.add_argument("--max-tokens", type=int, default=4096, metavar="N", help="new ones of a text; default 4096")
    limits.add_argument("--queue", type=int, default=128, metavar="N", help="texts under way or waiting; default 128")
    limits.add_argument("--max-seconds", type=float, default=600.0, metavar="S", help="of one request; default 600")
    limits.add_argument(
        "--step-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="a step that takes longer (a rank hangs) ends the server with an error; default 600; 0: never",
    )
    limits.add_argument("--max-body", type=int, default=1 << 22, metavar="BYTES", help="of one request; default 4 MiB")


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; rank 0 leads, the others follow."""
    _check(args)
    _require_extra()
    from mpitp.checkpoint.hf_directory import read_config
    from mpitp.checkpoint.load import load_config
    from mpitp.comm.start import start_job
    from mpitp.data.tokenizer import load_tokenizer
    from mpitp.infer.executor import Executor, row_by_row
    from mpitp.models.activations import refuse_rounding
    from mpitp.models.encoders import ENCODER_TYPES
    from mpitp.models.ends import TOKENIZER, notices_of, with_ends
    from mpitp.serve.memory import cache_blocks

    world, device = start_job(args.device, invariant=args.invariant)
    _agree(args, world)
    keys, listening = _doors(args, world)
    tokenizer = load_tokenizer(args.model)
    if read_config(args.model).get("model_type") in ENCODER_TYPES:
        if args.speculate:
            raise UsageError("an encoder writes no texts; leave out --speculate")
        refuse_rounding(args.activations)
        _serve_vectors(args, world, device, tokenizer, keys, listening)
        return 0
    config = with_ends(load_config(args.model), TOKENIZER, tokenizer.eos_ids)
    model = _load(args, config, world, device)
    if world.rank == 0:
        tell(notices_of(config))
    speculation = speculate_options.make_speculation(args, world, device, tokenizer)
    models = [model] if speculation is None or speculation.draft is None else [model, speculation.draft]
    blocks = cache_blocks(models, world, args.cache_tokens, args.texts)
    executor = Executor(model, blocks, world, models[1] if len(models) > 1 else None)
    with row_by_row(model):
        if listening is None:
            _follow(executor, world, args.step_seconds)
        else:
            _lead(args, _engine(args, executor, speculation), world, tokenizer, keys, listening)
    return 0


def _agree(args: argparse.Namespace, world: Group) -> None:
    """Refuse ranks that were started with other arguments or other models. A collective."""
    from mpitp.checkpoint.load import model_facts
    from mpitp.comm.agreement import agree, call_facts

    draft = speculate_options.directory_of(args)
    agree(
        world,
        lambda: (
            call_facts("serve", args, ["model"])
            | model_facts("--model", args.model)
            | (model_facts("--speculate", draft) if draft else {})
        ),
    )


def _check(args: argparse.Namespace) -> None:
    for name in ("texts", "cache_tokens", "max_tokens", "queue", "max_body", "step_rows"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= args.port < 2**16:
        raise UsageError(f"--port must lie in 0 .. 65535, got {args.port}")
    if not 0 <= args.step_seconds < float("inf"):
        raise UsageError(f"--step-seconds must be a number of at least 0 (0: no limit), got {args.step_seconds:g}")
    if not args.max_seconds > 0:
        raise UsageError(f"--max-seconds must be above 0, got {args.max_seconds:g}")
    speculate_options.check(args)
    args.step_rows = args.step_rows or max(256, 2 * args.texts)
    if args.step_rows < 2 * args.texts:
        raise UsageError(f"--step-rows must be at least twice --texts ({2 * args.texts}), got {args.step_rows}")


def _require_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import jinja2  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise LaunchError(f"mpitp serve needs {error.name}: pip install 'mpitp[serve]'") from error


def _doors(args: argparse.Namespace, world: Group) -> tuple[Sequence[bytes], socket.socket | None]:
    """Rank 0's keys and listening socket; an error there is raised on all ranks."""
    from mpitp.serve.web import listen

    found: tuple[Sequence[bytes], Any] = (), None
    error: Exception | None = None
    if world.rank == 0:
        try:
            found = read_keys(args.api_key_file, os.environ), listen(args.host, args.port)
        except MpitpError as failure:
            error = failure
    error = world.broadcast_object(error)
    if error is not None:
        raise error
    return found


def read_keys(path: str | None, environ: Mapping[str, str]) -> list[bytes]:
    """The keys of a file (one a line; # begins a comment) and of the environment.

    Raises UsageError where the variable is there but holds nothing and no file is named: whoever set it wanted a key.
    """
    variable = environ.get(KEY_VARIABLE, "").strip()
    if KEY_VARIABLE in environ and not variable and path is None:
        raise UsageError(f"{KEY_VARIABLE} is empty; give it the key, or unset it to let in everybody")
    keys = [os.fsencode(variable)] if variable else []
    if path is not None:
        try:
            lines = read_regular(path, 1 << 20).splitlines()
        except OSError as error:
            raise os_failure("read", path, error) from error
        own = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(b"#")]
        if not own:
            raise FileError(f"{path} holds no key; expected one a line")
        keys += own
    return keys


def _load(args: argparse.Namespace, config: DecoderConfig, world: Group, device: Any) -> CausalLM:
    from mpitp.checkpoint.load import load_model
    from mpitp.layers.site import choose_blocks, make_site
    from mpitp.models.activations import round_activations

    blocks = choose_blocks(args.invariant, args.invariant_blocks, config.heads)
    mesh = shares_option.mesh_of(args, world, device, config.hidden_size)
    site = make_site(mesh, dtype=args.dtype, device=device, invariant_blocks=blocks)
    model = load_model(args.model, site, config=config)
    round_activations(model, args.activations)
    return model


def _engine(args: argparse.Namespace, executor: Executor, speculation: Speculation | None) -> Engine:
    from mpitp.infer.engine import Engine
    from mpitp.infer.schedule import Limits

    drafted_rows = 0 if speculation is None else speculation.rows
    return Engine(executor, Limits(args.texts, args.step_rows, drafted_rows=drafted_rows), speculation=speculation)


def _follow(executor: Executor, world: Group, seconds: float) -> None:
    """On the other ranks. A signal to stop is rank 0's affair: it tells when it is over."""
    from mpitp.infer.orders import Next

    with _signals(lambda: None), _watched(world, _let_first_rank_speak, seconds) as watch:
        executor.follow(lambda order: watch.begin() if order.next is Next.WORK else watch.rest())


def _lead(
    args: argparse.Namespace,
    engine: Engine,
    world: Group,
    tokenizer: Tokenizer,
    keys: Sequence[bytes],
    listening: socket.socket,
) -> None:
    """On rank 0: the engine in this thread, HTTP in another."""
    from mpitp.infer.blocks import BLOCK
    from mpitp.serve.application import ServerLimits, make_application
    from mpitp.serve.service import Service
    from mpitp.serve.shield import LOOPBACK_HOSTS, ShieldSettings
    from mpitp.serve.warm_up import warm_up
    from mpitp.serve.web import WebThread, allow_many_connections

    allow_many_connections()
    web = WebThread()
    service = Service(engine, args.queue, web.deliver)
    name = args.name or Path(args.model).resolve().name
    limits = ServerLimits(args.max_tokens, args.queue, args.max_seconds)
    hosts = LOOPBACK_HOSTS if args.host in LOOPBACK else ()
    shield = ShieldSettings(keys, hosts, args.max_body)
    app = make_application(service, tokenizer, name, limits, shield, _no_line if args.quiet else _line)
    last_words = partial(_last_words, service)
    with _signals(service.drain), _watched(world, last_words, args.step_seconds) as watch:
        warm_up(engine, watch, lambda: service.draining)
        if not service.draining:
            web.start(app, listening)
            facts = f"{args.texts} texts at once, a cache of {engine.executor.num_blocks * BLOCK} tokens"
            _say_where(args, facts, listening, world, bool(keys))
        _run_to_the_end(service, engine, web, watch)
    if world.rank == 0 and not args.quiet:
        tell([f"done: {service.counts.jobs} requests, {service.counts.new_tokens} new tokens"])


def _run_to_the_end(service: Service, engine: Engine, web: WebThread, watch: StepWatch) -> None:
    """Answer until the service is drained; a failure reaches the clients before it ends the job."""
    try:
        service.run(watch)
        watch.begin()
        engine.end()
        watch.rest()
    except BaseException:
        time.sleep(WORDS_TAKE_SECONDS)  # for what the clients are told
        raise
    finally:
        if service.failure is None:
            web.stop()


def _serve_vectors(
    args: argparse.Namespace,
    world: Group,
    device: Any,
    tokenizer: Tokenizer,
    keys: Sequence[bytes],
    listening: socket.socket | None,
) -> None:
    """An encoder: /v1/embeddings instead of texts."""
    from mpitp.checkpoint.encoder import load_trunk
    from mpitp.infer.embed import default_pool, most_tokens
    from mpitp.layers.site import make_site
    from mpitp.serve.metrics import metrics_of_vectors
    from mpitp.serve.shield import LOOPBACK_HOSTS, Shield, ShieldSettings
    from mpitp.serve.vectors import VectorService
    from mpitp.serve.vectors_api import VectorDoor, make_vector_app
    from mpitp.serve.web import WebThread, allow_many_connections

    mesh = shares_option.mesh_of(args, world, device)
    model = load_trunk(args.model, make_site(mesh, dtype=args.dtype, device=device))
    web = WebThread()
    service = VectorService(model, world, default_pool(args.model), args.queue, web.deliver)
    if listening is None:
        with _signals(lambda: None), _watched(world, _let_first_rank_speak, args.step_seconds) as watch:
            return service.follow(watch)
    allow_many_connections()
    name = args.name or Path(args.model).resolve().name
    positions = most_tokens(args.model, model.config.max_positions)
    metrics = metrics_of_vectors(service, world.size)
    door = VectorDoor(service, name, tokenizer, positions, args.max_seconds, metrics)
    shield = ShieldSettings(keys, LOOPBACK_HOSTS if args.host in LOOPBACK else (), args.max_body)
    app = Shield(make_vector_app(door), shield, _no_line if args.quiet else _line)
    with _signals(service.drain), _watched(world, partial(_last_words, service), args.step_seconds) as watch:
        web.start(app, listening)
        _say_where(args, "vectors of texts", listening, world, bool(keys))
        service.run(watch)
        web.stop()


def _line(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=ErrorStream(), flush=True)


def _no_line(text: str) -> None:
    pass


def _say_where(args: argparse.Namespace, facts: str, listening: socket.socket, world: Group, has_keys: bool) -> None:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    ranks = f"{world.size} rank{'s' * (world.size > 1)}"
    print(
        f"serving {args.name or Path(args.model).resolve().name} at http://{shown}:{port} ({ranks}, {facts})",
        flush=True,
    )
    if args.host not in LOOPBACK and not has_keys:
        tell([f"anybody who reaches {shown} port {port} may ask: --api-key-file FILE lets in those with a key"])


def _let_first_rank_speak(text: str) -> None:
    time.sleep(2 * WORDS_TAKE_SECONDS)


def _last_words(service: Any, text: str) -> None:
    service.fail(text)
    time.sleep(WORDS_TAKE_SECONDS)


@contextmanager
def _signals(stop: Any) -> Iterator[None]:
    """The first of STOP_SIGNALS calls `stop`; one that comes SAME_SECONDS later or more ends this process at once.
    Those between are the first one again: `timeout`, for one, tells a process and then its whole group.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told: list[float] = []

    def handle(number: int, frame: Any) -> None:
        told.append(time.monotonic())
        if len(told) == 1:
            stop()
        elif told[-1] - told[0] >= SAME_SECONDS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {
        number: signal.signal(number, handle) for number in (signal.Signals[f"SIG{name}"] for name in STOP_SIGNALS)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _watched(world: Group, last_words: Callable[[str], None], seconds: float) -> Iterator[StepWatch]:
    """Meanwhile the death of a rank of this machine, and a step of more than `seconds` seconds (by the watch that is
    given), end the job, after `last_words(text)`.
    """
    from mpitp.comm.abort import end_job
    from mpitp.comm.deaths import PeerWatch, Process, this_process
    from mpitp.serve.step_watch import LATER_SECONDS, StepWatch, stopped_ranks

    def died(process: Process, living: list[int]) -> None:
        text = f"rank {process.rank} on {process.host} (process {process.pid}) has died: killed, or out of memory?"
        last_words(text)
        end_job(RankKilled(text))

    def overdue() -> None:
        stopped = ", ".join(f"rank {rank}" for rank in stopped_ranks(processes))
        text = f"a step has not ended in {seconds:g} s" + (f": {stopped} is stopped" if stopped else "")
        last_words(text)
        end_job(LaunchError(text))

    own = this_process(world.rank)
    processes = world.all_gather_objects(own) if world.size > 1 else []
    later = LATER_SECONDS if world.rank and seconds else 0.0
    with PeerWatch(own, processes, died), StepWatch(seconds + later, overdue) as watch:
        yield watch
        # Only now is it sure that the others have come to their end too: leaving is no death.
        world.barrier()
    world.barrier()
