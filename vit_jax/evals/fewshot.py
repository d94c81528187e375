"""Few-shot linear transfer: regularised least squares on frozen features.

Section 4.1 of the paper: "a regularized least-squares regression problem that
maps the (frozen) representation of a subset of training images to {-1, 1}^K
target vectors", which has a closed form. The paper leaves whitening, bias and
strength open; the defaults here are big_vision's.
"""

import numpy as np

from vit_jax.evals import readout


class FewShot:
  """Accuracy on a test split after k examples per class, mean over draws.

  Args:
    shots: numbers of examples per class.
    seeds: each draws its own examples per class.
    l2: strength of the regulariser, big_vision's 2**10. Or several, of which
      each draw takes the one that is best on its held-out shots (the largest
      of equals): a fifth of the shots of each class, at least one; the
      solution is then fitted to all of the shots.
    whiten: by mean and standard deviation (+ 1e-5) of the examples fitted to.
    bias: value of a constant feature, so large that its weight is hardly
      penalised; None for no bias.
    held_out_shots: chooses l2 on so many further examples of each class
      instead, beyond the shots.
    allow_fewer: whether a class that has fewer examples gives what it has, as
      in big_vision; else that is an error.

  `val` is left alone.
  """

  def __init__(
    self,
    shots=(1, 5, 10, 25),
    seeds=(0, 1, 2),
    l2=2.0**10,
    whiten=True,
    bias=100.0,
    held_out_shots=None,
    allow_fewer=False,
  ):
    self._allow_fewer = allow_fewer
    self._shots, self._seeds = tuple(shots), tuple(seeds)
    self._l2 = readout.sweep(l2, 'l2', least=0)
    self._form = {'whiten': whiten, 'bias': bias}
    self._further = held_out_shots or 0
    if not self._seeds or not self._shots or min(self._shots) < 1:
      raise ValueError(
        f'shots={shots} and seeds={seeds}: give at least one of each; shots '
        'count from 1.'
      )
    if held_out_shots is not None:
      if held_out_shots < 1 or len(self._l2) == 1:
        raise ValueError(
          f'held_out_shots={held_out_shots} with l2={l2}: it is a number from '
          '1 on, and serves to choose among several l2; else leave it out.'
        )
    elif len(self._l2) > 1 and min(self._shots) == 1:
      raise ValueError(
        f'shots={shots} with l2={l2}: of 1 shot none can be held out to choose '
        'l2 on. Give one l2, or held_out_shots, or no 1 in shots.'
      )

  def check(self, labels_train, labels_test, *, labels_val=None):
    """Raises ValueError if a class has too few training examples."""
    del labels_val
    count = max(self._shots) + self._further
    drawn = _draw(labels_train, count, 0, self._allow_fewer)
    least = max(self._shots) if self._further else 1
    if len(self._l2) > 1 and max(map(len, drawn)) <= least:
      raise ValueError(
        f'No class has more than {least} training examples: none is left to '
        'choose l2 on. Use fewer shots, a larger split, or one l2.'
      )
    unknown = np.setdiff1d(labels_test, labels_train)
    if len(unknown):
      raise ValueError(
        f'{len(unknown)} classes of test, such as {unknown[0]}, have no '
        'training example; few-shot needs the same number of each.'
      )

  def __call__(self, train, test, *, val=None, mesh=None):
    """{'{k}shot': mean accuracy, '{k}shot_std', '{k}shot_seed{s}': each draw's.

    And '{k}shot_l2_seed{s}' where it is chosen. The standard deviation is the
    population's. The same on every host: numpy in float64.
    """
    del val, mesh
    results = {}
    for shots in self._shots:
      accuracies = []
      for seed in self._seeds:
        l2, solution = self._fit(train, shots, seed)
        found = readout.accuracy(readout.predict(solution, test.x), test.y)
        accuracies.append(found)
        results[f'{shots}shot_seed{seed}'] = found
        if len(self._l2) > 1:
          results[f'{shots}shot_l2_seed{seed}'] = l2
      results[f'{shots}shot'] = float(np.mean(accuracies))
      results[f'{shots}shot_std'] = float(np.std(accuracies))
    return results

  def _fit(self, train, shots, seed):
    """(l2, solution) of a draw."""
    drawn = _draw(train.y, shots + self._further, seed, self._allow_fewer)
    fit = train[np.concatenate([rows[:shots] for rows in drawn])]
    if len(self._l2) == 1:
      (l2,) = self._l2
      return l2, solve(fit.x, fit.y, l2=l2, **self._form)
    # Of a class that has but one example, that one is kept.
    ends = [
      shots
      if self._further
      else len(rows) - min(max(1, shots // 5), len(rows) - 1)
      for rows in drawn
    ]
    kept = train[np.concatenate([r[:end] for r, end in zip(drawn, ends)])]
    held = train[np.concatenate([r[end:] for r, end in zip(drawn, ends)])]
    tried = solutions(kept.x, kept.y, **self._form)
    _, l2 = max(
      (readout.accuracy(readout.predict(tried(l2), held.x), held.y), l2)
      for l2 in self._l2
    )
    return l2, solve(fit.x, fit.y, l2=l2, **self._form)


def choose(labels, shots, seed, *, allow_fewer=False):
  """Indices of `shots` examples of each class, class by class, drawn by seed.

  Of one seed, fewer shots are the first of more. Raises ValueError if a class
  has fewer, unless `allow_fewer`.
  """
  return np.concatenate(_draw(labels, shots, seed, allow_fewer))


def _draw(labels, shots, seed, allow_fewer):
  """[indices of a class's examples] of all classes."""
  rng = np.random.default_rng(seed)
  drawn = []
  for label in np.unique(labels):
    (of_class,) = np.nonzero(labels == label)
    if len(of_class) < shots and not allow_fewer:
      raise ValueError(
        f'{shots} shots (held-out ones included): class {label} has '
        f'{len(of_class)} training examples; use fewer or a larger split, or '
        'allow_fewer=True to take what there is.'
      )
    drawn.append(rng.permutation(of_class)[:shots])
  return drawn


def solve(x, y, *, l2, whiten=True, bias=100.0):
  """Weights W of min |X W - T|^2 + l2 |W|^2.

  Args:
    x: [n, D] features.
    y: int [n] labels; targets T are 1 for the label and -1 elsewhere.
    l2: strength of the regulariser, above 0.
    whiten, bias: how X is made of x, see `FewShot`.

  Returns:
    What `readout.predict` takes: 'kernel' [D, K] and 'bias' [K], of features
    standardised by 'mean' and 'std'; 'classes' [K].
  """
  return solutions(x, y, whiten=whiten, bias=bias)(l2)


def solutions(x, y, *, whiten=True, bias=100.0):
  """l2 -> what `solve` returns, by a single eigendecomposition in float64.

  It is that of the smaller of the matrices X^T X (primal) and X X^T (dual).
  """
  x = np.asarray(x, np.float64)
  dim = x.shape[1]
  mean, std = readout.moments(x) if whiten else (np.zeros(dim), np.ones(dim))
  x = (x - mean) / std
  if bias is not None:
    x = np.concatenate([x, np.full((len(x), 1), bias)], axis=1)
  classes = np.unique(y)
  targets = 2.0 * (np.asarray(y)[:, None] == classes) - 1
  primal = len(x) >= x.shape[1]
  values, basis = np.linalg.eigh(x.T @ x if primal else x @ x.T)
  values = np.maximum(values, 0)[:, None]
  # (X^T X + l2)^-1 X^T T = X^T (X X^T + l2)^-1 T
  right = basis.T @ (x.T @ targets if primal else targets)
  left = basis if primal else x.T @ basis

  def solution(l2):
    weights = left @ (right / (values + l2))
    kernel, rest = np.split(weights, [dim])
    return {
      'kernel': kernel,
      'bias': (bias * rest[0]) if len(rest) else np.zeros(len(classes)),
      'mean': mean,
      'std': std,
      'classes': classes,
    }

  return solution
