"""Weights written as ONNX, run by onnxruntime."""

import json

import pytest
import tiny
from live import needs

from vit_jax.data.targets import Labels, Numbers
from vit_jax.tools import convert
from vit_jax.types import UserError
from vit_jax.zoo import names

pytestmark = needs('timm', 'onnxruntime')


@pytest.mark.parametrize(
  'uses',
  [
    {},
    {'targets': Labels(), 'activation': 'sigmoid'},
    {'targets': Numbers(), 'activation': 'identity'},
  ],
)
def test_onnx(tmp_path, uses):
  import onnx

  model = names.create('Ti/16', num_classes=2)
  uses = {'class_names': ['a', 'b'], **uses}
  weights = tiny.weights(model, (64, 64, 3), **uses)
  path = tmp_path / 'model.onnx'
  convert.save(weights, path, 'onnx')  # and compares with onnxruntime
  found = {x.key: x.value for x in onnx.load(path).metadata_props}
  about = json.loads(found['vit_jax'])
  assert about['class_names'] == ['a', 'b']
  assert about['activation'] == uses.get('activation', 'softmax')
  assert about['preprocess']['target'].endswith('Normalize')


def test_models_that_timm_lacks(tmp_path):
  weights = tiny.weights(names.create('R50x1'), (32, 32, 3))
  with pytest.raises(UserError, match='timm cannot hold this model'):
    convert.save(weights, tmp_path / 'model.onnx', 'onnx')
  assert not [*tmp_path.iterdir()]
