"""Formats behind `read`, `describe` and `write`; models of your own."""

import contextlib
import dataclasses
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from small import equal, logits, random_weights, tiny
from tiny import save_run

from vit_jax import pretrained, tree
from vit_jax.data.rasters import Raster
from vit_jax.data.transforms import CentralCrop, Resize
from vit_jax.models import pooling, posemb
from vit_jax.models.dense import BlockOptions, Gelu, Normalize, Standardize
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import Head
from vit_jax.models.resnet import Hybrid, ResNet
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.tools import predict as predict_tool
from vit_jax.types import UserError
from vit_jax.weights import architecture, bundle, export, formats, surgery
from vit_jax.zoo import names

EXACT = {'block.mlp': Gelu('exact')}


def make(size=(12, 12), **fields):
  """Weights of a small ViT, all of its parameters random."""
  fields = {'depth': 2, 'embedding.patch_size': 4} | fields
  model = bundle.replace(tiny().model, **fields)
  return random_weights(
    model,
    (*size, 3),
    class_names=list('abcde'),
    activation='sigmoid',
    preprocess=Normalize((123.0, 116.0, 103.0), 58.0),
    transforms=(
      Resize(tuple(2 * n for n in size), 'bicubic', antialias=True),
      CentralCrop(size),
    ),
  )


@pytest.mark.parametrize('format', formats.FORMATS)
@pytest.mark.parametrize(
  ('size', 'fields'),
  [
    ((12, 12), {}),
    ((8, 12), {'embedding.patch_size': (4, 2), **EXACT}),
    ((12, 12), {'scan': True, 'dtype': 'bfloat16'}),
  ],
)
def test_out_and_in_again_is_equal_to_the_bit(tmp_path, format, size, fields):
  weights = make(size, **fields)  # files hold layers one by one in any case
  is_npz = format in formats.NPZ_FORMATS
  path = tmp_path / ('x.npz' if is_npz else 'x')
  written = formats.write(weights, path, format)
  assert all(file.exists() for file in written)
  back = formats.read(path)
  assert equal(back.params, weights.params)
  assert back.image_shape == (*size, 3)
  assert back.class_names == weights.class_names
  assert back.activation == 'sigmoid' or format == 'hf'
  if is_npz:
    assert back.transforms == weights.transforms
    assert back.preprocess == weights.preprocess
  model = bundle.replace(weights.model, scan=False)
  if not is_npz:  # these files do not say how a model is run
    model = model.clone(dtype='float32', posemb=back.model.posemb)
    assert not bundle.differences(back.model, weights.model)
  assert back.model == model
  described = formats.read(path, values=False)
  assert described.model == model and not described.params
  assert described.transforms == back.transforms
  assert described.is_described == is_npz


def test_a_published_npz_has_no_json(tmp_path):
  weights = make((8, 12), **{'embedding.patch_size': (4, 2)}, **EXACT)
  formats.write(weights, tmp_path / 'x.npz', 'npz')
  (tmp_path / 'x.json').unlink()
  with pytest.raises(ValueError, match=r'12 patches.*grid=\(rows, columns\)'):
    formats.read(tmp_path / 'x.npz')
  back = formats.read(tmp_path / 'x.npz', grid=(2, 6), dtype='bfloat16')
  assert equal(back.params, weights.params)
  assert (back.model.block.mlp.form, back.model.dtype) == ('tanh', 'bfloat16')
  assert back.transforms == (Resize((8, 12)),)
  options = {'grid': (2, 6), 'block': BlockOptions(mlp=Gelu('exact'))}
  for model in (
    formats.read(tmp_path / 'x.npz', **options).model,
    formats.read(tmp_path / 'x.npz', values=False, **options).model,
  ):
    assert model == weights.model


