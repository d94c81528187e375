"""Each row of "Adding something" in CONTRIBUTING, from a package outside.

The package `mine` has one of each part. Two models train with it: a module of
its own, and a VisionTransformer with its position embedding and pooling.
"""

import importlib
import json
import pathlib
import re
import shlex
import sys

import cv2
import jax
import numpy as np
import pytest
from in_process import call

from vit_jax import config, pretrained, tree
from vit_jax.optim import optimizers
from vit_jax.parallel import sharding
from vit_jax.reports import page
from vit_jax.runs.records import read_records
from vit_jax.tools import convert, predict
from vit_jax.tools.look import __main__ as look
from vit_jax.weights import bundle, formats
from vit_jax.weights.keymap import KeyMap

HERE = pathlib.Path(__file__).parent
TABLE = (HERE.parent / 'CONTRIBUTING.md').read_text()
MINE = (HERE / 'own_parts.py').read_text()
MINE += re.search(r'```python\n(.*?)```', TABLE, re.DOTALL)[1]

CONFIG = """
import ml_collections

def get_config(model):
  adamw = {'target': 'optax.adamw'}
  data = {
    'source': {
      'target': 'mine.Squares',
      'size': 9,
      'targets': {'target': 'mine.Shades'},
    },
    'transforms': [
      {'target': 'mine.Crop', 'size': 8}, {'target': 'mine.Renumber'}
    ],
    'keep': ('site',),
    'batch_size': 8,
  }
  vit = {
    'target': 'vit_jax.models.vit.VisionTransformer',
    **{'width': 8, 'depth': 2, 'mlp_dim': 8, 'num_heads': 1},
    'embedding': {'patch_size': 4},
    'posemb': {'target': 'mine.Rows', 'std': 0.1},
    'pooling': {'target': 'mine.Sum'},
    'layers': {'target': 'mine.Shared'},
  }
  objective = {
    'vit': {
      'target': 'mine.Scaled',
      'factor': 2.0,
      'objective': {'target': 'mine.brier'},
    },
    'net': {
      'target': 'vit_jax.objectives.classification.softmax_xent',
      'terms': {'sure': {'target': 'mine.certainty', 'power': 2}},
    },
  }
  return ml_collections.ConfigDict({
    'run': 'vit_jax.train.train',
    'model': {'vit': vit, 'net': {'target': 'mine.Net', 'width': 8}}[model],
    'data': data,
    'objective': objective[model],
    'optimizer': {'target': 'mine.signs', 'optimizer': adamw},
    'schedule': {'lr': 0.01, 'decay': 'constant'},
    'total_steps': 2,
    'probes': {'top': {'target': 'mine.length', 'every_steps': 1}},
    'evals': evaluators(data),
    'logging': {
      'every_steps': 1,
      'writers': {'sum': {'target': 'mine.Total', 'name': 'losses'}},
    },
    'seed': 7,
  })

def evaluators(data):
  return {
    'largest': {'target': 'mine.Largest', 'data': data},
    'seen': {'target': 'mine.Seen', 'factor': 3, 'every_steps': 1},
  }

def evaluation(path, data):
  return ml_collections.ConfigDict({
    'run': 'vit_jax.evaluate.evaluate',
    'init_from': {'path': path, 'trust': ('mine',)},
    'evals': evaluators(data) | {
      'seen': {'target': 'mine.Seen'},
      'page': {'target': 'mine.Confidence', 'data': data},
    },
  })
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The package `mine`, configs, and images."""
  folder = tmp_path_factory.mktemp('adding')
  (folder / 'mine.py').write_text(MINE)
  (folder / 'my_config.py').write_text(CONFIG)
  for i, name in enumerate(('dark', 'light')):
    image = np.full((8, 8, 3), 50 + 100 * i, np.uint8)
    cv2.imwrite(str(folder / f'{name}.png'), image)
  sys.path.insert(0, str(folder))
  yield folder
  sys.path.remove(str(folder))
  for name in ('mine', 'my_config'):
    sys.modules.pop(name, None)


def train(folder, model, workdir, *assignments, allow_changes=()):
  """Run the config as vit_jax.main does; return the final state."""
  loaded = config.load(f'{folder}/my_config.py:{model}')
  config.override(loaded, assignments)
  return config.run(loaded, str(workdir), allow_changes=allow_changes)


