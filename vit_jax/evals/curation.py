"""Near copies among images, and what covers a set, by their features.

Features x are float32 [N, D]; their directions are compared.
"""

from collections.abc import Sequence

import numpy as np

from vit_jax.evals.knn import nearest, neighbours

SIDE, _COARSE = 32, 8  # of the grey images that are compared, and of means
_PAIRS = 2**10  # at a time
_USUAL = 4  # an image has fewer copies than that


def copies(
  rows: np.ndarray, pixels: np.ndarray, most: float
) -> list[tuple[int, int, float]]:
  """Return (i, j, distance) of near copies i < j, the nearest first.

  By features a copy is like any other image of the same thing, so details of
  the pixels decide: the distance is 1 - their correlation, in the best of
  eight mirrored and turned positions, relative to the fourth smallest one of
  either image, which needs no threshold for each data set. More than three
  copies of an image are found only if they are exact.

  Args:
    rows: the nearest examples by features, [N, k].
    pixels: grey images, uint8 [N, SIDE, SIDE].
    most: largest distance.
  """
  shape = len(pixels), SIDE // 2, 2, SIDE // 2, 2
  small = _details(pixels.reshape(shape).mean(axis=(2, 4), dtype=np.float32))
  k = rows.shape[1]
  _, similar = nearest(small.reshape(len(small), -1), k)
  rows = np.sort(np.concatenate([rows, similar], axis=1), axis=1)
  one, two = np.repeat(np.arange(len(rows)), 2 * k), rows.ravel()
  parts = np.array_split(np.arange(len(one)), len(one) // _PAIRS + 1)
  found = [_correlation(pixels[one[x]], pixels[two[x]]) for x in parts]
  distance = np.maximum(1 - np.concatenate(found), 0).reshape(rows.shape)
  distance[:, 1:][rows[:, 1:] == rows[:, :-1]] = np.inf  # candidates twice
  usual = np.sort(distance, axis=1)[:, min(_USUAL, k) - 1]
  distance = distance.ravel()
  distance /= 1e-3 + np.minimum(usual[one], usual[two])
  pairs = np.sort([one, two], axis=0).T[distance <= most]
  pairs, first = np.unique(pairs, axis=0, return_index=True)
  distance = distance[distance <= most][first]
  return [
    (*pairs[i].tolist(), float(distance[i]))
    for i in np.argsort(distance, kind='stable')
  ]


def _correlation(one, two):
  """Return the largest correlation of details in eight positions: [n]."""
  one, two = _details(one), _details(two)
  found = [
    (one * np.rot90(x, turns, axes=(1, 2))).sum(axis=(1, 2))
    for x in (two, two[:, :, ::-1])
    for turns in range(4)
  ]
  return np.max(found, axis=0)


def _details(pixels):
  """Return pixels [n, S, S] without the means of squares, of length 1."""
  side = pixels.shape[1] // _COARSE
  x = pixels.astype(np.float32).reshape(-1, _COARSE, side, _COARSE, side)
  x = (x - x.mean(axis=(2, 4), keepdims=True)).reshape(pixels.shape)
  return x / np.maximum(np.linalg.norm(x, axis=(1, 2), keepdims=True), 1e-9)


def cover(x: np.ndarray, count: int, known: Sequence[int]) -> list[int]:
  """Return rows, each the furthest from all before: greedy k-centre.

  The first one is the furthest from the rows `known`, or the most usual one.
  """
  x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30)
  found = [] if len(known) else [int((x @ x.mean(axis=0)).argmax())]
  before = x[[*known, *found]]
  distance = 1 - neighbours(before, x, 1)[0][:, 0]
  distance[[*known, *found]] = -np.inf
  while len(found) < min(count, len(x) - len(known)):
    found.append(int(distance.argmax()))
    distance = np.minimum(distance, 1 - x @ x[found[-1]])
    distance[found[-1]] = -np.inf
  return found
