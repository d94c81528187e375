"""pretrained.load: one call from a file to a model that computes the same."""

import json
import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

sys.path.append(str(pathlib.Path(__file__).parent / 'weights'))
from small import logits, random_weights

from vit_jax import config, pretrained, tree
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import VisionTransformer
from vit_jax.runs.checkpoint import Checkpointer
from vit_jax.step import TrainState
from vit_jax.weights import bundle, formats

SMALL = {
  'width': 24,
  'depth': 2,
  'mlp_dim': 48,
  'num_heads': 3,
  'patch_size': (4, 4),
  'num_classes': 5,
}


def make(size=(12, 12), **fields):
  """Weights of a small ViT, all of its parameters random."""
  model = bundle.from_fields(VisionTransformer, **SMALL | fields)
  return random_weights(
    model, (*size, 3), class_names=list('abcde'), activation='sigmoid'
  )


def images(size=(12, 12), channels=3):
  rng = np.random.default_rng(1)
  return rng.uniform(-1, 1, (2, *size, channels)).astype(np.float32)


def load(path, **options):
  """(model, params, report)."""
  report = []
  model, params = pretrained.load(path, report=report.append, **options)
  return model, params, report[0]


def out_of(model, params, inputs):
  """Shape and dtype of the logits, without computing them."""
  return jax.eval_shape(model.apply, {'params': params}, inputs)


def apply(model, params, inputs):
  flat = tree.flatten(params)
  return logits(bundle.Weights(model, flat, inputs.shape[1:]), inputs)


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  path = tmp_path_factory.mktemp('weights') / 'small.npz'
  formats.write(make(), path, 'npz')
  return path


@pytest.mark.parametrize('format', formats.FORMATS)
@pytest.mark.parametrize(
  ('size', 'fields'),
  [
    ((12, 12), {}),
    ((8, 12), {'patch_size': (4, 2), 'gelu': 'exact'}),
    ((12, 12), {'scan': True, 'dtype': 'bfloat16'}),
  ],
)
def test_out_and_in_again_is_the_same_to_the_bit(
  tmp_path, format, size, fields
):
  weights = make(size, **fields)  # files hold layers one by one in any case
  path = tmp_path / ('x.npz' if format in formats.NPZ_FORMATS else 'x')
  formats.write(weights, path, format)
  back = formats.read(path)
  expected = dict(weights.params)
  if format == 'big_vision':  # its class token comes with its position
    expected['cls'] = expected['cls'] + expected['cls_pos_embedding']
    expected['cls_pos_embedding'] = np.zeros_like(expected['cls'])
  assert back.params.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(back.params[name], value, err_msg=name)
  assert back.image_shape == (*size, 3)
  assert back.class_names == weights.class_names
  assert back.activation == 'sigmoid' or format == 'hf'
  # Heads, GELU and the epsilon of LayerNorms are not in the arrays.
  only_run = {} if format == 'vit_jax' else {'scan': False, 'dtype': 'float32'}
  model = bundle.replace(weights.model, **{'scan': False} | only_run)
  assert back.model == model


def test_what_an_npz_cannot_hold_lies_beside_it(tmp_path):
  weights = make((8, 12), patch_size=(4, 2), gelu='exact')
  written = formats.write(weights, tmp_path / 'x.npz', 'npz')
  assert [path.name for path in written] == ['x.npz', 'x.json']
  back = formats.read(tmp_path / 'x.npz')
  assert back.model.block.gelu == 'exact' and back.activation == 'sigmoid'
  (tmp_path / 'x.json').unlink()
  with pytest.raises(ValueError, match=r'12 patches.*grid=\(rows, columns\)'):
    formats.read(tmp_path / 'x.npz')
  model, _, _ = load(tmp_path / 'x.npz', grid=(2, 6))
  assert model.block.gelu == 'tanh'


def test_same_use_is_told_so_and_computes_the_same(file):
  model, params, report = load(file)
  assert report.endswith('everything unchanged')
  np.testing.assert_allclose(
    apply(model, params, images()), logits(make(), images()), atol=1e-6
  )


