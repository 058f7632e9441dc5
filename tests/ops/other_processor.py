"""Rounded products against the plain expression, in a process whose Numba compiles for another processor."""

from __future__ import annotations

import sys

import numpy as np

from mpitp.ops.rounded import rounded_forward
from tests.ops.test_groupwise import GROUPINGS
from tests.ops.test_rounded import plain, rows_with_odd_groups, weights


def main() -> None:
    x = rows_with_odd_groups(7, 96)
    grouping = GROUPINGS[int(sys.argv[1])]
    codes, scales = weights(grouping, 21, 96)
    for rows in (1, 2, 7):
        y = rounded_forward(x[:rows], codes, scales, grouping)
        np.testing.assert_array_equal(y, plain(x[:rows], codes, scales, grouping))


if __name__ == "__main__":
    main()
