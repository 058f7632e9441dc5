"""Distances between a query and its keys, put into buckets: near ones each by itself, far ones by the logarithm of the
distance (Raffel et al. 2020, section 2.1).

    n < n_0            bucket n                                                          n_0 = half of the buckets
    n >= n_0           bucket n_0 + floor(log(n / n_0) / log(furthest / n_0) * (buckets - n_0)), the last one at most

n is how far the key lies before the query. Where a query sees both ways, keys behind it have half of the buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True)
class Buckets:
    """`count` buckets, the last of which begins below the distance `furthest`; `both_ways`: for keys before the query
    and behind it, else all keys behind it are in bucket 0 with the query's own.
    """

    count: int
    furthest: int
    both_ways: bool

    def of(self, distances: range) -> np.ndarray:
        """The bucket of each distance (key's position - query's position), int64; not to be written to."""
        return _buckets_of(self, distances.start, distances.stop)


@lru_cache(maxsize=512)
def _buckets_of(buckets: Buckets, start: int, stop: int) -> np.ndarray:
    distances = np.arange(start, stop, dtype=np.int64)
    count = buckets.count // 2 if buckets.both_ways else buckets.count
    first = (distances > 0) * count if buckets.both_ways else np.zeros_like(distances)
    n = np.abs(distances) if buckets.both_ways else np.maximum(-distances, 0)
    near = count // 2
    ratio = np.maximum(n, near).astype(np.float32) / np.float32(near)  # in float32, as the weights were trained
    steps = np.log(ratio) / np.float32(math.log(buckets.furthest / near)) * np.float32(count - near)
    far = np.minimum(near + steps.astype(np.int64), count - 1)
    found = first + np.where(n < near, n, far)
    found.flags.writeable = False
    return found
