"""What is written is what was read, and is whole or not there."""

import functools
import json

import in_process
import numpy as np
import pytest
from processes import python
from small import logits

from vit_jax import config, pretrained
from vit_jax.data.targets import Classes, Grades, Numbers
from vit_jax.models.pooling import OrdinalHead, ScaledHead
from vit_jax.tools import convert
from vit_jax.weights import export, formats

call = functools.partial(in_process.call, convert)


@pytest.mark.parametrize(
  'name, flags, files',
  [
    ('x.npz', [], ['x.json', 'x.npz']),
    ('x.npz', ['--format=vit_jax'], ['x.json', 'x.npz']),
    ('x', [], ['config.json', 'model.safetensors']),
    (
      'x',
      ['--format=hf'],
      ['config.json', 'model.safetensors', 'preprocessor_config.json'],
    ),
  ],
)
def test_weights_go_out_and_back(file, weights, tmp_path, name, flags, files):
  target = tmp_path / name
  assert call(file, target, *flags) is None
  folder = tmp_path if name == 'x.npz' else tmp_path / 'x'
  assert sorted(p.name for p in folder.iterdir()) == files
  read = formats.read(target)
  assert read.params.keys() == weights.params.keys()
  for path, value in weights.params.items():
    np.testing.assert_array_equal(read.params[path], value, err_msg=path)
  assert read.class_names == weights.class_names
  assert read.image_shape == weights.image_shape
  assert read.transforms[-1].size == weights.image_shape[:2]
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (2, *weights.image_shape), np.uint8)
  found, expected = (logits(x, x.preprocess(pixels)) for x in (read, weights))
  np.testing.assert_allclose(found, expected, atol=3e-5)


@pytest.fixture(scope='module')
def of_numbers(model, make_weights):
  names = ['age (years)', 'weight']
  head = ScaledHead(moments=((50.0, 20.0), (70.0, 9.0)))
  model = model.clone(num_classes=2, head=head)
  use = {'activation': 'identity', 'targets': Numbers(tuple(names))}
  return make_weights(model, class_names=names, **use)


@pytest.mark.parametrize('format', ['npz', 'vit_jax', 'timm', 'hf'])
def test_numbers_go_out_and_back(of_numbers, model, tmp_path, format):
  weights, is_ours = of_numbers, format in formats.NPZ_FORMATS
  target = tmp_path / ('x.npz' if is_ours else 'x')
  formats.write(weights, target, format)
  read = formats.read(target)
  kind = weights.targets if is_ours else Numbers()
  assert (read.activation, read.targets) == ('identity', kind)
  assert read.class_names == weights.class_names
  x = np.random.default_rng(0).normal(size=(3, model.width))
  found, expected = (
    w.model.head.convert(x @ w.params['head/kernel'] + w.params['head/bias'])
    for w in (read, weights)
  )
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_heads_of_grades_and_others(of_numbers, model, make_weights, tmp_path):
  kind = Grades(order=('low', 'mid', 'high'))
  model = model.clone(num_classes=3, head=OrdinalHead())
  grades = make_weights(model, targets=kind)
  with pytest.raises(ValueError, match=r'hf cannot .*ordered.*format=vit_jax'):
    formats.write(grades, tmp_path / 'x', 'hf')
  formats.write(grades, path := tmp_path / 'x.npz', 'vit_jax')
  assert formats.read(path).targets == kind
  for weights, count in ((grades, 0), (of_numbers, 5)):
    found, _ = pretrained.fit(weights, num_classes=count)
    assert (found.targets, found.activation) == (Classes(), 'softmax')
    formats.write(found, path, 'npz')
    assert formats.read(path).model.num_classes == (count or None)


def test_changes(file, tmp_path, capsys):
  target = tmp_path / 'x.npz'
  flags = ['--image_size=64x96', '--num_classes=0', '--patch_size=8']
  assert call(file, target, *flags) is None
  captured = capsys.readouterr()
  assert f'wrote {target}\n' in captured.out
  assert 'no classes' in captured.out
  assert 'pos_embedding 1x2x3x32 resized to 1x8x12x32' in captured.err
  read = formats.read(target)
  assert read.image_shape == (64, 96, 3)
  assert read.class_names is None
  assert 'head/kernel' not in read.params
  assert read.params['embedding/kernel'].shape == (8, 8, 3, 32)
  assert [t.size for t in read.transforms] == [80, (64, 96)]


