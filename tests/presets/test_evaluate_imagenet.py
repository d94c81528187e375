"""configs/evaluate_imagenet.py on made-up sets with the real ones' features.

The model does not look at the images: its likeliest classes are always those
of BEST, in this order, so that every accuracy can be counted by hand.
"""

import made_up
import numpy as np
import pytest
import tiny
from preset_configs import load_config

from vit_jax import config as config_lib
from vit_jax.data import transforms
from vit_jax.weights import formats
from vit_jax.weights.bundle import Weights
from vit_jax.zoo import names

BEST = (500, 3, 7, 8, 9, 10)
# Labels are 0, 1, 2, ...; in imagenet2012_real none, [1], [2, 3], none, ...
SETS = {
  'imagenet2012': {'validation': 20},
  'imagenet2012_real': {'validation': 20},
  'imagenet_v2/matched-frequency': {'test': 19},
  'imagenet_v2/topimages': {'test': 8},
  'imagenet_a': {'test': 12},
  'imagenet_r': {'test': 13},
  'imagenet_sketch': {'test': 5},
}
# Evaluator: hits among the best, among the best five (None: it has fewer than
# 20 classes); examples.
EXPECTED = {
  'val': (0, 4, 20),
  'real': (0, 3, 13),  # in [2, 3], [7], [8, 9] of 13 lists that are not empty
  'v2': (0, 4, 19),
  'a': (1, None, 12),  # restricted to labels 0 to 11, of which 3 is the best
  'r': (1, None, 13),
  'sketch': (0, 1, 5),
}


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  path = tmp_path_factory.mktemp('tfds')
  for name, sizes in SETS.items():
    made_up.prepare(path, name, sizes)
  return path


def write_weights(path, num_classes):
  fields = {'num_classes': num_classes, 'depth': 1}
  model = names.create('ViT-mu/4', **fields)
  params = tiny.normal_params(model, (28, 28, 3), scale=0.0)
  params['head/bias'][list(BEST)] = np.arange(len(BEST), 0, -1)
  weights = Weights(
    model=model,
    params=params,
    image_shape=(28, 28, 3),
    class_names=[f'animal {i}' for i in range(num_classes)],
  )
  formats.write(weights, path, 'npz')
  return str(path)


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
  path = tmp_path_factory.mktemp('weights') / 'tiny.npz'
  return write_weights(path, num_classes=1000)


def run(argument, weights, data_dir, workdir):
  config = load_config('evaluate_imagenet', argument)
  config.init_from.path = weights
  first = next(iter(config.evals))
  config.evals[first].data.batch_size = 16  # of all, as is data_dir
  config.evals[first].data.source.data_dir = str(data_dir)
  return config_lib.run(config, workdir)


@pytest.mark.parametrize(
  'words',
  [
    ('val', 'real', 'a'),
    pytest.param(('v2', 'r', 'sketch'), marks=pytest.mark.slow),
  ],
)
def test_counts_by_hand(words, weights, data_dir, tmp_path):
  argument = ','.join((*words, 'size=28'))
  result = run(argument, weights, data_dir, tmp_path)
  for name in words:
    top1, top5, count = EXPECTED[name]
    assert result[f'{name}/accuracy'] == top1 / count, name
    found = result.get(f'{name}/top5_accuracy')
    assert found == (top5 and top5 / count), name
    assert result[f'{name}/num_examples'] == count, name
    assert result[f'{name}/accuracy_high'] > top1 / count, name
  assert {k.split('/')[0] for k in result} == set(words)
  assert result.get('real/num_unlabelled') == (7 if 'real' in words else None)


def test_some_sets_and_settings(weights, data_dir, tmp_path):
  result = run('v2,topimages,size=32,original', weights, data_dir, tmp_path)
  assert {k.split('/')[0] for k in result} == {'v2'}
  assert result['v2/num_examples'] == 8


@pytest.mark.parametrize('word', ['original', 'big_vision', 'timm'])
def test_the_images_of_a_code_base(word):
  config = load_config('evaluate_imagenet', f'val,{word}')
  found = config_lib.resolve(config.evals.val.data.transforms)
  assert (*found,) == transforms.evaluation(word, 224)


def test_another_number_of_classes_is_an_error(data_dir, tmp_path):
  other = write_weights(tmp_path / 'other.npz', num_classes=1001)
  with pytest.raises(ValueError, match='has 1000 classes and the model 1001'):
    run('val,size=28', other, data_dir, tmp_path)