@pytest.mark.parametrize(
  'rows, sizes, grid',  # with one of the class token; of the file, of its use
  [
    (169, [None, (12, 14)], (12, 14)),
    (169, [None, (24, 24)], None),
    (16, [None, None], None),  # 4x4, or 3x5 and a row of the class token
    (145, [None, None], (12, 12)),
    (145, [None, (9, 16)], (9, 16)),
    (145, [(14, 14), (9, 16)], (9, 16)),
    (145, [(14, 14), None], None),
    (197, [(14, 14), (7, 28)], None),
  ],
)
def test_a_grid_that_is_ambiguous_is_not_guessed(rows, sizes, grid):
  with (
    contextlib.nullcontext() if grid else pytest.raises(UserError, match='gr')
  ):
    assert architecture.grid_of([rows - 1, rows], None, sizes) == grid


@pytest.mark.parametrize('format', ['npz', 'timm', 'hf'])
def test_the_size_of_use_decides_between_grids(format, tmp_path):
  weights = make((16, 64), depth=1, **EXACT)
  path = tmp_path / ('x.npz' if format == 'npz' else 'x')
  for file in formats.write(weights, path, format)[1:]:
    file.unlink()
  how = {'num_heads': 4, 'report': None}
  _, params = pretrained.load(path, image_size=(16, 64), **how)
  assert equal(jax.device_get(tree.flatten(params)), weights.params)


@pytest.mark.parametrize('format', formats.FORMATS)
def test_rasters_are_never_read_as_levels(format, tmp_path):
  decode, moments = Raster(13), tuple((1000.0 + i, 20.0) for i in range(13))
  weights = dataclasses.replace(
    random_weights(tiny(**EXACT).model, (12, 12, 13)),
    preprocess=Standardize(moments),
    decode=decode,
  )
  path = tmp_path / ('x.npz' if format in formats.NPZ_FORMATS else 'x')
  formats.write(weights, path, format)
  back = formats.read(path)
  assert (back.preprocess, back.decode) == (weights.preprocess, decode)
  if format == 'hf':
    about = json.loads((path / 'preprocessor_config.json').read_text())
    assert not about['do_rescale']
    (path / 'preprocessor_config.json').unlink()
    assert formats.read(path).preprocess == Standardize(((0.0, 1.0),) * 13)
  weights.decode = Raster(13, missing=-1.0)
  formats.write(weights, path, format)
  is_lost = format not in formats.NPZ_FORMATS
  assert is_lost == ('missing=-1.0' in ' '.join(weights.notes))
  three = random_weights(tiny(**EXACT).model, (12, 12, 3))
  three.preprocess, three.decode = Standardize(moments[:3]), Raster(3)
  if is_lost:
    with pytest.raises(UserError, match='would take for levels 0 to 255'):
      formats.write(three, path, format)
  else:
    formats.write(three, path, format)
    assert formats.read(path).decode == Raster(3)


def test_a_workdir_is_read(tmp_path):
  weights = make(**EXACT, scan=True)
  params = tree.stack_blocks(weights.params)
  ema = tree.unflatten({k: jnp.asarray(x + 1) for k, x in params.items()})
  weights.params = params
  save_run(tmp_path, weights, ema=ema, step=7)
  raw = formats.read(tmp_path, ema=False)
  flat = tree.unstack_blocks(params)
  assert equal({k: np.asarray(x) for k, x in raw.params.items()}, flat)
  assert raw.step == 7
  assert raw.model == weights.model.clone(scan=False)
  averaged = formats.read(tmp_path / 'checkpoints' / '7', scan=True)
  np.testing.assert_array_equal(averaged.params['cls'], flat['cls'] + 1)
  assert averaged.model.scan
  described = formats.read(tmp_path, values=False)
  assert described.is_described and not described.params
  assert described.transforms == weights.transforms
  for options, match in (({'grid': (3, 3)}, 'grid'), ({'step': 8}, '8')):
    with pytest.raises(ValueError, match=match):
      formats.read(tmp_path, **options)
  (tmp_path / 'checkpoints' / '9').mkdir()
  with pytest.raises(UserError, match=r'9 is not whole.* --step=N, .*\[7\]'):
    formats.read(tmp_path)


