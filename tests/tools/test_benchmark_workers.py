"""The benchmark's workers: ours, plain Linen, timm, and the input."""

import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data import images
from vit_jax.models import names
from vit_jax.tools.benchmark import cases, input, ours, workers

SETTINGS = {'model': 'mu/16', 'batch_size': 8, 'image_size': 32, 'warmup': 1}


@pytest.fixture(scope='module', autouse=True)
def fast_compilation():
  """Little is computed here, so XLA's optimizations would not pay off."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


@pytest.mark.slow
def test_ours_trains_on_all_devices():
  fields = {'dtype': 'bfloat16', 'num_classes': 10}
  settings = SETTINGS | {'mode': 'train', 'fields': fields}
  found = ours.make(settings)
  assert found.round(2) > 0
  assert found.started['n_devices'] == jax.device_count()
  assert int(found._carry.step) == 3
  with pytest.raises(ValueError, match='must be a multiple of'):
    ours.make(settings | {'batch_size': 3})


@pytest.mark.parametrize('name', input.AUGMENTATIONS)
def test_augmentations_of_recipes(name):
  """They are those of the recipes, and batches have them."""
  transforms = input.augmentation(name, 32)
  kinds = [type(transform).__name__ for transform in transforms]
  more = {
    'crop': [],
    'deit': ['TimmRandAugment', 'RandomErasing'],
    'deit3': ['ThreeAugment', 'ColorJitter'],
    'augreg': ['RandAugment'],
  }
  assert kinds == ['InceptionCrop', 'FlipLR', *more[name]]
  image, rng = np.full((40, 60, 3), 90, np.uint8), np.random.default_rng(0)
  for transform in transforms:
    image = transform(image, rng)
  assert image.shape == (32, 32, 3) and image.dtype == np.uint8


@pytest.mark.parametrize('kind', ['imagenet', 'records'])
def test_input_makes_batches(kind, monkeypatch):
  few = input.KINDS[kind]._replace(num_files=1)
  monkeypatch.setitem(input.KINDS, kind, few)
  settings = {'batch_size': 2, 'image_size': 32, 'warmup': 1, 'images': kind}
  found = input.Input(settings | {'augmentation': 'deit3'})
  answer = found.round(1)
  assert answer['seconds'] > 0 and answer['cpu_seconds'] >= 0
  parts = found.profile(1)
  assert set(parts) == {'reading', 'decoding', 'transforming'}
  assert parts['decoding'] > parts['reading'] >= 0
  size = {'imagenet': 54e3, 'records': 25e3}[kind]
  assert 0.7 * size < found.started['jpeg_bytes'] < 1.5 * size
  image = images.decode(found._source.files[0])
  assert image.shape == (*few.size, 3)


def test_cpu_time_includes_worker_processes():
  code = 'sum(range(10_000_000)); print(flush=True); input()'
  before = input._cpu_seconds()
  with subprocess.Popen(
    [sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
  ) as child:
    child.stdout.readline()
    assert input._cpu_seconds() - before > 0.05
    child.kill()


def test_matrix_product_is_positive():
  assert ours.matrix_flops('bfloat16', side=64, repeats=2) > 0


def test_models_by_name():
  theirs = 'vit_huge_patch14_224'
  assert cases.timm_name(theirs) == theirs
  assert cases.timm_name('S/16') == 'vit_small_patch16_224'
  assert cases.timm_name('ViT-L/16') == 'vit_large_patch16_224'
  assert cases.timm_name('G/14') == 'vit_gigantic_patch14_224'
  assert cases.timm_name('mu/16') is None


def test_input_names_what_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, 'cv2', None)
  images.opencv.cache_clear()
  message = 'not installed here: pip install opencv-python'
  with pytest.raises(ModuleNotFoundError, match=message):
    input.Input({'batch_size': 2, 'image_size': 32})


def test_plain_linen_has_as_many_parameters_as_ours():
  spec = importlib.util.spec_from_file_location('plain', cases.LINEN)
  plain = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(plain)
  images = jnp.zeros((1, 32, 32, 3))
  model = plain.create('mu/16', num_classes=1000)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  # Our model keeps the position of the class token in a table of its own.
  count = sum(x.size for x in jax.tree.leaves(shapes))
  assert count == names.count_parameters('mu/16', image_size=32)


def test_workers_import_without_data_packages():
  """A machine with an accelerator may lack all of these."""
  code = """
import sys
missing = {'grain', 'tensorflow_datasets', 'cv2', 'PIL', 'matplotlib'}
missing |= {'ml_collections', 'tensorboardX', 'sklearn', 'scipy', 'flatbuffers'}
class Missing:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] in missing:
      raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import vit_jax.tools.benchmark.__main__, vit_jax.tools.benchmark.ours
for name in ('jax', 'vit_jax.models.names'):
  del sys.modules[name]
  sys.modules[name] = None
import vit_jax.tools.benchmark.timm  # runs where only torch is installed
"""
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=workers.ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.filterwarnings('ignore')
@pytest.mark.skipif(
  not importlib.util.find_spec('timm'), reason='needs torch and timm'
)
@pytest.mark.parametrize('mode', ['train', 'infer'])
def test_timm_worker(mode):
  case = {'mode': mode, 'precision': 'bfloat16'}
  case |= {'timm_name': 'vit_tiny_patch16_224', 'num_classes': 10}
  case |= {'image_size': 32, 'batch_size': 2}
  command = cases.peer_command('timm', sys.executable, {'mode': 'infer'})
  with workers.Worker(command) as timm:
    started = timm.ask('start', **case, compile='none', warmup=1)
    assert started['notes'] == 'eager'
    assert timm.ask('round', steps=1)['seconds'] > 0
  expected = names.count_parameters('Ti/16', image_size=32, num_classes=10)
  assert started['param_count'] == expected