def test_other_image_sizes_resize_positions_as_scipy_does(file):
  model, params, report = load(file, image_size=(20, 8))
  old = make().params
  expected = scipy.ndimage.zoom(
    old['pos_embedding'][0], (5 / 3, 2 / 3, 1), order=1
  )
  np.testing.assert_allclose(params['pos_embedding'][0], expected, atol=1e-6)
  for path in ('cls', 'cls_pos_embedding'):
    np.testing.assert_array_equal(params[path], old[path])
  assert 'pos_embedding 1x3x3x24 resized to 1x5x2x24 (paper)' in report
  assert out_of(model, params, images((20, 8))).shape == (2, 5)
  _, other, _ = load(file, image_size=(20, 8), posemb_resize='bilinear')
  assert np.abs(other['pos_embedding'] - params['pos_embedding']).max() > 0.01


def test_the_head_is_kept_swapped_or_dropped(file):
  model, params, report = load(file, num_classes=7)
  assert model.num_classes == 7
  assert not params['head']['kernel'].any() and not params['head']['bias'].any()
  assert out_of(model, params, images()).shape == (2, 7)
  assert 'head/kernel 24x7 newly initialised' in report
  model, params, report = load(file, num_classes=0)
  assert 'head' not in params and 'head/kernel dropped' in report
  kept, whole, _ = load(file)
  kernel, bias = (np.asarray(whole['head'][k]) for k in ('kernel', 'bias'))
  np.testing.assert_allclose(
    apply(model, params, images()) @ kernel + bias,
    apply(kept, whole, images()),
    atol=1e-5,
  )
  model, params, _ = load(file, head='reset', head_bias_init=-2.0)
  assert not params['head']['kernel'].any()
  np.testing.assert_array_equal(params['head']['bias'], -2)


def test_channels_and_patches(file):
  model, params, report = load(file, in_chans=1)
  grey = images(channels=1)
  same, colour, _ = load(file)
  np.testing.assert_allclose(
    apply(model, params, grey),
    apply(same, colour, np.repeat(grey, 3, axis=-1)),
    atol=1e-5,
  )
  assert 'channels adapted' in report
  model, params, report = load(file, patch_size=8, image_size=24)
  large = np.zeros((2, 24, 24, 3), np.float32)
  assert out_of(model, params, large).shape == (2, 5)
  assert 'resized to 8x8x3x24 (bicubic_antialias)' in report


def test_how_it_is_run_is_for_the_user_to_say(file):
  model, params, _ = load(file, dtype='bfloat16', scan=True, gelu='exact')
  assert params['blocks']['norm1']['scale'].shape == (2, 24)
  assert out_of(model, params, images()).dtype == np.float32
  with pytest.raises(ValueError, match=r"no field 'gleu'.*'gelu'"):
    load(file, gleu='exact')
  with pytest.raises(ValueError, match='depth=2, not 3'):
    load(file, depth=3)
  with pytest.raises(ValueError, match='cannot be cut into patches'):
    load(file, image_size=10)


def test_a_workdir_with_or_without_model_json(tmp_path):
  weights = make(scan=True)
  params = tree.unflatten(tree.stack_blocks(weights.params))
  params = jax.tree.map(jnp.asarray, params)
  ema = jax.tree.map(lambda x: x + 1, params)
  state = TrainState(jnp.int32(7), params, (), jax.random.key(0), ema)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(7, state, {})
  checkpointer.close()
  alone, raw, _ = load(tmp_path, ema=False)
  assert alone == bundle.replace(weights.model, scan=False)
  for path, value in tree.flatten(raw).items():
    np.testing.assert_array_equal(value, weights.params[path])
  about = {
    'model': config.describe(bundle.replace(weights.model, gelu='exact')),
    'preprocess': {'target': 'vit_jax.preprocess.Normalize'},
    'image_shape': [12, 12, 3],
    'class_names': None,
  }
  (tmp_path / 'model.json').write_text(json.dumps(about))
  told, averaged, _ = load(tmp_path / 'checkpoints' / '7')
  assert told.block.gelu == 'exact' and not told.scan
  np.testing.assert_array_equal(averaged['cls'], raw['cls'] + 1)