SMALL = {'width': 24, 'num_heads': 2, 'depth': 1, 'mlp_dim': 8}
MODELS = {
  'B/16': names.create('B/16', **SMALL),
  'hybrid': bundle.from_fields(
    VisionTransformer, embedding=Hybrid(1, stages=(1, 1)), **SMALL
  ),
  'resnet': ResNet((1, 1)),
  'mixer': MlpMixer(24, 1, 6, 8, PatchEmbedding(16)),
  'axial': names.create('Axial-B/16', **SMALL),
  'axial resnet': names.create('Axial-R50x1', stages=(1, 1)),
}


@pytest.mark.parametrize(
  'name, fields, refused',
  [
    ('B/16', {'posemb': posemb.SinCos2d()}, ''),
    ('B/16', {'posemb': None, 'block.layerscale_init': 0.1}, 'npz hf'),
    ('B/16', {'posemb': posemb.Relative()}, 'npz timm hf'),
    ('B/16', {'posemb.at': 'layers'}, 'npz timm hf'),
    ('B/16', {'posemb.at': 'layers_shared'}, 'npz timm hf'),
    ('B/16', {'posemb': posemb.Learned2d()}, 'npz timm hf'),
    ('B/16', {'embedding.mask_token': True}, 'npz timm hf'),
    ('axial', {}, 'npz timm hf'),
    ('axial resnet', {}, 'npz timm hf'),
    ('resnet', {'pool_padding': 'lowest'}, 'npz timm hf'),
    ('resnet', {'form': 'postact'}, 'timm hf'),
    ('resnet', {}, 'timm hf'),
    ('hybrid', {}, 'timm hf'),
    ('mixer', {'mlp': Gelu('exact')}, 'timm hf'),
    ('B/16', EXACT, ''),
    ('B/16', {'pooling.num_registers': 2}, 'npz hf'),
    ('B/16', {'block.qk_norm': True}, 'npz hf'),
    ('B/16', {'block.gate': True}, 'npz timm hf'),
    ('B/16', EXACT | {'block.post_norm': True}, 'npz hf'),
    (
      'B/16',
      EXACT | {'block.post_norm': True, 'block.layerscale_init': 0.1},
      'npz timm hf',
    ),
    ('B/16', {'pooling': pooling.Mean(norm='after')}, 'npz hf'),
    ('B/16', {'pooling': pooling.Mean()}, ''),
    ('B/16', {'pooling': pooling.Mean(class_token=True)}, 'npz hf'),
    ('B/16', {'pooling': pooling.Map()}, 'npz'),
    ('B/16', {'pooling': pooling.NoPooling()}, 'npz timm hf'),
    ('B/16', {'pooling': pooling.DistillationToken()}, 'npz hf'),
    ('hybrid', {'pooling': pooling.DistillationToken()}, 'npz timm hf'),
    ('B/16', {'block.norm_eps': 1e-12}, 'npz timm'),
    ('B/16', {'head': Head(8)}, 'timm'),
    ('B/16', {'head': Head(8), 'num_classes': 5}, 'timm hf'),
  ],
)
def test_a_model_is_written_if_others_agree(name, fields, refused, tmp_path):
  model = bundle.replace(MODELS[name], **fields)
  weights = random_weights(model, (32, 32, 3))
  for format in set(formats.FORMATS) - {'vit_jax'}:
    path = tmp_path / ('x.npz' if format == 'npz' else 'x')
    if format in refused.split():
      with pytest.raises(ValueError, match='--format=vit_jax') as e:
        formats.write(weights, path, format)
      assert str(e.value).startswith(f'{format} cannot hold')
      assert not path.exists()
      continue
    formats.write(weights, path, format)
    again = formats.read(path)
    np.testing.assert_allclose(logits(again), logits(weights), 1e-5, 1e-5)
    shutil.rmtree(path, ignore_errors=True)


