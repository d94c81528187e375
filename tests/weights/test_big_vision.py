"""big_vision's .npz files: positions, class token, MAP head, stacked layers."""

import ml_dtypes
import numpy as np
import pytest
import released
from released import equal, fill
from small import logits, tiny

from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall
from vit_jax.models.pooling import Map
from vit_jax.models.posemb import SinCos2d
from vit_jax.weights import files, formats, npz

KINDS = {
  'cls': released.big_vision(),
  'gap': released.big_vision(cls=False),
  'map': released.big_vision(map_head=True),
  'sincos2d': released.big_vision(cls=False, table=False),
  'rep': released.big_vision(rep=12),
}


def stack(file, depth=2):
  """The layers of a file under one name each, the first axis counting them."""
  one = 'Transformer/encoderblock_0/'
  out = {k: v for k, v in file.items() if 'encoderblock_' not in k}
  for name in [k for k in file if k.startswith(one)]:
    layers = [file[name.replace('_0/', f'_{i}/', 1)] for i in range(depth)]
    out[name.replace('_0/', '/', 1)] = np.stack(layers)
  return out


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('scan', [False, True])
def test_writing_gives_the_file_back(kind, scan):
  file = fill(KINDS[kind])
  if scan:
    file = stack(file)
  weights = npz.read(file)
  written, others = npz.write_big_vision(weights, scan=scan)
  assert equal(written, file)
  assert not others and not weights.notes


@pytest.mark.parametrize('kind', KINDS)
def test_stacked_layers_are_those_apart(kind):
  file = fill(KINDS[kind])
  weights = npz.read(stack(file))
  assert equal(weights.params, npz.read(file).params)
  assert weights.model.depth == 2


def test_positions_have_no_row_for_the_class_token():
  file = fill(KINDS['cls'])
  params = npz.read(file).params
  np.testing.assert_array_equal(params['cls'], file['cls'])
  assert not params['cls_pos_embedding'].any()
  np.testing.assert_array_equal(
    params['pos_embedding'], file['pos_embedding'].reshape(1, 3, 3, 16)
  )


def test_early_files_have_one():
  file = fill(released.big_vision(rows=10))
  params = npz.read(file).params
  table = file['pos_embedding']
  np.testing.assert_array_equal(params['cls_pos_embedding'], table[:, :1])
  np.testing.assert_array_equal(
    params['pos_embedding'], table[:, 1:].reshape(1, 3, 3, 16)
  )
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
  weights = npz.read(file, grid=(3, 5))
  np.testing.assert_array_equal(
    weights.params['pos_embedding'], table.reshape(1, 3, 5, 16)
  )
  assert weights.image_shape == (12, 10, 3)
  if len(shape) > 2:
    assert equal(npz.read(file).params, weights.params)


def test_a_map_head_lands():
  file = fill(KINDS['map'])
  weights = npz.read(file)
  assert weights.model.pooling == Map()
  head = 'MAPHead_0/MultiHeadDotProductAttention_0'
  for theirs, ours in {
    'MAPHead_0/probe': 'probe',
    f'{head}/key/bias': 'attn/key/bias',
    f'{head}/out/kernel': 'attn/out/kernel',
    'MAPHead_0/LayerNorm_0/scale': 'norm/scale',
    'MAPHead_0/MlpBlock_0/Dense_1/kernel': 'mlp/fc2/kernel',
  }.items():
    np.testing.assert_array_equal(
      weights.params[f'map_head/{ours}'], file[theirs]
    )
  # Early files have its parts at the top.
  early = {name.removeprefix('MAPHead_0/'): x for name, x in file.items()}
  assert equal(npz.read(early).params, weights.params)


def test_one_tower_of_two_is_read():
  file = fill(KINDS['map'])
  both = {f'params/img/{name}': array for name, array in file.items()}
  both |= fill({'params/t': (1,), 'params/b': (1,)})
  both |= fill({'params/txt/Encoder_0/encoder_norm/scale': (4,)})
  both |= fill({'opt/0/mu/img/embedding/kernel': (2,)})
  weights = npz.read(both)
  assert equal(weights.params, npz.read(file).params)
  counts = sorted(note.split()[0] for note in weights.notes)
  assert counts == ['1', '3']  # of the optimizer, and of the text tower