@pytest.fixture(scope='module', params=['net', 'vit'])
def run(request, folder):
  """(model, workdir, state) of a finished run."""
  workdir = folder / request.param
  return request.param, workdir, train(folder, request.param, workdir)


def test_train_with_every_part(run):
  model, workdir, state = run
  records = read_records(workdir)
  (last,) = [r for r in records if 'largest/logit' in r]
  assert last['step'] == 2
  assert [r['step'] for r in records if 'seen/devices' in r] == [1, 2]
  seen = {k: v for k, v in last.items() if k.startswith('seen/')}
  assert seen == {'seen/devices': 24, 'seen/black': -1.0, 'seen/classes': 2}
  shown = json.loads((workdir / 'data.json').read_text())
  assert shown['training']['lines'][:2] == [
    '16 images in Squares',
    '2 classes: 8 dark squares, 8 light squares',
  ]
  assert shown['largest']['images'][0][1] == 'dark'
  assert len(shown['training']['images']) == 8  # the first batch
  losses = [r for r in records if 'train/loss' in r]
  for record in losses:
    if model == 'net':
      assert 0.2 < record['train/sure'] < 1
      continue
    scaled = 2 * record['train/loss']
    np.testing.assert_allclose(record['train/scaled'], scaled, rtol=1e-6)
  if model == 'vit':  # each of 16 examples once
    assert sum(record['train/site'] for record in losses) == 2 * 1.5
  total = sum(record['train/loss'] for record in losses)
  assert float((workdir / 'losses_7.txt').read_text()) == total
  paths = tree.flatten(state.params)
  if model == 'net':
    assert 'pixels/kernel' in paths
  else:  # it has one layer for both, whose gate is trained
    assert 'rows' in paths and 'block_1' not in state.params
    assert paths['block_0/attn/gate'] != 1


def test_resume_and_shard(run, folder):
  """Resume on a mesh with two FSDP devices, with the package's rules."""
  model, workdir, _ = run
  more = ['total_steps=3', 'mesh.fsdp=2']
  if model == 'net':
    rules = importlib.import_module('mine').RULES
    more.append(f'sharding={rules}')
  allowed = ['total_steps']
  resumed = train(folder, model, workdir, *more, allow_changes=allowed)
  assert resumed.step == 3
  records = read_records(workdir)
  norms = [
    [(r['step'], r[key]) for r in records if key in r]
    for key in ('train/grad_norm', 'train/probes/top/grads')
  ]
  assert norms[0] == norms[1] and len(norms[0]) == 3
  (parameter,) = [
    value
    for path, value in tree.flatten(resumed.params).items()
    if path in ('pixels/kernel', 'embedding/kernel')
  ]
  assert parameter.sharding.is_fully_replicated == (model == 'vit')


def test_evaluate(run, folder):
  _, workdir, _ = run
  mine = importlib.import_module('my_config')
  data = json.loads((workdir / 'config.json').read_text())['data']
  results = config.run(
    mine.evaluation(str(workdir), data), str(folder / 'evaluation')
  )
  assert results.keys() == {
    *('largest/logit', 'seen/devices', 'seen/black', 'seen/classes'),
    'page/confidence',
  }
  assert 0.5 < results['page/confidence'] < 1


def test_tools_ask_for_trust(run, folder):
  """The error names the flag that allows the package."""
  _, workdir, _ = run
  said = call(predict, f'--weights={workdir}', folder / 'dark.png')
  assert '--trust=mine' in said


def test_predict(run, folder, capsys):
  _, workdir, _ = run
  images = folder / 'dark.png', folder / 'light.png'
  lines = page.closing(workdir).splitlines()
  _, command = next(x for x in lines if 'tools.predict' in x).split('predict ')
  given = shlex.split(command)[:-1]  # without the image
  assert given == [f'--weights={workdir}', '--trust=mine']
  assert call(predict, *given, *images) == 0
  rows = capsys.readouterr().out.splitlines()
  assert len(rows) == 1 + 2 * 2  # a heading, two images, two classes


