"""What is written is what was read, and is whole or not there."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / 'weights'))
from small import logits as logits_of
from small import random_weights

from vit_jax import config, tree
from vit_jax.data.transforms import CentralCrop, ResizeSmall
from vit_jax.models.vit import VisionTransformer
from vit_jax.preprocess import Normalize
from vit_jax.runs.checkpoint import Checkpointer
from vit_jax.step import TrainState
from vit_jax.tools import convert
from vit_jax.weights import bundle, export, formats

FIELDS = {'width': 32, 'depth': 2, 'mlp_dim': 24, 'num_heads': 2}
FIELDS |= {'patch_size': (4, 4), 'num_classes': 5}
SHAPE = (16, 16, 3)
NAMES = ['cat', 'dog', 'owl', 'ant', 'bee']
TRANSFORMS = ResizeSmall(18), CentralCrop((16, 16))
NORMALIZE = Normalize((100.0, 110.0, 120.0), (50.0, 60.0, 70.0))
PIXELS = np.random.default_rng(0).integers(0, 256, (3, *SHAPE), np.uint8)
FLOATS = (PIXELS - np.float32([100, 110, 120])) / np.float32([50, 60, 70])


def make_weights(**fields):
  return random_weights(
    bundle.from_fields(VisionTransformer, **FIELDS | fields),
    SHAPE,
    preprocess=NORMALIZE,
    transforms=TRANSFORMS,
    class_names=NAMES,
    origin='a test',
  )


@pytest.fixture(scope='module')
def weights():
  return make_weights()


@pytest.fixture(scope='module')
def logits(weights):
  """The model's logits of three images."""
  return logits_of(weights, FLOATS)


@pytest.fixture(scope='module')
def run(weights, tmp_path_factory):
  """A workdir as training leaves it: layers stacked, and an average."""
  workdir = tmp_path_factory.mktemp('run')
  average = tree.unflatten(tree.stack_blocks(weights.params))
  state = TrainState(
    step=jnp.asarray(7),
    params=jax.tree.map(lambda x: jnp.asarray(x / 2), average),
    opt_state=(),
    rng=jax.random.key(0),
    ema=jax.tree.map(jnp.asarray, average),
  )
  checkpointer = Checkpointer(workdir)
  checkpointer.save(7, state, {'position': 0})
  checkpointer.close()
  content = {
    'model': config.describe(bundle.replace(weights.model, scan=True)),
    'preprocess': config.describe(NORMALIZE),
    'image_shape': SHAPE,
    'transforms': config.describe(TRANSFORMS),
    'class_names': NAMES,
    'activation': 'sigmoid',
  }
  (workdir / 'model.json').write_text(json.dumps(content))
  return workdir


def call(*args):
  """None, or the message that the command ends with."""
  try:
    convert.main([str(a) for a in args])
  except SystemExit as exit:
    return exit.code


def assert_same(actual, expected):
  assert actual.keys() == expected.keys()
  for path, value in expected.items():
    np.testing.assert_array_equal(actual[path], value, err_msg=path)


@pytest.mark.parametrize(
  'name, flags, files',
  [
    ('x.npz', [], ['x.json', 'x.npz']),
    ('x.npz', ['--format=big_vision'], ['x.json', 'x.npz']),
    ('x', [], ['config.json', 'model.safetensors']),
    (
      'x/model.safetensors',
      ['--format=hf'],
      ['config.json', 'model.safetensors', 'preprocessor_config.json'],
    ),
  ],
)
def test_a_run_goes_out_and_comes_back(
  run, weights, logits, tmp_path, name, flags, files
):
  target = tmp_path / name
  assert call(run, target, *flags) is None
  folder = tmp_path if name == 'x.npz' else tmp_path / 'x'
  assert sorted(p.name for p in folder.iterdir()) == files
  read, expected = formats.read(target), dict(weights.params)
  if '--format=big_vision' in flags:  # positions are of patches alone there
    expected['cls'] = expected['cls'] + expected['cls_pos_embedding']
    expected['cls_pos_embedding'] = 0 * expected['cls']
  assert_same(read.params, expected)
  assert read.class_names == NAMES
  assert read.image_shape == SHAPE
  assert [type(t) for t in read.transforms] == [ResizeSmall, CentralCrop]
  assert [t.size for t in read.transforms] == [18, (16, 16)]
  for found, expected in (
    (read.preprocess.mean, NORMALIZE.mean),
    (read.preprocess.std, NORMALIZE.std),
    (logits_of(read, FLOATS), logits),  # also: GELU, epsilons, heads
  ):
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_what_is_told(run, tmp_path, capsys):
  target = tmp_path / 'raw.npz'
  flags = ['--ema=off', '--image_size=32', '--num_classes=0']
  assert call(run, target, *flags) is None
  out = capsys.readouterr().out
  for text in (
    f'read    {run}/checkpoints/7\n',
    'images 16x16x3, 5 classes with names',
    'pos_embedding 1x4x4x32 resized to 1x8x8x32 (paper)',
    'head/kernel dropped',
    f'{target}\n',
  ):
    assert text in out
  read = formats.read(target)
  assert read.image_shape == (32, 32, 3)
  assert read.class_names is None
  assert 'head/kernel' not in read.params
  assert [t.size for t in read.transforms] == [36, (32, 32)]


