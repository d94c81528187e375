"""The released .npz files: each array lands where it should, and comes back."""

import pathlib
import re

import numpy as np
import pytest
import released
from released import equal, fill, hollow
from small import logits, tiny

from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import ClassToken, Mean
from vit_jax.models.resnet import ResNet
from vit_jax.weights import npz

TABLE = 'Transformer/posembed_input/pos_embedding'
KINDS = {
  'vit': released.vit(),
  'linen': released.vit(names=released.LINEN),
  'rep': released.vit(rep=12),
  'gap': released.vit(cls=False, rows=9),
  'hybrid': released.hybrid((1, 2)),
  'root': released.hybrid((), patch=(8, 8)),
  'mixer': released.mixer(),
  'resnet': released.resnet((1, 2)),
  'bit': released.bit((1, 2)),
}


def layer_of(file, names, i):
  """Block i of ours from a file's layer, written out."""
  mha, norm2, mlp = (f'Transformer/encoderblock_{i}/{n}' for n in names)
  norm1 = f'Transformer/encoderblock_{i}/LayerNorm_0'
  out = {
    f'block_{i}/norm1/scale': file[f'{norm1}/scale'],
    f'block_{i}/norm1/bias': file[f'{norm1}/bias'],
    f'block_{i}/norm2/scale': file[f'{norm2}/scale'],
    f'block_{i}/norm2/bias': file[f'{norm2}/bias'],
    f'block_{i}/mlp/fc1/kernel': file[f'{mlp}/Dense_0/kernel'],
    f'block_{i}/mlp/fc1/bias': file[f'{mlp}/Dense_0/bias'],
    f'block_{i}/mlp/fc2/kernel': file[f'{mlp}/Dense_1/kernel'],
    f'block_{i}/mlp/fc2/bias': file[f'{mlp}/Dense_1/bias'],
  }
  for name in ('query', 'key', 'value', 'out'):
    for part in ('kernel', 'bias'):
      out[f'block_{i}/attn/{name}/{part}'] = file[f'{mha}/{name}/{part}']
  return out


def vit_of(file, names, *, cls=True):
  """All parameters of ours from a file of two layers and 3x3 patches."""
  table = file[TABLE]
  out = {
    'embedding/kernel': file['embedding/kernel'],
    'embedding/bias': file['embedding/bias'],
    'pos_embedding': table[:, int(cls) :].reshape(1, 3, 3, -1),
    'norm/scale': file['Transformer/encoder_norm/scale'],
    'norm/bias': file['Transformer/encoder_norm/bias'],
    'head/kernel': file['head/kernel'],
    'head/bias': file['head/bias'],
  }
  if cls:
    out |= {'cls': file['cls'], 'cls_pos_embedding': table[:, :1]}
  return out | layer_of(file, names, 0) | layer_of(file, names, 1)


@pytest.mark.parametrize('prefix', ['', 'opt/target/', 'params/', 'target/'])
@pytest.mark.parametrize('names', [released.LINEN, released.PRE_LINEN])
def test_every_array_of_a_vit_lands(names, prefix):
  file = fill(released.vit(names=names))
  stored = {prefix + name: array for name, array in file.items()}
  weights = npz.read(stored)
  assert equal(weights.params, vit_of(file, names))
  model = weights.model
  assert model.pooling == ClassToken() and model.num_heads == 4
  assert model.embedding.patch_size == (4, 2)
  assert model.head.representation_size is None
  assert weights.image_shape == (12, 6, 3)
  assert not weights.notes


def test_gap_has_no_row_for_a_class_token():
  file = fill(released.vit(cls=False, rows=9))
  weights = npz.read(file)
  assert equal(weights.params, vit_of(file, released.PRE_LINEN, cls=False))
  assert weights.model.pooling == Mean()


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


def test_pre_logits_are_there_empty_or_absent():
  weights = npz.read(fill(KINDS['rep']))
  assert weights.model.head.representation_size == 12
  assert weights.params['pre_logits/kernel'].shape == (16, 12)
  assert weights.params['head/kernel'].shape == (12, 5)
  file = fill(KINDS['vit'])
  left = npz.read(file | {'pre_logits': np.zeros(0)})
  assert equal(left.params, npz.read(file).params)
  assert len(left.notes) == 1