def test_convert_and_export(run, folder):
  model, workdir, _ = run
  path, exported = folder / f'{model}.npz', folder / f'{model}.stablehlo'
  given = workdir, path, '--trust=mine', '--format=vit_jax'
  assert call(convert, *given) is None
  _, saved = pretrained.load(workdir, trust=('mine',), report=None)
  _, converted = pretrained.load(path, trust=('mine',), report=None)
  jax.tree.map(np.testing.assert_array_equal, saved, converted)
  assert call(convert, path, exported, '--trust=mine') is None
  assert exported.stat().st_size


def test_look(run, folder):
  """The figures of attention need a model with attention."""
  model, workdir, _ = run
  out = folder / f'look_{model}'
  given = f'--weights={workdir}', '--trust=mine', f'--output={out}'
  status = call(look, *given, '--figure=rollout', folder / 'dark.png')
  assert (out / 'rollout.jpg').exists() == (model == 'vit')
  assert status == 0 or 'cannot draw' in status


def test_resize_position_embedding(run):
  """The embedding resizes itself when the image size changes."""
  model, workdir, _ = run
  if model == 'net':
    return
  _, params = pretrained.load(
    workdir, trust=('mine',), image_size=16, report=None
  )
  assert params['rows'].shape == (4, 8)


def test_weights_format(folder):
  """A key map reads and writes the arrays of another program."""
  mine = importlib.import_module('mine')
  rng = np.random.default_rng(0)
  shapes = {'fc1.weight': (8, 192), 'fc1.bias': 8, 'fc2.weight': (2, 8)}
  arrays = {
    name: rng.random(shape, np.float32)
    for name, shape in (shapes | {'fc2.bias': 2}).items()
  }
  model = mine.Net(width=8, num_classes=2)
  keys = KeyMap(*mine.KEYS)
  shapes = bundle.shapes(model, (8, 8, 3))
  params = keys.fit(arrays, keys.to_ours(arrays), shapes)
  weights = bundle.Weights(model=model, params=params, image_shape=(8, 8, 3))
  formats.write(weights, folder / 'theirs.npz', 'vit_jax')
  path = folder / 'theirs.npz'
  _, loaded = pretrained.load(path, trust=('mine',), report=None)
  written = keys.to_theirs(tree.flatten(loaded))
  jax.tree.map(np.testing.assert_array_equal, written, arrays)


def test_kernel(folder):
  """Muon gets a matrix, and the mesh splits its heads."""
  rows = importlib.import_module('mine').KERNELS
  given = {'target': 'vit_jax.optim.optimizers.muon', 'kernels': rows}
  rule = config.resolve({'rule': given})['rule']
  path = 'blocks/memory/kernel'
  params = {path: jax.ShapeDtypeStruct((3, 8, 2, 4), 'float32')}
  axes = optimizers._matrix_axes(path, params[path], **rule.keywords)
  assert axes == ((1,), (2, 3))
  mesh = sharding.make_mesh(data=4, model=2)
  split = sharding.infer(params, sharding.tensor_parallel(rows), mesh)
  assert tuple(split[path].spec) == (None, None, 'model')


def test_what_a_part_is_called_with_is_said(folder):
  """A term that needs the model, which only objectives and others get."""
  with pytest.raises(ValueError, match=r"'model'. It is called with Seen. See"):
    train(
      *(folder, 'net', folder / 'refused'),
      'objective.terms.sure.target=mine.needs_model',
    )


def test_every_key_of_the_table_is_in_the_config(folder):
  """There it names a part of the package, which the tests above use."""
  table = TABLE.split('## Adding something')[1].split('\n## ')[0]
  rows = dict(re.findall(r'^\| ([a-z ]+) \|.*\| (.*) \|$', table, re.M)[1:])
  assert rows.pop('weights format').startswith('none: ')
  assert rows.pop('parallelism') == '`sharding`, `mesh`'  # when it is resumed
  assert rows.pop('kernel').startswith('`optimizer.kernels` ')
  assert rows.pop('key of the examples') == '`data.keep`'
  configs = [
    json.loads(config.load(f'{folder}/my_config.py:{model}').to_json())
    for model in ('net', 'vit')
  ]
  for row, where in rows.items():
    (key,) = re.findall('`(.*?)`', where)
    found = configs
    for name in key.split('.'):
      found = [
        inner
        for x in found
        for part, inner in x.items()
        if name in (part, 'NAME')
      ]
    assert 'mine.' in json.dumps(found), f'{row}: nothing at {key}'