def test_bfloat16_comes_as_float32(tmp_path):
  file = {
    name: array.astype(ml_dtypes.bfloat16)
    for name, array in fill(KINDS['cls'], 'params/').items()
  }
  np.savez(tmp_path / 'x.npz', **{k: v.view('V2') for k, v in file.items()})
  weights = npz.read(files.read_npz(tmp_path / 'x.npz'))
  stored = file['params/head/kernel'].astype(np.float32)
  assert weights.params['head/kernel'].dtype == np.float32
  np.testing.assert_array_equal(weights.params['head/kernel'], stored)


def test_positions_without_a_table_are_sincos2d_unless_said():
  file = fill(KINDS['sincos2d'])
  weights = npz.read(file, image_size=(12, 6))
  assert weights.model.posemb == SinCos2d()
  assert weights.image_shape == (12, 6, 3)
  assert npz.read(file, posemb='none').model.posemb is None


@pytest.mark.parametrize('kind', ['cls', 'gap', 'rep'])
def test_both_formats_make_one_model(kind):
  """From big_vision's to ours to the original's and back: nothing changes."""
  weights = npz.read(fill(KINDS[kind]))
  again = npz.read(npz.write(weights)[0])
  assert equal(again.params, weights.params)
  assert again.model == weights.model


@pytest.mark.parametrize(
  'fields',
  [
    {},  # the class token's position is added to it
    {'posemb': 'none', 'pooling': 'gap'},
    {'posemb': 'sincos2d'},
    {'layerscale_init': 0.1, 'pooling': 'map'},
  ],
)
def test_what_the_format_lacks_is_written_so_that_nothing_changes(fields):
  weights = tiny(**fields)
  file, _ = npz.write_big_vision(weights)
  assert ('pos_embedding' in file) == (fields.get('posemb') != 'sincos2d')
  again = npz.read(file, image_size=(12, 6))
  np.testing.assert_allclose(
    logits(again), logits(weights), rtol=1e-5, atol=1e-5
  )


def test_what_cannot_be_written_is_named():
  with pytest.raises(ValueError, match=r'registers.*timm'):
    npz.write_big_vision(tiny(num_registers=1))
  hybrid = npz.read(released.hollow(released.hybrid((1,))))
  with pytest.raises(ValueError, match=r'hybrid.*npz'):
    npz.write_big_vision(hybrid)


def test_other_families_are_written_as_they_were():
  for shapes in (
    released.mixer(),
    released.resnet((1,)),
    released.big_vision_bit((1, 2)),
  ):
    file = fill(shapes)
    assert equal(npz.write_big_vision(npz.read(file))[0], file)
  file = released.hollow(released.big_vision_bit((11,)))
  names = npz.write_big_vision(npz.read(file))[0].keys()
  assert names == file.keys()  # unit10 comes after unit09


@pytest.mark.parametrize('prefix', ['', 'params/', 'opt/target/'])
def test_resnets_of_the_paper(prefix):
  """Both layouts of the BiT paper's model are read as one model."""
  theirs = fill(released.bit((1, 2)))
  conv, norm = 'standardized_conv2d/kernel', {'gamma': 'scale', 'beta': 'bias'}
  file = {
    'root_block/conv_root/kernel': theirs[f'resnet/root_block/{conv}'],
    'head/kernel': theirs['resnet/head/conv2d/kernel'][0, 0],
    'head/bias': theirs['resnet/head/conv2d/bias'],
  }
  for old, new in norm.items():
    array = theirs[f'resnet/group_norm/{old}']
    file[f'norm-pre-head/{new}'] = array.reshape(1, 1, 1, -1)
  for unit in ('block1/unit01', 'block2/unit01', 'block2/unit02'):
    for i, letter in enumerate('abc', 1):
      part = f'resnet/{unit}/{letter}'
      file[f'{unit}/conv{i}/kernel'] = theirs[f'{part}/{conv}']
      for old, new in norm.items():
        array = theirs[f'{part}/group_norm/{old}']
        file[f'{unit}/gn{i}/{new}'] = array.reshape(1, 1, 1, -1)
    if unit.endswith('1'):
      file[f'{unit}/conv_proj/kernel'] = theirs[f'resnet/{unit}/a/proj/{conv}']
  assert file.keys() == released.big_vision_bit((1, 2)).keys()
  expected = npz.read(theirs)
  stored = {f'{prefix}{name}': array for name, array in file.items()}
  assert npz.recognise(stored)
  weights = npz.read(stored)
  assert weights.model == expected.model.clone(pool_padding='lowest')
  assert weights.model.form == 'preact'
  assert equal(weights.params, expected.params) and not weights.notes
  assert equal(npz.write_big_vision(expected)[0], file)