def test_state_of_the_optimizer_is_left_out():
  file = fill(KINDS['vit'], 'opt/target/')
  more = fill({'opt/state/step': (), 'opt/state/x/embedding/kernel': (2,)})
  weights = npz.read(file | more)
  assert equal(weights.params, npz.read(file).params)
  assert len(weights.notes) == 1 and '2 arrays' in weights.notes[0]


def test_a_head_of_zeros_is_kept():
  file = fill(released.vit(classes=21_843))
  file['head/kernel'][:] = 0
  weights = npz.read(file)
  assert weights.model.num_classes == 21_843
  assert not weights.params['head/kernel'].any()


def test_hybrids_land():
  file = fill(KINDS['hybrid'])
  weights = npz.read(file)
  params = weights.params
  assert weights.model.embedding.stages == (1, 2)
  assert weights.image_shape == (24, 24, 3)
  for theirs, ours in {
    'conv_root/kernel': 'root/conv/kernel',
    'gn_root/scale': 'root/norm/scale',
    'block2/unit1/conv2/kernel': 'stage2/unit1/conv2/kernel',
    'block2/unit1/conv_proj/kernel': 'stage2/unit1/conv_proj/kernel',
    'block2/unit1/gn_proj/bias': 'stage2/unit1/norm_proj/bias',
    'block2/unit2/gn3/scale': 'stage2/unit2/norm3/scale',
    'block1/unit1/gn1/bias': 'stage1/unit1/norm1/bias',
  }.items():
    array = file[theirs].ravel() if 'gn' in theirs else file[theirs]
    np.testing.assert_array_equal(params[f'resnet/{ours}'], array)
  root = npz.read(fill(KINDS['root']))
  assert root.model.embedding.stages == ()
  assert root.model.embedding.patch_size == (8, 8)
  assert root.image_shape == (96, 96, 3)  # 3 patches of 8 cells of 4 pixels


def test_mixers_land():
  file = fill(KINDS['mixer'])
  weights = npz.read(file)
  assert type(weights.model) is MlpMixer
  assert weights.model.tokens_mlp_dim == 6
  assert weights.model.channels_mlp_dim == 24
  assert weights.image_shape == (12, 6, 3)
  pairs = {
    'stem/kernel': 'embedding/kernel',
    'pre_head_layer_norm/bias': 'norm/bias',
    'head/kernel': 'head/kernel',
  }
  for i in range(2):
    pairs |= {
      f'MixerBlock_{i}/{theirs}': f'block_{i}/{ours}'
      for theirs, ours in {
        'LayerNorm_0/scale': 'norm1/scale',
        'LayerNorm_1/bias': 'norm2/bias',
        'token_mixing/Dense_0/kernel': 'token_mixing/fc1/kernel',
        'token_mixing/Dense_1/bias': 'token_mixing/fc2/bias',
        'channel_mixing/Dense_0/bias': 'channel_mixing/fc1/bias',
        'channel_mixing/Dense_1/kernel': 'channel_mixing/fc2/kernel',
      }.items()
    }
  for theirs, ours in pairs.items():
    np.testing.assert_array_equal(weights.params[ours], file[theirs])


def test_resnets_of_both_forms_land():
  file = fill(KINDS['resnet'])
  weights = npz.read(file, image_size=(64, 96))
  assert type(weights.model) is ResNet
  assert weights.model.form == 'postact'
  assert weights.image_shape == (64, 96, 3)
  assert weights.params['resnet/stage2/unit1/norm_proj/scale'].shape == (512,)

  file = fill(KINDS['bit'])
  weights = npz.read(file)
  assert weights.model.form == 'preact'
  assert weights.model.stages == (1, 2)
  assert weights.image_shape == (224, 224, 3)
  conv = 'standardized_conv2d/kernel'
  pairs = {
    f'root_block/{conv}': 'resnet/root/conv/kernel',
    f'block2/unit01/a/proj/{conv}': 'resnet/stage2/unit1/conv_proj/kernel',
    'group_norm/gamma': 'norm/scale',
    'group_norm/beta': 'norm/bias',
    'head/conv2d/bias': 'head/bias',
  }
  for i, letter in enumerate('abc', 1):
    unit, ours = f'block2/unit02/{letter}', 'resnet/stage2/unit2'
    pairs[f'{unit}/{conv}'] = f'{ours}/conv{i}/kernel'
    pairs[f'{unit}/group_norm/gamma'] = f'{ours}/norm{i}/scale'
    pairs[f'{unit}/group_norm/beta'] = f'{ours}/norm{i}/bias'
  for theirs, ours in pairs.items():
    np.testing.assert_array_equal(
      weights.params[ours], file[f'resnet/{theirs}']
    )
  np.testing.assert_array_equal(
    weights.params['head/kernel'], file['resnet/head/conv2d/kernel'][0, 0]
  )