def test_a_size_or_grid_that_the_weights_say_themselves_is_an_error(
  file, tmp_path
):
  assert formats.read(file, image_size=12).image_shape == (12, 12, 3)
  with pytest.raises(ValueError, match='is for images of 12x12'):
    formats.read(file, image_size=16)
  (tmp_path / 'checkpoints' / '7' / 'params').mkdir(parents=True)
  with pytest.raises(ValueError, match='leave grid out'):
    formats.read(tmp_path, grid=(3, 3))


def test_resnets_take_any_size(tmp_path):
  model = ResNet(stages=(1,), num_classes=5)
  weights = random_weights(model, (32, 32, 3))
  formats.write(weights, tmp_path / 'r.npz', 'npz')
  loaded, params, _ = load(tmp_path / 'r.npz', image_size=(24, 16))
  inputs = images((24, 16))
  np.testing.assert_allclose(
    apply(loaded, params, inputs), logits(weights, inputs), atol=1e-5
  )


class Executed(Exception):
  pass


class Bomb:
  def __reduce__(self):
    return _explode, ()


def _explode():
  raise Executed


def test_nothing_in_a_file_is_executed(tmp_path, file):
  np.savez(tmp_path / 'p.npz', x=np.array([Bomb()], object))
  (tmp_path / 'p.pth').write_bytes(pickle.dumps({'x': Bomb()}))
  for name in ('p.npz', 'p.pth'):
    with pytest.raises(ValueError, match='pickle'):
      load(tmp_path / name)
  # A config beside weights that names something else to call.
  formats.write(make(), tmp_path / 'x.npz', 'npz')
  about = json.loads((tmp_path / 'x.json').read_text())
  evil = {'target': 'tests.test_pretrained._explode'}
  for change in (
    {'preprocess': evil},
    {'transforms': [{'target': 'builtins.print', 'x': evil}]},
    {'preprocess': {'target': 'vit_jax.preprocess.Normalize', 'mean': evil}},
  ):
    (tmp_path / 'x.json').write_text(json.dumps(about | change))
    with pytest.raises(ValueError, match='which is not in the list'):
      load(tmp_path / 'x.npz')


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda data: data[: len(data) // 2], 'truncated or corrupt'),
    (lambda data: b'', 'is empty'),
    (lambda data: b'not weights at all', 'of an unknown format'),
  ],
)
def test_broken_files_give_one_clear_error(tmp_path, file, change, message):
  (tmp_path / 'x.npz').write_bytes(change(file.read_bytes()))
  with pytest.raises(ValueError, match=message):
    load(tmp_path / 'x.npz')


def test_missing_and_misshapen_layers_are_shown_as_a_diff(tmp_path, file):
  arrays = dict(np.load(file))
  gone = 'Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel'
  del arrays[gone]
  arrays['head/bias'] = np.zeros(6, np.float32)
  arrays['more'] = np.zeros(3, np.float32)
  np.savez(tmp_path / 'x.npz', **arrays)
  with pytest.raises(ValueError) as error:
    load(tmp_path / 'x.npz')
  shown = str(error.value)
  for line in (
    f'+ {gone} (24, 48)',
    '- head/bias (6,)',
    '+ head/bias (5,)',
    '- more (3,)',
  ):
    assert line in shown.splitlines(), shown


def test_no_weights_there_says_what_is(tmp_path):
  with pytest.raises(ValueError, match='does not exist'):
    load(tmp_path / 'nothing')
  (tmp_path / 'pytorch_model.bin').write_bytes(b'\x80\x02')
  with pytest.raises(ValueError, match=r'it has pytorch_model\.bin'):
    load(tmp_path)
