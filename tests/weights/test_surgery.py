"""Fine-tuning surgery: what may differ is adapted, all else is an error."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from options import all_set

from vit_jax import pretrained, tree
from vit_jax.models import resample
from vit_jax.models.dense import BlockOptions, Gelu
from vit_jax.models.pooling import ClassToken, Head, Mean, NoPooling
from vit_jax.models.posemb import Learned
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.parallel import sharding
from vit_jax.step import TrainState
from vit_jax.weights import bundle, formats, surgery
from vit_jax.weights.surgery import InitFrom
from vit_jax.zoo import names

SETTINGS = {'width': 8, 'depth': 2, 'mlp_dim': 12, 'num_heads': 2}


def make(**fields):
  fields = SETTINGS | {'num_classes': 5} | fields
  fields = {'embedding': PatchEmbedding(4)} | fields
  return bundle.from_fields(VisionTransformer, **fields)


def flat_params(size=(12, 20), seed=0, num_classes=5, in_chans=3, **fields):
  """{path: array} of a tiny ViT, none of them zero."""
  model = make(num_classes=num_classes, **fields)
  return tiny.normal_params(model, (*size, in_chans), seed=seed)


def adapt(loaded, fresh, **options):
  out, lines = surgery.adapt(loaded, fresh, make(), InitFrom('', **options))
  return out, '\n'.join(lines)


def assert_taken(out, loaded, paths):
  for path in paths:
    np.testing.assert_array_equal(out[path], loaded[path], err_msg=path)


def test_reset_replaces_the_whole_head():
  loaded = flat_params(head=Head(8))
  fresh = flat_params(seed=1, num_classes=3)
  out, report = adapt(loaded, fresh)
  assert out.keys() == fresh.keys()
  trunk = [path for path in fresh if not path.startswith('head')]
  assert_taken(out, loaded, trunk)
  assert_taken(out, fresh, ['head/kernel', 'head/bias'])
  assert report.split('\n') == [
    f'{len(trunk)} arrays loaded;',
    '  head/bias 3 newly initialised',
    '  head/kernel 8x3 newly initialised',
    '  pre_logits/bias 8 dropped',
    '  pre_logits/kernel 8x8 dropped',
  ]


MASKED = {
  'pooling': NoPooling(class_token=True),
  'embedding': PatchEmbedding(4, mask_token=True),
}


@pytest.mark.parametrize('head', ['reset', 'keep'])
def test_the_mask_vector_goes_and_the_class_token_stays(head):
  """From masked patch prediction to a classifier."""
  loaded, fresh = flat_params(**MASKED), flat_params(seed=1)
  out, report = adapt(loaded, fresh, head=head)
  assert out.keys() == fresh.keys()
  assert_taken(out, loaded, ['cls', 'cls_pos_embedding', 'norm/scale'])
  assert '  mask 1x1x8 dropped' in report.split('\n')


def test_the_mask_vector_starts_anew():
  """From a classifier to masked patch prediction, and from that to itself."""
  loaded, fresh = flat_params(), flat_params(seed=1, **MASKED)
  out, report = adapt(loaded, fresh)
  assert_taken(out, fresh, ['mask', 'head/kernel'])
  assert '  mask 1x1x8 newly initialised' in report.split('\n')
  loaded = flat_params(**MASKED)
  out, report = adapt(loaded, fresh)
  assert_taken(out, loaded, ['mask'])
  with pytest.raises(ValueError, match=r'\+ mask'):
    adapt(flat_params(), fresh, head='keep')


def test_position_of_the_class_token():
  """A position that one model lacks is added to the token, or is 0."""
  with_one, without = flat_params(), flat_params(seed=1)
  del without['cls_pos_embedding']
  out, report = adapt(with_one, without)
  assert out.keys() == without.keys()
  total = with_one['cls'] + with_one['cls_pos_embedding']
  np.testing.assert_array_equal(out['cls'], total)
  assert '  cls_pos_embedding added to cls' in report.split('\n')
  out, _ = adapt(without, with_one)
  assert_taken(out, without, ['cls'])
  assert not out['cls_pos_embedding'].any()


def test_keep_takes_the_head_over():
  loaded, fresh = flat_params(), flat_params(seed=1)
  out, report = adapt(loaded, fresh, head='keep')
  assert_taken(out, loaded, fresh)
  assert 'everything unchanged' in report
  with pytest.raises(ValueError, match=r'- head/bias \(5,\)\n\+ head/bias \('):
    adapt(loaded, flat_params(num_classes=3), head='keep')


def test_positions_are_resized_as_the_model_says(tmp_path):
  model = make(posemb=Learned(resize_method='bilinear'))
  weights = bundle.Weights(model, flat_params(), (12, 20, 3))
  formats.write(weights, tmp_path / 'a.npz', 'vit_jax')  # and it stays so
  weights = formats.read(tmp_path / 'a.npz')
  fresh = jax.tree.map(jnp.asarray, tree.unflatten(flat_params((8, 8), seed=1)))
  _, report = surgery.fit(weights, fresh, weights.model, InitFrom(''))
  assert '1x3x5x8 resized to 1x2x2x8 (bilinear)' in report


def test_scanned_and_unrolled_layers_fit_each_other():
  unrolled, scanned = flat_params(), flat_params(scan=True, seed=1)
  out, report = adapt(unrolled, scanned, head='keep')
  assert out.keys() == scanned.keys()
  assert 'layers stacked' in report
  for i in range(2):
    np.testing.assert_array_equal(
      out['blocks/attn/query/kernel'][i],
      unrolled[f'block_{i}/attn/query/kernel'],
    )
  back, report = adapt(out, flat_params(seed=2), head='keep')
  assert 'layers unstacked' in report
  assert_taken(back, unrolled, unrolled)


@pytest.mark.parametrize(
  ('fields', 'lines'),
  [
    ({'width': 12}, ['- norm/scale (8,)', '+ norm/scale (12,)']),
    ({'depth': 3}, ['+ block_2/norm1/scale (8,)']),
    ({'depth': 1}, ['- block_1/norm1/scale (8,)']),
    ({'depth': 3, 'scan': True}, ['+ blocks/attn/key/bias (3, 2, 4)']),
    ({'pooling': Mean()}, ['- cls (1, 1, 8)', '- cls_pos_embedding (1, 1, 8)']),
    ({'pooling.num_registers': 1}, ['+ registers (1, 1, 8)']),
    (
      {'embedding.patch_size': 2},
      ['- embedding/kernel (4, 4, 3, 8)', '+ embedding/kernel (2, 2, 3, 8)'],
    ),
  ],
)
def test_anything_else_is_an_error_as_a_diff(fields, lines):
  with pytest.raises(ValueError) as error:
    adapt(flat_params(), flat_params(**fields))
  shown = str(error.value).split('\n')
  for line in lines:
    assert line in shown
  assert 'patch_resize' in str(error.value)
  assert not [x for x in shown if re.match(r'[-+] head', x)]


def test_a_difference_is_one_page():
  shapes = bundle.shapes(names.create('ViT-Ti/16'), (64, 64, 3))
  with pytest.raises(ValueError) as e:
    adapt(flat_params(depth=4), shapes)
  shown = str(e.value).splitlines()
  assert len(shown) <= 25 and '- cls (1, 1, 8)' in shown
  assert any(line.startswith('and ') for line in shown)


def test_load_into_a_state(tmp_path):
  def state(params, ema):
    params = jax.tree.map(jnp.asarray, tree.unflatten(params))
    ema = jax.tree.map(lambda x: x + 1, params) if ema else None
    return TrainState(jnp.int32(7), params, (), jax.random.key(0), ema)

  old = state(flat_params(), ema=True)
  weights = bundle.Weights(make(), flat_params(), (12, 20, 3))
  tiny.save_run(tmp_path, weights, ema=old.ema, step=7)
  fresh = state(flat_params(seed=1), ema=True)
  mesh = sharding.make_mesh()
  layout = sharding.infer(fresh, [('.*/mlp/fc1/bias', (None,))], mesh)
  fresh = jax.device_put(fresh, layout)

  init_from = InitFrom(path=str(tmp_path), ema=False)
  loaded, report = surgery.load_into(fresh, make(), init_from)
  assert report.startswith(f'parameters of vit_jax, {tmp_path}/checkpoints/7: ')
  kernel = loaded.params['block_1']['mlp']['fc1']['kernel']
  np.testing.assert_array_equal(
    kernel, old.params['block_1']['mlp']['fc1']['kernel']
  )
  assert kernel.sharding == fresh.params['head']['kernel'].sharding
  # The EMA starts again from the loaded parameters, in memory of its own.
  jax.tree.map(np.testing.assert_array_equal, loaded.ema, loaded.params)
  assert loaded.ema['cls'] is not loaded.params['cls']

  init_from = InitFrom(path=str(tmp_path))
  exact = make(block=BlockOptions(mlp=Gelu('exact')))
  averaged, other_report = surgery.load_into(fresh, exact, init_from)
  here, there = "block.mlp=Gelu(form='exact')", "Gelu(form='tanh')"
  assert f'  {here} here, {there} in the file\n' in other_report + '\n'
  assert 'gelu' not in report
  np.testing.assert_array_equal(averaged.params['cls'], old.params['cls'] + 1)


@pytest.mark.parametrize('has_cls', [True, False])
def test_weights_of_masked_patches_get_a_pooling(has_cls, tmp_path):
  fields = MASKED | {'pooling': NoPooling(has_cls, num_registers=1)}
  model, params = make(**fields), flat_params(**fields)
  weights = bundle.Weights(model, params, (12, 20, 3))
  formats.write(weights, tmp_path / 'x.npz', 'vit_jax')
  path = str(tmp_path / 'x.npz')
  tuned = pretrained.from_weights(InitFrom(path=path))
  assert type(tuned.pooling) is (ClassToken if has_cls else Mean)
  assert not tuned.embedding.mask_token
  assert surgery.read(InitFrom(path=path)).model == model


def test_all_fields_of_init_from_act(monkeypatch):
  """In the call of the reader, or in the parameters."""
  calls, weights = [], bundle.Weights(make(), flat_params(), (12, 20, 3))

  def read(path, **options):
    calls.append({'path': path, **options})
    return weights

  monkeypatch.setattr(formats, 'read', read)
  reads = {'path': 'x', 'step': 3, 'ema': True, 'grid': (3, 5)}
  reads |= {'trust': ('mine',), 'prefix': 'teacher.'}
  adapts = {'head': 'keep', 'head_rule': 'norm/.*', 'posemb_resize': 'bilinear'}
  adapts |= {'patch_resize': 'bilinear', 'adapt_channels': True}
  init_from = all_set(InitFrom, **reads, **adapts, options={'scan': True})
  expected = reads | {'scan': True, 'values': False, 'new_head': False}
  surgery.read(init_from, values=False)
  assert calls == [expected]

  fields = {'pooling': Mean(True), 'embedding': PatchEmbedding(2)}
  fresh = flat_params((12, 16), 1, in_chans=1, **fields)
  params = jax.tree.map(jnp.asarray, tree.unflatten(fresh))
  state = TrainState(jnp.int32(0), params, (), jax.random.key(0))
  kept, reset = (
    tree.flatten(surgery.load_into(state, make(**fields), how)[0].params)
    for how in (init_from, dataclasses.replace(init_from, head='reset'))
  )
  assert calls[-1] == expected | {'values': True, 'new_head': True}
  report = surgery.load_into(state, make(**fields), init_from)[1]
  assert report.count('(bilinear)') == 2
  kernel = weights.params['embedding/kernel'].sum(axis=2, keepdims=True)
  kernel = resample.resize_kernel(kernel, (2, 2), 'bilinear')
  table = jnp.asarray(weights.params['pos_embedding'])
  table = jax.image.resize(table, (1, 6, 8, 8), 'bilinear')
  for path, array in (('embedding/kernel', kernel), ('pos_embedding', table)):
    np.testing.assert_allclose(kept[path], array, atol=1e-6)
  assert_taken(kept, weights.params, ['head/kernel', 'norm/scale'])
  assert_taken(reset, weights.params, ['head/kernel', 'cls'])
  assert_taken(reset, fresh, ['norm/scale', 'norm/bias'])