def test_units_of_two_digits():
  """'unit10' comes after 'unit09', and is written like that."""
  file = hollow(released.bit((11,)))
  weights = npz.read(file)
  assert weights.model.stages == (11,)
  assert npz.write(weights)[0].keys() == file.keys()


@pytest.mark.parametrize('kind', KINDS)
def test_writing_gives_the_file_back(kind):
  file = fill(KINDS[kind])
  weights = npz.read(file)
  linen = any('/MlpBlock_0/' in name for name in file)
  generation = 'linen' if linen else 'pre_linen'
  written, others = npz.write(weights, generation=generation)
  squeezed = {
    name: array.reshape(-1) if '/gn' in f'/{name}' else array
    for name, array in file.items()
  }
  assert equal(written, squeezed)
  assert not others and not weights.notes
  again = npz.read(npz.write(weights)[0])
  assert equal(again.params, weights.params)
  assert again.model == weights.model


@pytest.mark.parametrize(
  'file, count',
  [
    (released.vit(768, 12, 3072, 12, (16, 16), rows=197), 86_567_656),
    (released.vit(1280, 32, 5120, 16, (14, 14), rows=257), 632_045_800),
    (
      released.hybrid(
        (), width=192, depth=12, hidden=768, heads=3, patch=(8, 8), rows=50
      ),
      6_337_704,
    ),
    (released.bit(), 25_549_352),
  ],
)
def test_counts_of_the_released_models(file, count):
  """Full size; the tables themselves are checked against published counts."""
  head = next(k for k in ('head/bias', 'resnet/head/conv2d/bias') if k in file)
  kernel = head.replace('bias', 'kernel')
  file |= {head: (1000,), kernel: (*file[kernel][:-1], 1000)}
  weights = npz.read(hollow(file))
  assert sum(x.size for x in weights.params.values()) == count
  if type(weights.model) is not ResNet:
    assert weights.image_shape == (224, 224, 3)


def test_a_missing_layer_is_one_error_with_all_of_it():
  file = fill(KINDS['vit'], 'opt/target/')
  lost = [n for n in file if 'encoderblock_0/MlpBlock_3/Dense_1' in n]
  for name in lost:
    del file[name]
  file['opt/target/extra/kernel'] = np.zeros(3, np.float32)
  name = 'opt/target/Transformer/encoder_norm/scale'
  file[name] = np.zeros(17, np.float32)
  with pytest.raises(ValueError) as e:
    npz.read(file)
  lines = [x for x in str(e.value).splitlines() if x[0] in '+-']
  layer = 'Transformer/encoderblock_0/MlpBlock_3/Dense_1'
  assert sorted(lines) == sorted(
    [
      '- Transformer/encoder_norm/scale (17,)',
      '- extra/kernel (3,)',
      '+ Transformer/encoder_norm/scale (16,)',
      f'+ {layer}/bias (16,)',
      f'+ {layer}/kernel (24, 16)',
    ]
  )


@pytest.mark.parametrize('layer', [0, 1])
@pytest.mark.parametrize('kind', ['vit', 'linen', 'mixer'])
def test_a_whole_layer_that_is_missing(kind, layer):
  file = hollow(KINDS[kind])
  lost = [n for n in file if re.match(rf'.*r(b|B)lock_{layer}/', n)]
  rest = {name: x for name, x in file.items() if name not in lost}
  if layer == 1:  # the last one: the model is a shallower one
    assert npz.read(rest).model.depth == 1
    return
  with pytest.raises(ValueError) as e:
    npz.read(rest)
  for name in lost:
    assert f'+ {name} {file[name].shape}' in str(e.value)


@pytest.mark.parametrize('kind', ['linen', 'rep', 'hybrid', 'mixer', 'bit'])
def test_every_array_is_needed(kind):
  """Without any one of them there is an error, and no other kind of error."""
  file = hollow(KINDS[kind])
  for name in file:
    if kind == 'linen' and name == TABLE:
      continue  # then it is big_vision's, with fixed positions
    rest = {k: v for k, v in file.items() if k != name}
    with pytest.raises(ValueError):
      npz.read(rest)


