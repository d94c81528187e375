"""Layers in numpy and float64, with gradients derived by hand.

Each function returns (output, back). back(gradient of a scalar by the output)
returns the gradients by the array arguments, as a tuple.

Shapes: B examples, N tokens, D width, h heads of dimension d.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

# Gradient of the output -> gradients of the arguments.
Backward = Callable[..., tuple[np.ndarray, ...]]


def affine(
  x: np.ndarray, kernel: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, Backward]:
  """x [..., I], kernel [I, O], bias [O] -> [..., O]."""

  def back(dy):
    rows, of_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return dy @ kernel.T, rows.T @ of_rows, of_rows.sum(0)

  return x @ kernel + bias, back


def layer_norm(
  x: np.ndarray, scale: np.ndarray, bias: np.ndarray, epsilon: float = 1e-6
) -> tuple[np.ndarray, Backward]:
  """x [..., D], scale [D], bias [D] -> [..., D]."""
  std = np.sqrt(x.var(-1, keepdims=True) + epsilon)
  unit = (x - x.mean(-1, keepdims=True)) / std

  def back(dy):
    d = dy * scale
    by_mean = d.mean(-1, keepdims=True)
    by_std = unit * np.mean(d * unit, -1, keepdims=True)
    leading = tuple(range(x.ndim - 1))
    return (
      (d - by_mean - by_std) / std,
      (dy * unit).sum(leading),
      dy.sum(leading),
    )

  return unit * scale + bias, back


def gelu(x: np.ndarray) -> tuple[np.ndarray, Backward]:
  """The approximation by tanh."""
  slope, cubic = np.sqrt(2 / np.pi), 0.044715
  t = np.tanh(slope * (x + cubic * x**3))

  def back(dy):
    dt = (1 - t**2) * slope * (1 + 3 * cubic * x**2)
    return (dy * (0.5 * (1 + t) + 0.5 * x * dt),)

  return 0.5 * x * (1 + t), back


def softmax(x: np.ndarray) -> tuple[np.ndarray, Backward]:
  """Over the last dimension."""
  e = np.exp(x - x.max(-1, keepdims=True))
  p = e / e.sum(-1, keepdims=True)
  return p, lambda dp: (p * (dp - np.sum(dp * p, -1, keepdims=True)),)


def attention(
  q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, Backward]:
  """softmax(q kᵀ / √d) v: three arrays [B, N, h, d] -> [B, N, h, d]."""
  q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
  scale = q.shape[-1] ** -0.5
  weights, softmax_back = softmax(scale * (q @ k.swapaxes(2, 3)))

  def back(dy):
    dy = dy.swapaxes(1, 2)
    (scores,) = softmax_back(dy @ v.swapaxes(2, 3))
    found = (
      scale * (scores @ k),
      scale * (scores.swapaxes(2, 3) @ q),
      weights.swapaxes(2, 3) @ dy,
    )
    return tuple(x.swapaxes(1, 2) for x in found)

  return (weights @ v).swapaxes(1, 2), back


def convolution(
  x: np.ndarray, kernel: np.ndarray, stride: int, padding: int
) -> tuple[np.ndarray, Backward]:
  """x [B, H, W, C], kernel [kh, kw, C, F] -> [B, H', W', F].

  Args:
    x, kernel: see above.
    stride: in both directions.
    padding: rows and columns of zeros at each side.
  """
  kh, kw = kernel.shape[:2]
  widths = ((0, 0), (padding, padding), (padding, padding), (0, 0))
  padded = np.pad(x, widths)
  rows = (padded.shape[1] - kh) // stride + 1
  columns = (padded.shape[2] - kw) // stride + 1
  places = [
    (
      (i, j),
      np.s_[
        :,
        i : i + stride * (rows - 1) + 1 : stride,
        j : j + stride * (columns - 1) + 1 : stride,
      ],
    )
    for i in range(kh)
    for j in range(kw)
  ]

  def back(dy):
    dx, dkernel = np.zeros_like(padded), np.zeros_like(kernel)
    for at, place in places:
      dx[place] += dy @ kernel[at].T
      dkernel[at] = np.tensordot(padded[place], dy, ((0, 1, 2), (0, 1, 2)))
    inner = slice(padding, -padding or None)
    return dx[:, inner, inner], dkernel

  return sum(padded[place] @ kernel[at] for at, place in places), back


def cross_entropy(
  logits: np.ndarray, labels: np.ndarray
) -> tuple[Any, Backward]:
  """Mean of -log softmax(logits)[label]: [B, K], int [B] -> scalar."""
  top = logits.max(-1, keepdims=True)
  log_sum = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
  on = np.zeros_like(logits)
  on[np.arange(len(labels)), labels] = 1

  def back(dy):
    return (dy * (np.exp(logits - log_sum) - on) / len(labels),)

  return np.mean(np.sum(on * (log_sum - logits), -1)), back


def vit_loss(
  params: Any, images: np.ndarray, labels: np.ndarray
) -> tuple[Any, dict[str, Any]]:
  """Return (loss, gradients) of a ViT with a class token (equations 1 to 4).

  Args:
    params: nested dict, as of vit_jax.models.vit without options.
    images: [B, H, W, C], in [-1, 1].
    labels: int [B].
  """
  ph, pw, channels, width = params['embedding']['kernel'].shape
  batch, height, columns, _ = images.shape
  grid = (height // ph, columns // pw)
  patches = images.reshape(batch, grid[0], ph, grid[1], pw, channels)
  patches = patches.swapaxes(2, 3).reshape(batch, -1, ph * pw * channels)
  backs = []  # (path, back) in the order of the forward pass

  def layer(function, path, *inputs):
    p = params
    for name in path.split('/'):
      p = p[name]
    inner = inputs[0].shape[-1]
    main = 'scale' if function is layer_norm else 'kernel'
    matrix = p[main] if p[main].ndim == 1 else p[main].reshape(inner, -1)
    y, back = function(inputs[0], matrix, p['bias'].reshape(-1))

    def with_record(dy):
      dx, dmain, dbias = back(dy)
      found = {main: dmain.reshape(p[main].shape)}
      gradients[path] = found | {'bias': dbias.reshape(p['bias'].shape)}
      return dx

    return y, with_record

  gradients: dict[str, np.ndarray] = {}
  x, embedding_back = layer(affine, 'embedding', patches)
  x = x + params['pos_embedding'].reshape(1, -1, width)
  cls = params['cls'] + params['cls_pos_embedding']
  x = np.concatenate([np.broadcast_to(cls, (batch, 1, width)), x], 1)
  for i in range(sum(name.startswith('block_') for name in params)):
    x, back = _block(layer, f'block_{i}', x, params)
    backs.append(back)
  x, norm_back = layer(layer_norm, 'norm', x)
  logits, head_back = layer(affine, 'head', x[:, 0])
  loss, loss_back = cross_entropy(logits, labels)

  dx = np.zeros_like(x)
  dx[:, 0] = head_back(*loss_back(1.0))
  dx = norm_back(dx)
  for back in reversed(backs):
    dx = back(dx)
  embedding_back(dx[:, 1:])
  of_cls = dx[:, :1].sum(0, keepdims=True)
  gradients |= {'cls': of_cls, 'cls_pos_embedding': of_cls}
  of_positions = dx[:, 1:].sum(0).reshape(params['pos_embedding'].shape)
  return loss, _nested(gradients | {'pos_embedding': of_positions})


def _block(layer, name, x, params):
  """Equations 2 and 3: x + attention(norm(x)), then x + mlp(norm(x))."""
  shape = params[name]['attn']['query']['bias'].shape  # (h, d)
  y, norm1_back = layer(layer_norm, f'{name}/norm1', x)
  heads, projection_backs = [], []
  for part in ('query', 'key', 'value'):
    projected, back = layer(affine, f'{name}/attn/{part}', y)
    heads.append(projected.reshape(*y.shape[:2], *shape))
    projection_backs.append(back)
  y, attention_back = attention(*heads)
  y, out_back = layer(affine, f'{name}/attn/out', y.reshape(x.shape))
  x = x + y
  y, norm2_back = layer(layer_norm, f'{name}/norm2', x)
  y, fc1_back = layer(affine, f'{name}/mlp/fc1', y)
  y, gelu_back = gelu(y)
  y, fc2_back = layer(affine, f'{name}/mlp/fc2', y)

  def back(dx):
    (dy,) = gelu_back(fc2_back(dx))
    dx = dx + norm2_back(fc1_back(dy))
    dy = out_back(dx)
    parts = attention_back(dy.reshape(*dy.shape[:2], *shape))
    projected = (
      back(part.reshape(dy.shape))
      for back, part in zip(projection_backs, parts)
    )
    return dx + norm1_back(sum(projected))

  return x + y, back


def _nested(flat):
  nested = {}
  for path, value in flat.items():
    *folders, name = path.split('/')
    place = nested
    for folder in folders:
      place = place.setdefault(folder, {})
    place[name] = value
  return nested