def test_our_format_holds_every_model(tmp_path):
  small = {'width': 16, 'num_heads': 2, 'depth': 2, 'mlp_dim': 16}
  axial = names.create('Axial-B/16', num_classes=3, **small)
  path = tmp_path / 'x.npz'
  for made in (
    tiny(
      posemb=posemb.Relative(),
      block=BlockOptions(qk_norm=True),
      pooling=pooling.ClassToken(num_registers=2),
      depth=2,
    ),
    random_weights(axial, (32, 32, 3)),
    random_weights(ResNet((1,), num_classes=5), (32, 32, 3)),
  ):
    formats.write(made, path, 'vit_jax')
    back = formats.read(path)
    assert back.model == made.model and equal(back.params, made.params)
  about = json.loads((tmp_path / 'x.json').read_text())
  model, other = about['model'], {'target': 'os.system', 'command': 'true'}
  for change, match in (
    ({'model': model | {'stages': [2]}}, r'\+ resnet/stage1/unit2'),
    ({'model': model | {'target': 'os.system'}}, 'os.system.* not in the list'),
    ({'model': model | {'widht': 3}}, 'widht'),
    ({'preprocess': {'target': 'builtins.print'}}, 'not in the list'),
    ({'transforms': [other]}, 'os.system.* not in the list'),
    ({'model': model | {'width_factor': None}}, 'width_factor=None'),
    ({'class_names': ['a', 'b']}, 'num_classes=5, and there are 2 class names'),
  ):
    (tmp_path / 'x.json').write_text(json.dumps(about | change))
    with pytest.raises(ValueError, match=match) as e:
      formats.read(path)
    assert str(path) in str(e.value)
  for change in (
    *({'model': None}, {'model': {}}, {'image_shape': None}),
    *({'image_shape': [8, 8]}, {'activation': 'os.system'}, {'class_names': 5}),
    *({'preprocess': 5}, {'transforms': 'x'}),
  ):
    (tmp_path / 'x.json').write_text(json.dumps(about | change))
    with pytest.raises(UserError, match=f'{next(iter(change))}=.* is damaged'):
      formats.read(path)


def test_fields_of_parts_have_paths():
  model = names.create('B/16', num_classes=5)
  changed = bundle.replace(model, **EXACT, posemb=None, dtype='bfloat16')
  assert (changed.block.mlp.form, changed.posemb) == ('exact', None)
  back = {'block.mlp.form': 'tanh', 'posemb': posemb.Learned()}
  assert model == bundle.replace(changed, **back, dtype='float32')
  nested = bundle.replace(model, block={'mlp': {'form': 'exact'}})
  assert nested.block == changed.block
  for same in ({'pooling.class_token': True}, {'block.mpl': None}):
    assert bundle.replace(model, **same) == model
  for field, message in (
    ({'blok.mlp': None}, r"no field 'blok.mlp'.*'block.mlp'"),
    ({'block.mpl': 1}, r"block.mpl=1: BlockOptions.*no field 'mpl'.*'mlp'"),
    ({'pooling.class_token': 2}, 'pooling.class_token=2: ClassToken'),
    ({'posemb.at': 'x', 'posemb': None}, "posemb.at='x': None has no field"),
  ):
    with pytest.raises(ValueError, match=message):
      bundle.replace(model, **field)


@pytest.mark.parametrize(
  'path, names, found',
  [
    ('https://host/x', (), 'https://host/x'),
    ('gs://bucket/x.npz', (), 'gs://bucket/x.npz'),
    ('a', ('model.safetensors', 'other.npz'), 'a/model.safetensors'),
    (
      'a',
      ('model.safetensors.index.json', 'm-1.safetensors', 'm-2.safetensors'),
      'a/model.safetensors.index.json',
    ),
    ('a', ('only.npz', 'only.json'), 'a/only.npz'),
    ('a/x', ('x',), 'a/x'),
  ],
)
def test_the_file_in_a_path(path, names, found, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'a').mkdir()
  for name in names:
    (tmp_path / 'a' / name).touch()
  assert formats._locate(path, None) == (None, found)


