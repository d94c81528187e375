"""Record feature distillation in float64, by its formulas, in NumPy.

feature_distillation.npz has the losses of given features, their gradients and
the queue after it; and of ten steps of AdamW the losses, the last parameters
and the last queue. The student of these steps is linear: its patches are those
of an image times `stem`, and their mean is its representation. Gradients are
the imaginary parts of f(x + ih) / h, which needs no derivative by hand and is
exact to rounding.

To record again: python tests/golden/record_feature_distillation.py
"""

import numpy as np
import seeded

STEPS, IMAGES, QUEUE = 10, 4, 14
WIDTH, TEACHER = 3, 5
GRID, TEACHER_GRID = (2, 3), (3, 5)
TEMPERATURE, WEIGHT = 0.07, 0.8
ADAMW = {'learning_rate': 3e-3, 'weight_decay': 0.04}


def normal(seed, **shapes):
  """Return float32 normal numbers by name."""
  rng = np.random.default_rng(seed)
  return {k: rng.standard_normal(x, np.float32) for k, x in shapes.items()}


def inputs(seed):
  """Return features of a batch: the teacher's, and pixels of the student."""
  return normal(
    [1, seed],
    teacher=(IMAGES, TEACHER),
    teacher_patches=(IMAGES, *TEACHER_GRID, TEACHER),
    student=(IMAGES, WIDTH),
    student_patches=(IMAGES, *GRID, WIDTH),
    queue=(QUEUE, TEACHER),
  )


def weights():
  """Return the first parameters."""
  shapes = {'stem': (WIDTH, WIDTH)}
  for name in ('image', 'patches'):
    shapes |= {f'{name}/kernel': (WIDTH, TEACHER), f'{name}/bias': TEACHER}
  return normal(2, **shapes)


def unit(x):
  return x / np.sqrt((x * x).sum(-1, keepdims=True))


def log_softmax(x):
  x = x / TEMPERATURE
  x = x - x.real.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl(teacher, student):
  """Return KL(softmax(teacher) || softmax(student)), a mean over rows."""
  p, q = log_softmax(teacher), log_softmax(student)
  return (np.exp(p) * (p - q)).sum(-1).mean()


def resized(x, grid):
  """Return x [B, h, w, D] at another grid: bilinear, cells have centres."""

  def places(old, new):
    for i in range(new):
      at = min(max((i + 0.5) * old / new - 0.5, 0), old - 1)
      low = int(at)
      yield low, min(low + 1, old - 1), at - low

  out = np.zeros((len(x), *grid, x.shape[-1]), x.dtype)
  for i, (top, bottom, y) in enumerate(places(x.shape[1], grid[0])):
    for j, (left, right, z) in enumerate(places(x.shape[2], grid[1])):
      above = (1 - z) * x[:, top, left] + z * x[:, top, right]
      below = (1 - z) * x[:, bottom, left] + z * x[:, bottom, right]
      out[:, i, j] = (1 - y) * above + y * below
  return out


def distil(params, batch, queue):
  """Return (loss, global, local) and the next queue."""
  image = batch['student'] @ params['image/kernel'] + params['image/bias']
  patches = batch['student_patches'] @ params['patches/kernel']
  patches = unit(resized(patches + params['patches/bias'], TEACHER_GRID))
  image, teacher = unit(image), unit(batch['teacher'])
  queue = np.concatenate([teacher, queue])[:QUEUE]
  of_images = kl(teacher @ queue.T, image @ queue.T)
  of_patches = 0
  for x, y in zip(unit(batch['teacher_patches']), patches):
    x, y = x.reshape(-1, TEACHER), y.reshape(-1, TEACHER)
    of_patches += kl(x @ x.T, y @ y.T) / IMAGES
  return (of_images + WEIGHT * of_patches, of_images, of_patches), queue


def linear(params, batch):
  """Return the batch with the features of the linear student."""
  patches = batch['student_patches'] @ params['stem']
  return batch | {'student': patches.mean((1, 2)), 'student_patches': patches}


def gradients(fn, params):
  """Return the gradients of a real function of {name: array}."""
  found = {k: np.zeros_like(x) for k, x in params.items()}
  for name, x in params.items():
    for at in np.ndindex(x.shape):
      moved = x.astype(complex)
      moved[at] += 1e-30j
      found[name][at] = fn(params | {name: moved}).imag / 1e-30
  return found


def wide(arrays):
  return {k: np.float64(x) for k, x in arrays.items()}


def record():
  batch, params = wide(inputs(0)), wide(weights())
  queue = np.float64(np.float32(unit(batch.pop('queue'))))
  losses, after = distil(params, batch, queue)
  golden = {'loss/values': losses, 'loss/queue': after}
  del params['stem']
  free = params | {k: x for k, x in batch.items() if 'student' in k}
  found = gradients(lambda x: distil(x, batch | x, queue)[0][0], free)
  golden |= {f'grad/{k}': x for k, x in found.items()}

  params, queue = wide(weights()), np.zeros((QUEUE, TEACHER))
  first = {k: np.zeros_like(x) for k, x in params.items()}
  second, golden['losses'] = dict(first), []
  for step in range(1, STEPS + 1):
    batch = wide(inputs(step))

    def loss(x, batch=batch, queue=queue):
      return distil(x, linear(x, batch), queue)

    found = gradients(lambda x: loss(x)[0][0], params)
    losses, queue = loss(params)
    golden['losses'].append(losses)
    for k, x in found.items():
      first[k] = 0.9 * first[k] + 0.1 * x
      second[k] = 0.999 * second[k] + 0.001 * x**2
      change = first[k] / (1 - 0.9**step)
      change = change / (np.sqrt(second[k] / (1 - 0.999**step)) + 1e-8)
      change = change + ADAMW['weight_decay'] * params[k]
      params[k] = params[k] - ADAMW['learning_rate'] * change
  golden |= {f'last/{k}': x for k, x in params.items()} | {'queue': queue}
  seeded.save('feature_distillation', golden)


if __name__ == '__main__':
  record()
