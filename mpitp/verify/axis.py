"""Along which axis of the mesh an array went wrong, told from what each rank holds of it.

ranks that differ along one axis only claim the same elements, and these differ
    and their sum is right                  nobody sums it along that axis
    else                                    they should be equal
what they claim is equal, and wrong
    by a factor that is the size of an axis, or one over it     summed once too often, or divided once too often
    by a factor that depends on the place along an axis         scaled by each rank for itself
    on the ranks of some coordinates alone                      wrong there
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import numpy as np

from mpitp.verify.whole import Held, Whole, assemble, difference

Places = Sequence[Mapping[str, int]]  # each rank's place along each axis that has several ranks


def axis_at_fault(reference: np.ndarray, held: Sequence[Held], at: Places, tolerances: tuple[float, float]) -> str:
    """The axis, and what is wrong along it; "" where nothing points to one. `tolerances`: absolute ones, up to which
    arrays are equal, and up to which a sum or a multiple explains what is there.
    """
    if not at:
        return ""
    ranks = {rank: assemble([own for own in held if own[0] == rank], reference.shape) for rank in _ranks(held)}
    ranks = {rank: whole for rank, whole in ranks.items() if whole.fits}
    equal, roughly = tolerances
    lines = [_unsummed(axis, reference, ranks, at, roughly) for axis in at[0]]
    lines += [_factor(reference, ranks.values(), at, roughly), _own_factors(reference, ranks, at, roughly)]
    lines += [_some_ranks(reference, ranks, at, equal)]
    return next((line for line in lines if line), "")


def _ranks(held: Sequence[Held]) -> list[int]:
    return sorted({rank for rank, _ in held})


def _unsummed(axis: str, reference: np.ndarray, ranks: Mapping[int, Whole], at: Places, tolerance: float) -> str:
    """What is to be said where neighbours along an axis claim the same elements, and don't agree."""
    lines: dict[tuple[tuple[str, int], ...], list[Whole]] = {}
    for rank, whole in ranks.items():
        lines.setdefault(tuple((a, at[rank][a]) for a in at[rank] if a != axis), []).append(whole)
    found = ""
    for wholes in lines.values():
        common = np.logical_and.reduce([whole.filled for whole in wholes])
        values = [whole.array[common] for whole in wholes]
        if len(wholes) < 2 or not any(difference(a, b) for a, b in combinations(values, 2)):
            continue
        if difference(np.sum(values, axis=0), reference[common]) <= tolerance:
            return f"{axis}: each rank has a summand; nobody sums it along {axis}"
        found = f"{axis}: ranks that should be equal along {axis} are not"
    return found


def _factor(reference: np.ndarray, wholes: Collection[Whole], at: Places, tolerance: float) -> str:
    """Where everything is a multiple of what it should be."""
    if not any(whole.filled.any() for whole in wholes):
        return ""
    sizes = {axis: 1 + max(place[axis] for place in at) for axis in at[0]}
    candidates = [(axis, float(size), "multiplied by") for axis, size in sizes.items()]
    candidates += [(axis, 1.0 / size, "divided by") for axis, size in sizes.items()]
    for axis, factor, how in candidates:
        most = tolerance * max(1.0, factor)
        if all(difference(w.array[w.filled], factor * reference[w.filled]) <= most for w in wholes):
            return f"{axis}: it is {how} the {sizes[axis]} ranks along {axis}: summed, or averaged, once too often"
    return ""


def _own_factors(reference: np.ndarray, ranks: Mapping[int, Whole], at: Places, tolerance: float) -> str:
    """Where the ranks at each place along an axis have a multiple of their own."""
    factors = {rank: _multiple(w.array[w.filled], reference[w.filled], tolerance) for rank, w in ranks.items()}
    if any(np.isnan(factor) for factor in factors.values()):
        return ""
    for axis in at[0]:
        found: dict[int, list[float]] = {}
        for rank, factor in factors.items():
            found.setdefault(at[rank][axis], []).append(factor)
        means = [float(np.mean(each)) for each in found.values()]
        if len(means) > 1 and np.ptp(means) > 1e-3 and all(np.ptp(each) <= 1e-3 for each in found.values()):
            told = ", ".join(f"{mean:.3g}" for mean in means)
            return f"{axis}: the ranks along {axis} have {told} times what it should be, each its own multiple"
    return ""


def _multiple(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> float:
    """How many times `wanted` what is found is; NaN where it isn't a multiple."""
    square = float((wanted * wanted).sum())
    factor = float((found * wanted).sum()) / square if square else float("nan")
    return factor if difference(found, factor * wanted) <= tolerance * max(1.0, abs(factor)) else float("nan")


def _some_ranks(reference: np.ndarray, ranks: Mapping[int, Whole], at: Places, tolerance: float) -> str:
    """Where the ranks with one place along an axis are right and others wrong."""
    wrong = {rank: difference(w.array[w.filled], reference[w.filled]) > tolerance for rank, w in ranks.items()}
    for axis in at[0]:
        verdicts: dict[int, set[bool]] = {}
        for rank, is_wrong in wrong.items():
            verdicts.setdefault(at[rank][axis], set()).add(is_wrong)
        bad = [str(place) for place, found in sorted(verdicts.items()) if found == {True}]
        if 0 < len(bad) < len(verdicts) and all(len(found) == 1 for found in verdicts.values()):
            return f"{axis}: wrong on the ranks at {axis} {', '.join(bad)} alone"
    return ""