@pytest.mark.parametrize(
  'name', ['Transformer/encoderblock_99999999/LayerNorm_0/scale', 'block9' * 9]
)
def test_a_high_number_in_a_name_costs_nothing(name):
  file = hollow(KINDS['hybrid'])
  with pytest.raises(ValueError):
    npz.read(file | {name: np.zeros(16, np.float32)})
  for block in (99, 9999, 999999999):
    unit = f'block{block}/unit1/conv1/kernel'
    with pytest.raises(ValueError):
      npz.read(file | {unit: np.zeros(16, np.float32)})


@pytest.mark.parametrize('kind', ['rep', 'mixer', 'bit'])
def test_every_shape_is_checked(kind):
  """No array of another shape gets through, or ends in another error."""
  file = hollow(KINDS[kind])
  for i, (name, array) in enumerate(file.items()):
    shape = array.shape
    others = (), (0,), (*shape, 2), (2, *shape), (*shape[:-1], 7)
    for other in (others[i % 3], others[3 + i % 2]):
      wrong = np.broadcast_to(np.float32(0), other)
      with pytest.raises(ValueError):
        npz.read(file | {name: wrong})
        pytest.fail(f'{name}: {other} in place of {shape}')


def test_the_format_is_recognised():
  for shapes in KINDS.values():
    for prefix in ('', 'opt/target/', 'params/'):
      names = {prefix + name for name in shapes}
      assert npz.recognise(names)
    is_theirs = shapes is KINDS['resnet']
    assert ('big_vision' in npz.read(hollow(shapes)).origin) == is_theirs
  for kwargs in ({}, {'map_head': True}, {'cls': False, 'table': False}):
    shapes = released.big_vision(**kwargs)
    for prefix in ('', 'params/', 'params/img/'):
      assert npz.recognise({prefix + name for name in shapes})
    assert 'big_vision' in npz.read(hollow(shapes)).origin
  for names in ({'blocks.0.norm1.weight'}, {'x'}, set()):
    assert not npz.recognise(names)
  ours = {'embedding/kernel', 'block_0/norm1/scale', 'head/kernel'}
  assert not npz.recognise(ours)


@pytest.mark.parametrize(
  'fields',
  [
    {'posemb': 'sincos2d'},
    {'posemb': 'sincos2d', 'pooling': 'gap'},
    {'posemb': 'none'},
    {'layerscale_init': 0.1},
    {'representation_size': 12},
  ],
)
def test_what_the_format_lacks_is_written_so_that_nothing_changes(fields):
  weights = tiny(**fields)
  file, _ = npz.write(weights)
  if 'representation_size' not in fields:
    assert len(weights.notes) == 1
  again = npz.read(file)
  np.testing.assert_allclose(
    logits(again), logits(weights), rtol=1e-5, atol=1e-5
  )


def test_what_cannot_be_written_is_named_all_at_once():
  fields = {'num_registers': 2, 'qk_norm': True, 'pooling': 'map'}
  weights = tiny(**fields, norm_eps=1e-12)
  with pytest.raises(ValueError) as e:
    npz.write(weights)
  for word in ('registers', 'qk_norm', 'MAP', 'norm_eps 1e-12', 'timm'):
    assert word in str(e.value)
  weights = tiny(pooling='gap', norm_after_pooling=True)
  with pytest.raises(ValueError, match='norm after pooling'):
    npz.write(weights)
  with pytest.raises(ValueError, match='pre_linen'):
    npz.write(tiny(), generation='newest')


def test_what_the_file_says_cannot_be_said_otherwise():
  file = fill(KINDS['vit'])
  assert npz.read(file, num_heads=4, gelu='exact').model.block.gelu
  with pytest.raises(ValueError, match='num_heads'):
    npz.read(file, num_heads=2)


GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'timm_npz.npz'


@pytest.mark.parametrize('name', released.TIMM)
def test_logits_are_those_of_timm(name):
  """golden/record_timm_npz.py recorded them, with timm's reader of .npz."""
  with np.load(GOLDEN) as golden:
    expected = golden[name]
  shapes, size, grid = released.TIMM[name]
  images = released.images(size)
  weights = npz.read(released.fill_moderately(shapes), grid=grid)
  if name != 'bit':
    assert weights.image_shape == images.shape[1:]
  error = np.abs(logits(weights, images) - expected).max() / np.ptp(expected)
  assert error < 5e-6  # of the logits' spread; measured: at most 7e-7