def test_what_is_no_weights_is_said(tmp_path):
  (tmp_path / 'pytorch_model.bin').write_bytes(b'\x80\x02')
  with pytest.raises(UserError, match=r'model\.bin cannot.*: It is a pickle'):
    formats.read(tmp_path)
  np.savez(tmp_path / 'other.npz', x=np.zeros(3))
  for path, match in (
    (tmp_path / 'nothing', 'does not exist'),
    (tmp_path / 'nothing.npz', 'does not exist'),
    (tmp_path / 'pytorch_model.bin', 'pickle'),
    (tmp_path / 'other.npz', 'none of the known formats'),
    (tmp_path / 'file.xyz', 'xyz'),
  ):
    with pytest.raises(ValueError, match=match):
      formats.read(path)
    if 'known' not in match and 'pickle' not in match:
      with pytest.raises(ValueError, match=match):
        formats.find(path)
  with pytest.raises(ValueError, match='step=3'):
    formats.read(tmp_path / 'other.npz', step=3)
  np.savez(tmp_path / 'more.npz')
  with pytest.raises(UserError, match=r'more\.npz, other\.npz\. Name one'):
    formats.read(tmp_path)


# Models and transforms of a user's own package.


@pytest.fixture(scope='module')
def own(tmp_path_factory):
  """(workdir, its Weights)."""
  import own_models

  weights = random_weights(
    own_models.Pixels(width=4, num_classes=3),
    (8, 8, 3),
    preprocess=own_models.Halve(by=4.0),
    transforms=(Resize(8), own_models.Invert()),
    class_names=['a', 'b', 'c'],
  )
  workdir = tmp_path_factory.mktemp('own')
  save_run(workdir, weights)
  return workdir, weights


def test_nothing_is_imported_from_a_package_that_is_not_trusted(own, tmp_path):
  workdir, weights = own
  file = tmp_path / 'x.npz'
  formats.write(weights, file, 'vit_jax')
  module = sys.modules.pop('own_models')
  try:
    match = r"'own_models\.Pixels'.*trust=\('own_models',\).*--trust=own_models"
    for path, trust in ((workdir, ()), (workdir, ('own',)), (file, ())):
      with pytest.raises(ValueError, match=match):
        formats.read(path, trust=trust)
    assert 'own_models' not in sys.modules
  finally:
    sys.modules['own_models'] = module


def test_a_model_of_your_own_is_read_everywhere(own, tmp_path):
  workdir, expected = own
  options = {'trust': ('own_models',)}
  weights = surgery.read(surgery.InitFrom(path=str(workdir), **options))
  assert weights.model == expected.model
  assert weights.preprocess == expected.preprocess
  assert weights.transforms == expected.transforms
  found = logits(expected)
  np.testing.assert_allclose(logits(weights), found, atol=1e-6)
  with pytest.raises(ValueError, match='Pixels'):
    formats.write(weights, tmp_path / 'x.npz', 'npz')
  formats.write(weights, tmp_path / 'x.npz', 'vit_jax')
  back = formats.read(tmp_path / 'x.npz', **options)
  np.testing.assert_allclose(logits(back), found, atol=1e-6)
  pixels = np.full((8, 8, 3), 51, np.uint8)
  Image.fromarray(pixels).save(tmp_path / 'x.png')
  images = expected.preprocess(255 - pixels[None])
  (result,) = predict_tool.predict(weights, [str(tmp_path / 'x.png')])
  np.testing.assert_allclose(
    result['probabilities'],
    jax.nn.softmax(logits(expected, np.asarray(images))[0]),
    atol=1e-6,
  )


def test_a_model_of_your_own_is_exported(own):
  pytest.importorskip('flatbuffers')
  content, about = export.stablehlo(own[1], platforms=('cpu',))
  assert about['platforms'] == ['cpu']
  run = jax.export.deserialize(content).call
  pixels = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3)
  images = np.asarray(own[1].preprocess(pixels))
  np.testing.assert_allclose(run(pixels), logits(own[1], images), atol=1e-6)
  assert about['input'] == {'shape': ['batch', 8, 8, 3], 'dtype': 'uint8'}
  assert about['output']['is'] == 'logits'
  assert about['model'] == {
    'target': 'own_models.Pixels',
    **{'width': 4, 'num_classes': 3},
  }
  _, about = export.stablehlo(own[1], platforms=('cpu',), batch_size=2)
  assert about['input'] == {'shape': [2, 8, 8, 3], 'dtype': 'uint8'}
