"""Compares a layout with what another program has computed from the same weights and tokens, read from one .npz file.

    tokens [b, s], targets [b, s]     int64; a negative target doesn't count
    logits [b s, v], loss []          of these tokens; the mean over the targets that count
    grad/NAME                         optional: gradients of the loss, by the names of the model directory's tensors

`scripts/save_reference.py` makes such a file with PyTorch and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpitp.comm.group import Group
from mpitp.data.npz import read_npz
from mpitp.errors import FileError, UsageError
from mpitp.files import os_failure
from mpitp.layers.param import Param
from mpitp.layers.placement import Part
from mpitp.models.batch import Batch
from mpitp.models.model import HEAD, CausalLM
from mpitp.models.names import HfPiece
from mpitp.optim.grad_sync import sync_gradients
from mpitp.verify.compare import Comparison, Tolerance, compare
from mpitp.verify.record import Piece, Record, Tokens, place_of

NEEDED = ("tokens", "targets", "logits", "loss")
Reference = Mapping[str, np.ndarray]


def read_reference(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of the file. Raises FileError for one that can't be read or lacks some."""
    try:
        with open(path, "rb") as file:
            found = read_npz(file)
    except OSError as error:
        raise os_failure("read", path, error) from error
    except ValueError as error:
        raise FileError(f"{path} is no .npz file of arrays: {error}") from error
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise FileError(f"{path} lacks {', '.join(missing)}; a reference has {', '.join(NEEDED)} and grad/NAME")
    tokens, targets = found["tokens"], found["targets"]
    if tokens.ndim != 2 or tokens.shape != targets.shape or tokens.dtype.kind not in "iu":
        raise FileError(f"{path}: tokens {list(tokens.shape)} and targets {list(targets.shape)} must be whole [b, s]")
    return found


def compare_with_reference(
    group: Group, model: CausalLM, reference: Reference, tolerance: Tolerance
) -> list[Comparison]:
    """The rows of the report on the first rank: logits, loss and gradients. A collective."""
    batch = Batch.of_rows(reference["tokens"], reference["targets"])
    logits, _ = model.forward(batch)
    tokens = Tokens.of(batch.rows, batch.rows, batch.rows)
    place = place_of(logits, model.types()[HEAD].outgoing, tokens)
    own = [Record("logits", "y", np.asarray(logits), **place)]
    theirs = [Record("logits", "y", reference["logits"].reshape(-1, model.config.vocab_size))]
    loss, ctx = model.loss_forward(batch)
    model.zero_grad()
    model.loss_backward(ctx, 1.0 / batch.num_targets)
    sync_gradients((param for _, param in model.named_params()), model.site.mesh)
    own.append(Record("loss", "value", np.array(loss / batch.num_targets)))
    theirs.append(Record("loss", "value", np.asarray(reference["loss"], np.float64).reshape(())))
    pieces = model.hf_pieces()
    for name, param in model.named_params():
        for part, where in param.placement.places():
            piece = pieces[name, part.name]
            if f"grad/{piece.tensor}" in reference:
                label = f"{name}.{part.name}" if part.name else name
                mine = np.zeros(part.local_shape) if param.grad is None else param.grad[where]
                here = tuple(slice(None) for _ in part.dims)
                own.append(Record(label, "grad", mine, part.shape, (Piece(here, part.index),)))
                theirs.append(Record(label, "grad", _global_part(reference, param, part, piece)))
    return compare(group, own, theirs if group.rank == 0 else None, tolerance)


def _global_part(reference: Reference, param: Param, part: Part, piece: HfPiece) -> np.ndarray:
    """The part's own rows of the stored tensor's gradient."""
    stored = reference[f"grad/{piece.tensor}"]
    stored = stored.T if piece.transposed else stored
    fused = param.placement.fused
    runs = piece.runs(range(part.shape[fused]))
    found = np.concatenate(
        [stored.take(range(first, first + len(r)), axis=fused, mode="clip") for first, r in runs], fused
    )
    if found.shape != part.shape:
        raise UsageError(f"grad/{piece.tensor} of the reference has the shape {list(stored.shape)}: another model's?")
    return found
