"""The released .npz files: each array lands where it should, and comes back."""

import numpy as np
import pytest
import released
from released import fill, hollow
from small import equal, logits
from tiny import golden

from vit_jax import pretrained
from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import Map
from vit_jax.models.posemb import Learned, SinCos2d
from vit_jax.models.resnet import ResNet
from vit_jax.weights import family, npz

TABLE = 'Transformer/posembed_input/pos_embedding'
KINDS = {  # of the paper's code
  'vit': released.vit(),
  'rep': released.vit(rep=12),
  'gap': released.vit(cls=False, rows=9),
  'hybrid': released.hybrid((1, 2)),
  'root': released.hybrid((), patch=(8, 8)),
  'mixer': released.mixer(),
  'resnet': released.resnet((1, 2)),
  'bit': released.bit((1, 2)),
}
BIG_VISION = {
  'cls': released.big_vision(),
  'map': released.big_vision(map_head=True),
  'sincos2d': released.big_vision(cls=False, table=False),
  'resnet': released.resnet((1, 2)),
  'bit': released.big_vision_bit((1, 2)),
}


def check_pairs(params, file, pairs):
  for theirs, ours in pairs.items():
    array = file[theirs].reshape(params[ours].shape)
    np.testing.assert_array_equal(params[ours], array, err_msg=ours)


def stack(file, depth=2):
  """The layers of a file under one name each, the first axis counting them."""
  one = 'Transformer/encoderblock_0/'
  out = {k: v for k, v in file.items() if 'encoderblock_' not in k}
  for name in [k for k in file if k.startswith(one)]:
    layers = [file[name.replace('_0/', f'_{i}/', 1)] for i in range(depth)]
    out[name.replace('_0/', '/', 1)] = np.stack(layers)
  return out


@pytest.mark.parametrize('prefix', ['', 'opt/target/', 'params/', 'target/'])
@pytest.mark.parametrize('names', [released.LINEN, released.PRE_LINEN])
def test_every_array_of_a_vit_lands(names, prefix):
  """Those of old names without a prefix are compared with timm below."""
  file = fill(KINDS['vit'])
  plain = npz.read(file)
  for old, new in zip(released.PRE_LINEN, names):
    file = {k.replace(f'/{old}/', f'/{new}/'): x for k, x in file.items()}
  weights = npz.read({prefix + name: array for name, array in file.items()})
  assert equal(weights.params, plain.params)
  assert weights.model == plain.model
  assert weights.notes == ['  assumed: positions are of a grid of 3x3 patches']


@pytest.mark.parametrize(
  'cls, rows, grid, patches',
  [
    (True, 16, (3, 5), (3, 5)),  # 16 is a square, but of 15 patches
    (False, 10, (2, 5), (2, 5)),  # 9 + 1, but no class token
    (True, 17, None, (4, 4)),
  ],
)
def test_the_class_token_is_never_guessed(cls, rows, grid, patches):
  file = fill(released.vit(cls=cls, rows=rows))
  weights = npz.read(file, grid=grid)
  assert weights.params['pos_embedding'].shape == (1, *patches, 16)
  assert ('cls_pos_embedding' in weights.params) == cls
  if grid:
    with pytest.raises(ValueError, match='grid'):
      npz.read(file)


def test_what_is_left_out():
  weights = npz.read(fill(KINDS['rep']))
  assert weights.model.head.representation_size == 12
  assert weights.params['pre_logits/kernel'].shape == (16, 12)
  file = fill(KINDS['vit'])
  more = fill({'opt/state/step': (), 'opt/state/x/embedding/kernel': (2,)})
  named = {f'opt/target/{k}': x for k, x in file.items()}
  named['opt/target/pre_logits'] = np.zeros(0)
  weights = npz.read(named | more)
  assert equal(weights.params, npz.read(file).params)
  assert weights.notes[-1].startswith('  3 arrays left out')


def test_mixers_land():
  file = fill(KINDS['mixer'])
  weights = npz.read(file)
  assert type(weights.model) is MlpMixer
  assert weights.model.tokens_mlp_dim == 6
  assert weights.model.channels_mlp_dim == 24
  assert weights.image_shape == (12, 6, 3)
  layer, ours = 'MixerBlock_1', 'block_1'
  pairs = {
    'stem/kernel': 'embedding/kernel',
    'pre_head_layer_norm/bias': 'norm/bias',
    f'{layer}/LayerNorm_0/scale': f'{ours}/norm1/scale',
    f'{layer}/LayerNorm_1/bias': f'{ours}/norm2/bias',
    f'{layer}/token_mixing/Dense_0/kernel': f'{ours}/token_mixing/fc1/kernel',
    f'{layer}/token_mixing/Dense_1/bias': f'{ours}/token_mixing/fc2/bias',
    f'{layer}/channel_mixing/Dense_0/bias': f'{ours}/channel_mixing/fc1/bias',
  }
  check_pairs(weights.params, file, pairs)


