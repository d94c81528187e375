"""Record DINOv2 and its anchored form in float64, for objectives/dinov2.py.

dinov2.npz and anchor.npz hold, of ten steps of a tiny ViT, the losses with
their terms, the first gradients and the last parameters. The formulas are
written down here once more, in the plainest form, with JAX for gradients:
the ViT and heads, Sinkhorn-Knopp, KoLeo, iBOT, Gram matrices, AdamW, and the
teacher. The anchored run has the same loss and an anchor. Inputs and first
parameters are those of `seeded`.

To record again, in the environment of this package:

  python tests/golden/record_dinov2.py
"""

import functools

import numpy as np
import seeded

STEPS, BATCH, LARGE, SMALL, SIDE, PATCH = 10, 4, 2, 3, 16, 4
N, WIDTH, HEADS, DEPTH = (SIDE // PATCH) ** 2, 16, 2, 2
HIDDEN, BOTTLENECK, OUTPUTS = 24, 8, 40
LR, DECAY, EPS, MOMENTUM = 1e-3, 0.04, 1e-6, 0.9
TEMPERATURES, STUDENT, WARMUP = (0.1, 0.2), 0.25, 5
KOLEO, PATCH_WEIGHT, ANCHOR = 0.1, 0.7, 1.5


def crops(step):
  """Return uint8 views by name, all of one size, and the hidden patches."""
  rng = np.random.default_rng(step)
  size = SIDE, SIDE, 3
  hidden = np.zeros((BATCH * LARGE, N), bool)
  views = rng.permutation(BATCH * LARGE)[: BATCH * LARGE // 2]
  for view, count in zip(views, (2, 4, 5, 7)):
    hidden[view, rng.permutation(N)[:count]] = True
  return {
    'image': rng.integers(0, 256, (BATCH, LARGE, *size), np.uint8),
    'local': rng.integers(0, 256, (BATCH, SMALL, *size), np.uint8),
    'hidden': hidden.reshape(BATCH, LARGE, N),
  }


def shapes():
  """Return {path: shape} of the parameters, which have our names."""
  d, m, dh = WIDTH, 2 * WIDTH, WIDTH // HEADS
  found = {
    'embedding/kernel': (PATCH, PATCH, 3, d),
    'embedding/bias': (d,),
    **{'cls': (1, 1, d), 'mask': (1, 1, d), 'norm/scale': (d,)},
    **{'cls_pos_embedding': (1, 1, d), 'norm/bias': (d,)},
    'pos_embedding': (1, SIDE // PATCH, SIDE // PATCH, d),
  }
  for i in range(DEPTH):
    block = f'block_{i}'
    for name in ('norm1', 'norm2'):
      found |= {f'{block}/{name}/{x}': (d,) for x in ('scale', 'bias')}
    for name in ('query', 'key', 'value'):
      found[f'{block}/attn/{name}/kernel'] = (d, HEADS, dh)
      found[f'{block}/attn/{name}/bias'] = (HEADS, dh)
    found[f'{block}/attn/out/kernel'] = (HEADS, dh, d)
    found[f'{block}/attn/out/bias'] = (d,)
    for name, (i_, o) in {'fc1': (d, m), 'fc2': (m, d)}.items():
      found[f'{block}/mlp/{name}/kernel'] = (i_, o)
      found[f'{block}/mlp/{name}/bias'] = (o,)
  for head in ('objective', 'objective/patches'):
    sides = d, HIDDEN, HIDDEN, BOTTLENECK
    for i in (1, 2, 3):
      found[f'{head}/fc{i}/kernel'] = sides[i - 1 : i + 1]
      found[f'{head}/fc{i}/bias'] = (sides[i],)
    found[f'{head}/last/kernel'] = (BOTTLENECK, OUTPUTS)
    found[f'{head}/last/length'] = (1, 1, OUTPUTS)
  return found


def weights(seed=0):
  """Return the first parameters, {path: float32 array}."""
  found = seeded.weights(shapes(), seed)
  return {k: x + k.endswith('length') for k, x in found.items()}


def unit(x):
  return x / (x**2).sum(-1, keepdims=True) ** 0.5


def gelu(x, exact):
  import jax.numpy as jnp
  from jax.scipy.special import erf

  if exact:
    return x / 2 * (1 + erf(x / 2**0.5))
  inner = (2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)
  return x / 2 * (1 + jnp.tanh(inner))


def vit(p, images, hidden=None):
  """Return (class tokens [N, D], patches [N, n, D]) of uint8 [N, H, W, C]."""
  import jax
  import jax.numpy as jnp

  def norm(x, name):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * p[f'{name}/scale'] + p[f'{name}/bias']

  rows = SIDE // PATCH
  x = (images / 127.5 - 1).reshape(-1, rows, PATCH, rows, PATCH, 3)
  x = x.swapaxes(2, 3).reshape(-1, N, PATCH * PATCH * 3)
  x = x @ p['embedding/kernel'].reshape(-1, WIDTH) + p['embedding/bias']
  if hidden is not None:
    x = jnp.where(hidden.reshape(-1, N, 1), p['mask'], x)
  x = x + p['pos_embedding'].reshape(1, N, WIDTH)
  cls = jnp.broadcast_to(p['cls'] + p['cls_pos_embedding'], (len(x), 1, WIDTH))
  x = jnp.concatenate([cls, x], axis=1)
  for i in range(DEPTH):
    y, name = norm(x, f'block_{i}/norm1'), f'block_{i}/attn'
    q, k, v = (
      jnp.einsum('bnd,dhe->bhne', y, p[f'{name}/{part}/kernel'])
      + p[f'{name}/{part}/bias'][:, None]
      for part in ('query', 'key', 'value')
    )
    scores = q @ k.swapaxes(2, 3) / (WIDTH // HEADS) ** 0.5
    y = jnp.einsum(
      'bhne,hed->bnd', jax.nn.softmax(scores) @ v, p[f'{name}/out/kernel']
    )
    x = x + y + p[f'{name}/out/bias']
    y, name = norm(x, f'block_{i}/norm2'), f'block_{i}/mlp'
    y = gelu(y @ p[f'{name}/fc1/kernel'] + p[f'{name}/fc1/bias'], exact=False)
    x = x + y @ p[f'{name}/fc2/kernel'] + p[f'{name}/fc2/bias']
  x = norm(x, 'norm')
  return x[:, 0], x[:, 1:]


def project(p, x, name='objective'):
  """Return the outputs of a head, [..., K]."""
  for i in (1, 2, 3):
    x = x @ p[f'{name}/fc{i}/kernel'] + p[f'{name}/fc{i}/bias']
    x = gelu(x, exact=True) if i < 3 else unit(x)
  prototypes = unit(p[f'{name}/last/kernel'].T).T
  return x @ prototypes * p[f'{name}/last/length'][0, 0]


def sinkhorn(outputs, temperature):
  """Return targets [B, K] of outputs [B, K]."""
  import jax.numpy as jnp

  q = jnp.exp(outputs / temperature).T
  q = q / q.sum()
  k, b = q.shape
  for _ in range(3):
    q = q / q.sum(1, keepdims=True) / k
    q = q / q.sum(0, keepdims=True) / b
  return (q * b).T


def koleo(x):
  """Return the loss of class tokens [B, D] of one view."""
  import jax.numpy as jnp

  x, total = unit(x), 0.0
  for i in range(BATCH):
    others = x[np.array([j for j in range(BATCH) if j != i])]
    nearest = others[jnp.argmax(others @ x[i])]
    distance = jnp.sqrt(((x[i] - nearest) ** 2).sum())
    total -= jnp.log(distance + 1e-8) / BATCH
  return total


def cross_entropy(targets, outputs):
  import jax

  logs = jax.nn.log_softmax(outputs / STUDENT)
  return -(targets * logs).sum(-1)


def gram(patches):
  """Return the cosines [B, n, n] of the patches of images [B, n, D]."""
  return unit(patches) @ unit(patches).swapaxes(1, 2)


def loss_of(p, teacher, batch, temperature, start=None):
  """Return the loss and its terms."""
  import jax.numpy as jnp

  large = batch['image'].reshape(-1, SIDE, SIDE, 3)
  small = batch['local'].reshape(-1, SIDE, SIDE, 3)
  hidden = batch['hidden'].reshape(-1, N)
  cls, patches = vit(p, large, hidden)
  seen = cls.reshape(BATCH, LARGE, WIDTH)
  local = vit(p, small)[0].reshape(BATCH, SMALL, WIDTH)
  of_teacher, of_patches = vit(teacher, large)
  targets = sinkhorn(project(teacher, of_teacher), temperature)
  targets = targets.reshape(BATCH, LARGE, OUTPUTS)
  outputs = project(p, jnp.concatenate([seen, local], axis=1))
  pairs = [
    cross_entropy(targets[:, g], outputs[:, v]).mean()
    for g in range(LARGE)
    for v in range(LARGE + SMALL)
    if g != v
  ]
  terms = {'class_loss': sum(pairs) / len(pairs)}
  places = [(i, j) for i, row in enumerate(hidden) for j in np.flatnonzero(row)]
  view, at = np.array(places).T
  name = 'objective/patches'
  targets = sinkhorn(project(teacher, of_patches[view, at], name), temperature)
  losses = cross_entropy(targets, project(p, patches[view, at], name))
  weights = 1 / hidden.sum(1)[view] / len(hidden)
  terms['patch_loss'] = (weights * losses).sum()
  terms['koleo'] = sum(koleo(seen[:, g]) for g in range(LARGE))
  loss = terms['class_loss'] + PATCH_WEIGHT * terms['patch_loss']
  loss += KOLEO * terms['koleo']
  if start is not None:
    frozen = vit(start, large)[1]
    terms['anchor'] = ((gram(patches) - gram(frozen)) ** 2).mean()
    loss += ANCHOR * terms['anchor']
  return loss, terms


def run(start=None):
  import jax

  p = {k: np.float64(x) for k, x in weights().items()}
  teacher = {k: np.float64(np.float32(0.9) * x) for k, x in weights().items()}
  first, second = ({k: 0 * x for k, x in p.items()} for _ in range(2))
  golden, losses = {}, []
  for step in range(STEPS):
    low, high = TEMPERATURES
    temperature = low + (high - low) * min(1, step / WARMUP)
    fn = functools.partial(loss_of, batch=crops(step), start=start)
    (loss, terms), grads = jax.value_and_grad(fn, has_aux=True)(
      p, teacher, temperature=temperature
    )
    if step == 0:
      golden |= {f'grad/{k}': np.float64(x) for k, x in grads.items()}
    losses.append([loss, *(terms[k] for k in sorted(terms))])
    t = step + 1
    for k, g in grads.items():
      first[k] = 0.9 * first[k] + 0.1 * g
      second[k] = 0.999 * second[k] + 0.001 * g**2
      move = first[k] / (1 - 0.9**t)
      move = move / ((second[k] / (1 - 0.999**t)) ** 0.5 + EPS)
      p[k] = p[k] - LR * (move + DECAY * p[k])
    keep = 1 - (1 - MOMENTUM) * (1 + np.cos(np.pi * step / STEPS)) / 2
    teacher = {k: keep * x + (1 - keep) * p[k] for k, x in teacher.items()}
  golden['losses'] = np.array(losses, np.float64)
  last = {f'last/{k}': np.float32(x) for k, x in p.items()}
  return golden | last


def record():
  import jax

  jax.config.update('jax_enable_x64', True)
  start = {k: np.float64(x) for k, x in weights(seed=1).items()}
  for name, given in (('dinov2', None), ('anchor', start)):
    seeded.save(name, run(given))


if __name__ == '__main__':
  record()