def test_nothing_is_overwritten(file, tmp_path):
  target = tmp_path / 'x.npz'
  target.write_text('mine')
  assert 'x.npz exists already; use --force' in call(file, target)
  assert target.read_text() == 'mine'
  assert call(file, target, '--force') is None
  assert formats.read(target).params
  # A folder keeps what is in it.
  (tmp_path / 'timm').mkdir()
  (tmp_path / 'timm/README').write_text('mine')
  assert call(file, tmp_path / 'timm') is None
  assert 'model.safetensors exists' in call(file, tmp_path / 'timm')
  assert (tmp_path / 'timm/README').read_text() == 'mine'


def test_nothing_is_left_of_what_fails(weights, tmp_path, monkeypatch):
  def write(weights, path, format):
    path.write_text('half')
    raise ValueError('no')

  monkeypatch.setattr(formats, 'write', write)
  with pytest.raises(ValueError, match='no'):
    convert.save(weights, tmp_path / 'x', 'npz')
  assert not list(tmp_path.iterdir())


def test_format_of():
  known = {'a/b.npz': 'npz', 'b.stablehlo': 'stablehlo', 'b': 'timm'}
  assert {target: convert.format_of(target) for target in known} == known
  assert convert.format_of('b.v1', 'hf') == 'hf'
  for target in ('b.bin', 'b.safetensors', 'gs://bucket/b.npz'):
    with pytest.raises(ValueError, match=target):
      convert.format_of(target)


def test_options_reach_the_writer(file, tmp_path, monkeypatch):
  given = {}
  monkeypatch.setattr(
    convert,
    'save',
    lambda weights, path, format, **options: given.update(options) or [path],
  )
  flags = ['--platform=cpu', '--platform=tpu', '--batch_size=3', '--force']
  assert call(file, tmp_path / 'x.stablehlo', *flags) is None
  assert given == {'platforms': ['cpu', 'tpu'], 'batch_size': 3, 'force': True}


RUN = """
import sys
from jax import export
import numpy as np
exported = export.deserialize(open('x.stablehlo', 'rb').read())
images = np.load('images.npy')
found = [np.asarray(exported.call(images[:n])) for n in (1, 3)]
assert not any(name.startswith(('vit_jax', 'flax')) for name in sys.modules)
np.savez('out.npz', *found)
"""


def test_numbers_are_exported_for_any_number_of_images(of_numbers):
  _, said = export.stablehlo(of_numbers, platforms=['cpu'])
  assert said['output']['shape'] == ['batch', 2]
  assert said['output']['is'] == 'numbers'
  assert config.build(said['targets']) == of_numbers.targets


@pytest.mark.slow
def test_stablehlo_runs_without_us(weights, tmp_path):
  pytest.importorskip('flatbuffers')
  files = convert.save(weights, tmp_path / 'x.stablehlo', 'stablehlo')
  assert sorted(f.name for f in files) == ['x.stablehlo', 'x.stablehlo.json']
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (3, *weights.image_shape), np.uint8)
  floats = np.asarray(weights.preprocess(pixels))
  np.save(tmp_path / 'images.npy', pixels)
  said = json.loads((tmp_path / 'x.stablehlo.json').read_text())
  assert said['input'] == {'shape': ['batch', 32, 48, 3], 'dtype': 'uint8'}
  assert said['output']['shape'] == ['batch', 6]
  assert said['platforms'] == ['cpu', 'cuda', 'tpu']
  assert said['class_names'] == weights.class_names
  assert said['transforms'] == config.describe(weights.transforms)
  done = python('-c', RUN, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  with np.load(tmp_path / 'out.npz') as out:
    for found, n in zip((out['arr_0'], out['arr_1']), (1, 3)):
      expected = logits(weights, floats[:n])
      np.testing.assert_allclose(found, expected, atol=3e-5)