@pytest.mark.parametrize('prefix', ['', 'params/'])
def test_resnets_land(prefix):
  """The BiT paper's in both layouts, and big_vision's own."""
  file = fill(released.resnet((1, 2)), prefix)
  weights = npz.read(file, image_size=(64, 96))
  assert type(weights.model) is ResNet
  assert weights.model.form == 'postact'
  assert weights.image_shape == (64, 96, 3)
  for shapes, padding in (
    (released.bit((1, 2)), 'zero'),
    (released.big_vision_bit((1, 2)), 'lowest'),
  ):
    file = fill(shapes)
    weights = npz.read({f'{prefix}{k}': x for k, x in file.items()})
    model = weights.model
    assert (model.form, model.stages) == ('preact', (1, 2))
    assert (model.pool_padding, model.width_factor) == (padding, 1)
    assert weights.image_shape == (224, 224, 3)
  # timm reads the first layout only.
  theirs, ours = 'block2/unit02', 'resnet/stage2/unit2'
  pairs = {f'{theirs}/conv{i}/kernel': f'{ours}/conv{i}/kernel' for i in '123'}
  pairs |= {f'{theirs}/gn{i}/scale': f'{ours}/norm{i}/scale' for i in '123'}
  pairs |= {
    'root_block/conv_root/kernel': 'resnet/root/conv/kernel',
    'norm-pre-head/scale': 'norm/scale',
  }
  check_pairs(weights.params, file, pairs)
  wide = npz.read(hollow(released.big_vision_bit((3, 4, 6, 3), 3))).model
  assert (wide.stages, wide.width_factor) == ((3, 4, 6, 3), 3)


@pytest.mark.parametrize('kind', KINDS)
def test_writing_gives_the_file_back(kind):
  file = fill(KINDS[kind])
  weights = npz.read(file)
  written, others = npz.write(weights)
  squeezed = {
    name: array.reshape(-1) if '/gn' in f'/{name}' else array
    for name, array in file.items()
  }
  assert equal(written, squeezed)
  assert not others
  assert npz.read(written).model == weights.model


def test_units_of_two_digits():
  """'unit10' comes after 'unit09', and is written like that."""
  file = hollow(released.bit((11,)))
  weights = npz.read(file)
  assert weights.model.stages == (11,)
  assert npz.write(weights)[0].keys() == file.keys()


# Of big_vision.


def test_positions_have_no_row_for_the_class_token():
  file = fill(BIG_VISION['cls'])
  weights = npz.read(stack(file))
  assert equal(weights.params, npz.read(file).params)
  assert weights.model.depth == 2
  params = weights.params
  assert 'cls_pos_embedding' not in params  # not a row of zeros to train
  assert weights.model.posemb == Learned(prefix=False)
  early = fill(released.big_vision(rows=17))  # these have one
  params, table = npz.read(early).params, early['pos_embedding']
  np.testing.assert_array_equal(params['cls_pos_embedding'], table[:, :1])
  np.testing.assert_array_equal(
    params['pos_embedding'], table[:, 1:].reshape(1, 4, 4, 16)
  )
  with pytest.raises(ValueError, match='10 or 9 patches'):  # 2x5, or 3x3
    npz.read(fill(released.big_vision(rows=10)))
  # Without a class token the tenth row is none of it.
  file = fill(released.big_vision(rows=10, cls=False))
  with pytest.raises(ValueError, match='grid'):
    npz.read(file)
  params = npz.read(file, grid=(5, 2)).params
  assert params['pos_embedding'].shape == (1, 5, 2, 16)


@pytest.mark.parametrize('shape', [(3, 5, 16), (1, 3, 5, 16), (15, 16)])
def test_a_table_may_be_a_grid(shape):
  file = fill(released.big_vision(rows=15, cls=False))
  file['pos_embedding'] = table = file['pos_embedding'].reshape(shape)
  weights = npz.read(file, grid=(3, 5) if len(shape) == 2 else None)
  np.testing.assert_array_equal(
    weights.params['pos_embedding'], table.reshape(1, 3, 5, 16)
  )
  assert weights.image_shape == (12, 10, 3)


