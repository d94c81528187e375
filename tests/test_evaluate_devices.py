"""evaluate measures the same on 8 devices and on 2 processes of 2 devices."""

import pytest
from processes import Process, join

from vit_jax import config as config_lib
from vit_jax.runs.records import read_records

# 101 and 67 examples: no batch size divides them.
CONFIG = """
import ml_collections
from vit_jax.zoo import names


def data(split, examples):
  source = {'target': 'vit_jax.data.sources.digits.Digits', 'split': split}
  source = {'source': source, 'examples': examples}
  source |= {'target': 'vit_jax.data.subsets.Subset'}
  return {'source': source, 'batch_size': 16}


def get_config():
  readouts, train, test = 'vit_jax.evals.', data('train', 101), data('test', 67)
  return ml_collections.ConfigDict({
    'run': 'vit_jax.evaluate.evaluate',
    'model': names.settings('ViT-mu/4', num_classes=10),
    'image_shape': (8, 8, 1),
    'evals': {
      'test': {
        'target': 'vit_jax.evals.classification.Classification',
        'intervals': True,
        'per_class': True,
        'data': test,
      },
      'frozen': {
        'target': 'vit_jax.evals.frozen.Frozen',
        'features': 'pixels',
        'data': {'digits': {'train': train, 'test': test}},
        'readouts': {
          'fewshot': {'target': readouts + 'fewshot.FewShot', 'shots': (3,)},
          'knn': {'target': readouts + 'knn.Knn', 'k': (1, 7)},
          'logistic': {'target': readouts + 'logistic.Logistic',
                       'tol': 1e-2},
        },
      },
    },
  })
"""


@pytest.mark.slow
def test_same_metrics_on_devices_and_processes(tmp_path):
  config = tmp_path / 'config.py'
  config.write_text(CONFIG)
  config_lib.run(config_lib.load(str(config)), tmp_path / 'one')
  command = ['-m', 'vit_jax.main', f'--config={config}']
  command.append(f'--workdir={tmp_path}/two')
  env = {'JAX_NUM_CPU_DEVICES': '2'}
  pair = [Process(tmp_path, *command, *flags, env=env) for flags in join(2)]
  assert [host.finish() for host in pair] == [0, 0], pair[0].output
  one, two = (read_records(tmp_path / name)[-1] for name in ('one', 'two'))
  assert one['test/num_examples'] == 67 and len(one) > 20
  assert one['frozen/digits/logistic/accuracy'] > 0.5
  assert one.keys() == two.keys()
  for key in [k for k in one if '/' in k and 'seconds' not in k]:
    # Counts of examples are equal to the last bit. Losses and confidences are
    # float32 arithmetic on batches of other shapes.
    exact = not key.rsplit('/')[-1].startswith(('loss', 'ece'))
    tolerance = 0 if exact else 1e-6
    assert two[key] == pytest.approx(one[key], rel=tolerance, abs=0), key
  files = [tmp_path / name / 'confusion-test.csv' for name in ('one', 'two')]
  assert files[0].read_text() == files[1].read_text()
  wrong = [
    sorted(path.with_name('misclassified-test.csv').read_text().splitlines())
    for path in files
  ]
  assert len(wrong[0]) == 1 + round(67 * (1 - one['test/accuracy']))
  columns = [[row.split(',')[:3] for row in rows] for rows in wrong]
  assert columns[0] == columns[1]
