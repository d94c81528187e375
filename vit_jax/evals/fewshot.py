"""Few-shot linear transfer: regularised least squares on frozen features.

Section 4.1 of the paper: "a regularized least-squares regression problem that
maps the (frozen) representation of a subset of training images to {-1, 1}^K
target vectors", which has a closed form. The paper leaves whitening, bias and
strength open; the defaults here are big_vision's.
"""

import jax
import numpy as np

from vit_jax import sharding
from vit_jax.data import pipeline
from vit_jax.evals.classification import batch_spec


class FewShot:
  """Accuracy on a test split after k examples per class, mean over draws.

  Args:
    model: a model with a method `features`.
    preprocess: uint8 images -> float images.
    mesh: of `sharding.make_mesh`.
    train, test: arguments of `pipeline.eval_batches`, both with labels.
    shots: numbers of examples per class; (1, 5, 10, 25) in big_vision.
    seeds: each draws its own examples per class.
    l2: strength of the regulariser; 2**10 in big_vision.
    features: name of what `model.features` returns, or 'pixels' for the
      flattened images (a baseline that needs no model).
  """

  def __init__(
    self,
    model,
    *,
    preprocess,
    mesh,
    train,
    test,
    shots=(1, 5, 10, 25),
    seeds=(0, 1, 2),
    l2=2.0**10,
    features='pre_logits',
  ):
    self._mesh = mesh
    self._shots, self._seeds, self._l2 = tuple(shots), tuple(seeds), l2
    self._batches = []
    self._batch_specs = [batch_spec(data) for data in (train, test)]
    for data in (train, test):
      sharding.check_batch_size(data['batch_size'], mesh, what='batch_size')
      self._batches.append(
        pipeline.eval_batches(
          **data,
          **sharding.this_process(),
        )
      )

    def extract(params, batch):
      images = preprocess(batch['image'])
      if features == 'pixels':
        out = images
      else:
        out = model.apply({'params': params}, images, method='features')
        if features not in out:
          raise ValueError(
            f'features={features!r}: this model has {sorted(out)} (and pixels).'
          )
        out = out[features]
      out = out.reshape(len(out), -1).astype('float32')
      return out, batch['label'], batch['mask']

    self._extract = jax.jit(extract, out_shardings=sharding.replicated(mesh))

  def check(self, params):
    """Raises the model's error if it cannot take these images; no compute."""
    for spec in self._batch_specs:
      jax.eval_shape(self._extract, params, spec)

  def run(self, params):
    """{'{k}shot': mean accuracy, '{k}shot_seed{s}': of each draw}."""
    (x_train, y_train), (x_test, y_test) = (
      self._collect(params, batches) for batches in self._batches
    )
    results = {}
    for shots in self._shots:
      accuracies = []
      for seed in self._seeds:
        chosen = choose(y_train, shots, seed)
        weights = solve(x_train[chosen], y_train[chosen], l2=self._l2)
        accuracy = np.mean(predict(weights, x_test) == y_test)
        accuracies.append(float(accuracy))
        results[f'{shots}shot_seed{seed}'] = float(accuracy)
      results[f'{shots}shot'] = float(np.mean(accuracies))
    return results

  def _collect(self, params, batches):
    features, labels = [], []
    for batch in batches:
      out = self._extract(params, sharding.put_batch(batch, self._mesh))
      x, y, mask = jax.device_get(out)
      features.append(x[mask])
      labels.append(y[mask])
    return np.concatenate(features), np.concatenate(labels)


def choose(labels, shots, seed):
  """Indices of `shots` examples of each class, drawn by seed.

  Raises ValueError if a class has fewer, or labels are not classes.
  """
  if labels.ndim != 1:
    raise ValueError(
      f'Few-shot needs one class per example; labels have shape {labels.shape}.'
    )
  rng = np.random.default_rng(seed)
  chosen = []
  for label in np.unique(labels):
    (of_class,) = np.nonzero(labels == label)
    if len(of_class) < shots:
      raise ValueError(
        f'{shots} shots: class {label} has {len(of_class)} training examples; '
        'use fewer shots or a larger split.'
      )
    chosen.append(rng.permutation(of_class)[:shots])
  return np.concatenate(chosen)


BIAS = 100.0  # a constant feature so large that its weight is hardly penalised


def solve(x, y, *, l2):
  """Weights of min |X W - T|^2 + l2 |W|^2 on whitened features.

  Args:
    x: [n, D] features; each is whitened by its mean and std (+ 1e-5).
    y: int [n] labels; targets T are 1 for the label and -1 elsewhere.
    l2: strength of the regulariser.

  Returns:
    What `predict` takes. Solved in float64, in the smaller of the primal
    (D x D) and dual (n x n) forms, which agree.
  """
  x = np.asarray(x, np.float64)
  mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
  x = np.concatenate([(x - mean) / std, np.full((len(x), 1), BIAS)], axis=1)
  classes = np.unique(y)
  targets = 2.0 * (y[:, None] == classes) - 1
  n, dim = x.shape
  if n >= dim:
    weights = np.linalg.solve(x.T @ x + l2 * np.eye(dim), x.T @ targets)
  else:
    weights = x.T @ np.linalg.solve(x @ x.T + l2 * np.eye(n), targets)
  return {'mean': mean, 'std': std, 'weights': weights, 'classes': classes}


def predict(solution, x):
  """Labels [n] of features [n, D]."""
  x = (np.asarray(x, np.float64) - solution['mean']) / solution['std']
  weights = solution['weights']
  scores = x @ weights[:-1] + BIAS * weights[-1]
  return solution['classes'][np.argmax(scores, axis=1)]