def test_a_map_head_lands():
  file = fill(BIG_VISION['map'])
  weights = npz.read(file)
  assert weights.model.pooling == Map()
  # Early files have its parts at the top.
  early = {name.removeprefix('MAPHead_0/'): x for name, x in file.items()}
  assert equal(npz.read(early).params, weights.params)
  # One tower of two.
  both = {f'params/img/{name}': array for name, array in file.items()}
  both |= fill({'params/t': (1,), 'params/b': (1,)})
  both |= fill({'params/txt/Encoder_0/encoder_norm/scale': (4,)})
  both |= fill({'opt/0/mu/img/embedding/kernel': (2,)})
  tower = npz.read(both)
  assert equal(tower.params, weights.params)
  # One of the optimizer, three of the text tower.
  assert tower.notes[-1].startswith('  4 arrays left out')


@pytest.mark.parametrize(
  'side, how', [(8, 'bilinear_antialias'), (32, 'paper')]
)
def test_flexivit_is_resized_as_by_big_vision(side, how):
  file = fill(released.big_vision(patch=(side, side), rows=49))
  _, report = pretrained.fit(npz.read(file), patch_size=4, image_size=16)
  assert f'resized to 1x4x4x16 ({how})' in report
  assert 'resized to 4x4x3x16 (bilinear)' in report


def test_positions_without_a_table_are_sincos2d_unless_said():
  file = fill(BIG_VISION['sincos2d'])
  weights = npz.read(file, image_size=(12, 6))
  assert weights.model.posemb == SinCos2d()
  assert weights.image_shape == (12, 6, 3)
  assert npz.read(file, posemb=None).model.posemb is None
  for kind in ('vit', 'hybrid'):  # older than fixed positions
    file = {k: v for k, v in fill(KINDS[kind]).items() if k != TABLE}
    with pytest.raises(ValueError, match=r'\+ .*posembed_input'):
      npz.read(file)


@pytest.mark.parametrize(
  ('shapes', 'prefix', 'transforms'),
  [
    (released.big_vision(patch=(8, 8)), '', (ResizeSmall(27), CentralCrop(24))),
    (
      released.big_vision(patch=(16, 16), rows=196, cls=False),
      'params/',
      (ResizeSmall(256), CentralCrop(224)),
    ),
    (released.resnet((1,)), '', (ResizeSmall(256), CentralCrop(224))),
    (released.big_vision_bit((1,)), '', (ResizeSmall(256), CentralCrop(224))),
    # Without a convention for them: not square, and of two towers.
    (released.big_vision(), '', (Resize((12, 6)),)),
    (released.big_vision(patch=(8, 8)), 'params/img/', (Resize(24),)),
    # Of the paper's code.
    (released.vit(patch=(8, 8)), '', (Resize(24),)),
    (released.bit((1,)), '', (Resize(224),)),
    (released.mixer(tokens=9), '', (Resize((12, 6)),)),
  ],
)
def test_images_are_evaluated_as_the_code_of_the_weights_does(
  shapes, prefix, transforms
):
  file = {f'{prefix}{k}': v for k, v in hollow(shapes).items()}
  assert npz.read(file).transforms == transforms


# Both.


def test_files_are_recognised():
  for shapes in (*KINDS.values(), *BIG_VISION.values()):
    for prefix in ('', 'opt/target/', 'params/', 'params/img/'):
      assert family.recognise(npz.FAMILIES, {prefix + name for name in shapes})
  ours = {'embedding/kernel', 'block_0/norm1/scale', 'head/kernel'}
  for names in ({'blocks.0.norm1.weight'}, {'x'}, set(), ours):
    assert not family.recognise(npz.FAMILIES, names)


@pytest.mark.parametrize('kind', ['rep', 'hybrid', 'mixer', 'bit'])
def test_every_array_is_needed(kind):
  file = hollow(KINDS[kind])
  for name in file:
    with pytest.raises(ValueError):
      npz.read({k: v for k, v in file.items() if k != name})


@pytest.mark.parametrize('name', released.TIMM)
def test_logits_are_those_of_timm(name):
  """golden/record_timm_npz.py recorded them, with timm's reader of .npz."""
  expected = golden('timm_npz')[name]
  shapes, size, grid = released.TIMM[name]
  images = released.images(size)
  weights = npz.read(released.fill_moderately(shapes), grid=grid)
  if name != 'bit':
    assert weights.image_shape == images.shape[1:]
  error = np.abs(logits(weights, images) - expected).max() / np.ptp(expected)
  assert error < 5e-6  # of the logits' spread; measured: at most 7e-7