def test_the_form_of_a_resnet_is_that_of_its_names():
  post = npz.read(fill(released.resnet((1,))))
  assert post.model.form == 'postact' and 'big_vision' in post.origin
  file = released.hollow(released.big_vision_bit((3, 4, 6, 3), 3, 21_843))
  weights = npz.read(file)
  model = weights.model
  assert (model.form, model.width_factor) == ('preact', 3)
  assert model.stages == (3, 4, 6, 3)
  for name in file:  # each is needed, in its shape
    rest = {k: v for k, v in file.items() if k != name}
    wrong = rest | {name: np.broadcast_to(np.float32(0), (3, 2))}
    for changed in (rest, wrong) if 'block' not in name else ():
      with pytest.raises(ValueError):
        npz.read(changed)
  broken = {k: v for k, v in file.items() if 'block3/unit02/gn2' not in k}
  with pytest.raises(ValueError, match=r'\+ block3/unit2/gn2/bias'):
    npz.read(broken)


@pytest.mark.parametrize(
  ('shapes', 'prefix', 'transforms'),
  [
    (released.big_vision(patch=(8, 8)), '', (ResizeSmall(27), CentralCrop(24))),
    (
      released.big_vision(patch=(16, 16), rows=196, cls=False),
      'params/',
      (ResizeSmall(256), CentralCrop(224)),
    ),
    (
      released.big_vision(patch=(16, 16), rows=576, cls=False),
      'opt/target/',
      (ResizeSmall(448), CentralCrop(384)),
    ),
    (released.resnet((1,)), '', (ResizeSmall(256), CentralCrop(224))),
    (released.big_vision_bit((1,)), '', (ResizeSmall(256), CentralCrop(224))),
    # Without a convention for them: not square, and of two towers.
    (released.big_vision(), '', (Resize((12, 6)),)),
    (released.big_vision(patch=(8, 8)), 'params/img/', (Resize(24),)),
    # Of the paper's code.
    (released.vit(patch=(8, 8)), '', (Resize(24),)),
    (released.bit((1,)), '', (Resize(224),)),
  ],
)
def test_images_are_evaluated_as_the_code_of_the_weights_does(
  shapes, prefix, transforms
):
  file = {f'{prefix}{k}': v for k, v in released.hollow(shapes).items()}
  assert npz.read(file).transforms == transforms


def test_transforms_in_the_json_come_first(tmp_path):
  weights = npz.read(fill(released.big_vision(patch=(8, 8))))
  weights.transforms = (Resize(24),)
  formats.write(weights, tmp_path / 'x.npz', 'big_vision')
  assert formats.read(tmp_path / 'x.npz').transforms == (Resize(24),)
  (tmp_path / 'x.json').unlink()
  found = formats.read(tmp_path / 'x.npz').transforms
  assert found == (ResizeSmall(27), CentralCrop(24))


def test_a_missing_layer_is_named():
  file = {k: v for k, v in fill(KINDS['cls']).items() if '_0/LayerNorm_1' in k}
  file = {k: v for k, v in fill(KINDS['cls']).items() if k not in file}
  with pytest.raises(ValueError) as e:
    npz.read(file)
  for part in ('scale', 'bias'):
    name = f'+ Transformer/encoderblock_0/LayerNorm_1/{part} (16,)'
    assert name in str(e.value)
  file = stack(fill(KINDS['cls']))
  name = 'Transformer/encoderblock/LayerNorm_1/scale'
  file[name] = file[name][:1]
  with pytest.raises(ValueError, match=r'\+ .*block_1/LayerNorm_1/scale'):
    npz.read(file)
