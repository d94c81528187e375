"""Checks of a case of golden/record_families.py: read, resized, written."""

import jax
import numpy as np
import seeded
from small import equal

from vit_jax import pretrained, tree
from vit_jax.weights import bundle, huggingface, original, timm

FORMATS = {'timm': timm, 'hf': huggingface, 'original': original}
NOT_READ = {'intermediate_size', 'hidden_act'}  # next to mlp_ratio
BOUND = 1e-4  # of the spread of the outputs; 1e-6 is usual


def arrays_of(about, recorded, seed=0):
  """Return {name: array} of the file."""
  buffers = {
    name.removeprefix('buffer/'): np.asarray(array)
    for name, array in recorded.items()
    if name.startswith('buffer/')
  }
  return seeded.weights(about['shapes'], seed) | buffers


def features(weights):
  """Return all features of seeded images."""
  params = {'params': tree.unflatten(weights.params)}
  apply = jax.jit(lambda p, x: weights.model.apply(p, x, method='features'))
  return apply(params, seeded.images(weights.image_shape))


def read(about, arrays):
  """Return Weights, for images of the recorded size."""
  options = about.get('options', {})  # what files without a config lack
  weights = FORMATS[about['format']].read(arrays, about['config'], **options)
  assert weights.image_shape == tuple(about['image'])
  return weights


def check(about, recorded, arrays):
  """Check outputs; return (Weights, {what: error / spread})."""
  weights = read(about, arrays)
  out = features(weights)
  out.setdefault('logits', out['pre_logits'])
  if about['other']:
    other, _ = pretrained.fit(weights, image_size=tuple(about['other']))
    out['other'] = features(other)['tokens']
  errors = {
    name: seeded.error(out[name], recorded[name])[2]
    for name in ('tokens', 'logits', 'other')
    if name in recorded
  }
  assert errors and max(errors.values()) < BOUND, errors
  return weights, errors


def check_back(about, weights, arrays):
  """Check that what is written is read as the same, or is the same."""
  format = FORMATS[about['format']]
  back, texts = format.write(weights)
  again = format.read(back, texts['config.json'])
  assert equal(again.params, weights.params)
  assert not bundle.differences(again.model, weights.model)
  assert about['back'] == 'equal' or equal(back, arrays)
  if about['format'] == 'hf':
    recorded, written = about['config'], texts['config.json']
    other = {k for k, x in written.items() if recorded.get(k, x) != x}
    assert other <= NOT_READ | {'model_type', 'architectures'}
  if about['format'] == 'timm':  # which was recorded from it
    args = texts['config.json']['model_args']
    assert about['config']['model_args'].items() <= args.items()
    if ratio := args.get('attn_pool_mlp_ratio'):
      rows = len(back['attn_pool.mlp.fc1.weight'])
      assert int(args['embed_dim'] * ratio) == rows