def test_nothing_is_overwritten(run, tmp_path):
  target = tmp_path / 'x.npz'
  target.write_text('mine')
  assert 'x.npz exists already; --force' in call(run, target)
  assert target.read_text() == 'mine'
  assert call(run, target, '--force') is None
  assert formats.read(target).params
  target.unlink()
  before = (tmp_path / 'x.json').read_text()
  assert 'x.json exists already' in call(run, target, '--ema=off')
  assert not target.exists()
  assert (tmp_path / 'x.json').read_text() == before
  # A folder keeps what is in it.
  (tmp_path / 'timm').mkdir()
  (tmp_path / 'timm/README').write_text('mine')
  assert call(run, tmp_path / 'timm') is None
  assert 'model.safetensors exists' in call(run, tmp_path / 'timm')
  assert (tmp_path / 'timm/README').read_text() == 'mine'


def test_nothing_is_left_of_what_fails(weights, tmp_path):
  registers = make_weights(num_registers=2)
  for format in ('npz', 'hf'):
    with pytest.raises(ValueError, match=r'(?i)register'):
      convert.save(registers, tmp_path / 'x', format)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  'target, format, expected',
  [
    ('a/b.npz', None, 'npz'),
    ('b.npz', 'big_vision', 'big_vision'),
    ('b.npz', 'vit_jax', 'vit_jax'),
    ('b.stablehlo', None, 'stablehlo'),
    ('b', None, 'timm'),
    ('b', 'hf', 'hf'),
    ('b/model.safetensors', None, 'timm'),
    ('b.v1/', None, 'timm'),
    ('b.v1', 'timm', 'timm'),
  ],
)
def test_format_of(target, format, expected):
  path, found = convert.format_of(target, format)
  assert found == expected
  assert path.name in ('b.npz', 'b.stablehlo', 'b', 'b.v1')


@pytest.mark.parametrize(
  'target, format',
  [
    ('b.bin', None),
    ('b.safetensors', None),
    ('b', 'npz'),
    ('b.npz', 'timm'),
    ('b.npz', 'stablehlo'),
    ('gs://bucket/b.npz', None),
  ],
)
def test_format_that_cannot_be(target, format):
  with pytest.raises(ValueError, match=re.escape(target)):
    convert.format_of(target, format)


RUN = """
import sys
from jax import export
import numpy as np
out = []
for name in ('uint8', 'float'):
  exported = export.deserialize(open(f'{name}.stablehlo', 'rb').read())
  images = np.load(f'{name}.npy')
  out += [exported.call(images[:n]) for n in (1, 3)]
assert not any(name.startswith(('vit_jax', 'flax')) for name in sys.modules)
np.savez('out.npz', *out)
"""


@pytest.mark.slow
def test_stablehlo_runs_without_us(tmp_path, logits):
  pytest.importorskip('flatbuffers')
  weights = make_weights()
  for kind, fields, images in (
    ('uint8', {}, PIXELS),
    ('float', {'scan': True, 'attention': 'cudnn'}, FLOATS),
  ):
    weights.model = bundle.replace(weights.model, **fields)
    target = tmp_path / f'{kind}.stablehlo'
    files = convert.save(weights, target, 'stablehlo', images=kind)
    assert [f.name for f in files] == [target.name, f'{target.name}.json']
    np.save(tmp_path / f'{kind}.npy', images)
    told = json.loads(files[1].read_text())
    assert told['input'] == {
      'shape': ['batch', *SHAPE],
      'dtype': str(images.dtype),
    }
    assert told['output']['shape'] == ['batch', 5]
    assert told['platforms'] == ['cpu', 'cuda', 'tpu']
    assert told['class_names'] == NAMES
    assert told['transforms'] == config.describe(TRANSFORMS)
  done = subprocess.run(
    [sys.executable, '-c', RUN], cwd=tmp_path, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  with np.load(tmp_path / 'out.npz') as out:
    found = [out[f'arr_{i}'] for i in range(4)]
  for array, n in zip(found, (1, 3, 1, 3)):
    assert array.dtype == np.float32
    np.testing.assert_allclose(array, logits[:n], atol=2e-6)


def test_stablehlo_errors(weights, monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: 'is there')
  with pytest.raises(
    ValueError, match="'int8' must be one of 'uint8', 'float'"
  ):
    export.stablehlo(weights, images='int8')
  monkeypatch.setattr(export, '_LIMIT', 1000)
  with pytest.raises(ValueError, match='at most 2 GB'):
    export.stablehlo(weights)
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ValueError, match='pip install flatbuffers'):
    export.stablehlo(weights)
