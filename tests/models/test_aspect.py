"""Images of any aspect ratio: patches, attention, positions, and refusals."""

import functools

import jax
import numpy as np
import pytest
import tiny
from synthetic import Synthetic

from vit_jax import setup
from vit_jax.data.pipeline import Data
from vit_jax.data.transforms import KeepAspect, Resize
from vit_jax.durations import steps
from vit_jax.evals.classification import Classification
from vit_jax.evals.representation import Representation
from vit_jax.models import posemb, rotary
from vit_jax.models.attention import attention
from vit_jax.models.axial import AxialBlock
from vit_jax.models.flexi import FlexiPositions
from vit_jax.models.pooling import Head, Map, Mean, NoPooling
from vit_jax.models.stem import ConvStem
from vit_jax.models.vit import Layers, grid_of
from vit_jax.objectives.classification import softmax_xent
from vit_jax.objectives.distillation import Teacher
from vit_jax.objectives.mae import Mae
from vit_jax.objectives.mixing import Mixed, Mixup
from vit_jax.parallel import sharding
from vit_jax.tools import predict
from vit_jax.training import Training
from vit_jax.weights import bundle, formats

KEEP, RNG = KeepAspect(4, 12), np.random.default_rng(0)
SIZES, GRIDS = ((10, 10), (10, 30), (50, 9)), [[3, 3], [2, 6], [6, 2]]
PHOTOS = [RNG.integers(1, 256, (*x, 3)).astype(np.uint8) for x in SIZES]
BATCH = jax.tree.map(lambda *x: np.stack(x), *(KEEP(x, RNG) for x in PHOTOS))
TABLE, QUERY = FlexiPositions(stored=(4, 3)), Map(num_registers=1)
WHOLE = [  # images of BATCH as the plain images that they are
  Resize([4 * side for side in grid], antialias=True)(photo, RNG)
  for grid, photo in zip(GRIDS, PHOTOS)
]


def test_patches_are_side_by_side_and_zeros_follow():
  assert BATCH['grid'].tolist() == GRIDS
  for row, whole, (rows, columns) in zip(BATCH['image'], WHOLE, GRIDS):
    cells = whole.reshape(rows, 4, columns, 4, 3).swapaxes(1, 2)
    expected = np.zeros((12, 4, 4, 3))
    expected[: rows * columns] = cells.reshape(-1, 4, 4, 3)
    np.testing.assert_array_equal(np.split(row, 12, axis=1), expected)
  for size, grid in ((7, 900), [1, 12]), ((480, 640), [3, 4]):
    made = KeepAspect(16, 12)(np.zeros((*size, 1), np.uint8), RNG)
    assert made['grid'].tolist() == grid
  crop = KeepAspect(4, 12, area=(0.2, 0.3))
  a, b, c = (crop(PHOTOS[1], np.random.default_rng(i)) for i in (3, 3, 4))
  assert (a['image'] == b['image']).all() and (a['image'] != c['image']).any()


@pytest.mark.parametrize('name', ['einsum', 'xla', 'pallas'])
def test_attention_and_its_gradient_end_at_the_length(name):
  q, k, v, do = np.float32(RNG.standard_normal((4, 1, 9, 2, 8)))

  def run(name, k, v, **lengths):
    fn = functools.partial(attention, implementation=name, **lengths)
    out, pull = jax.vjp(fn, q, k, v)
    return out, *pull(do)

  found = jax.jit(run, static_argnums=0)(name, k, v, lengths=np.int32([4]))
  expected = run('einsum', k[:, :4], v[:, :4])
  for x, y in zip(found, expected):
    np.testing.assert_allclose(x[:, : y.shape[1]], y, atol=2e-6)
    assert not x[:, y.shape[1] :].any()


@pytest.mark.parametrize(
  'fields',
  [
    {'posemb': TABLE, 'pooling': Mean(num_registers=1), 'scan': True},
    {'posemb': posemb.SinCos2d(), 'pooling': Map(True, all_tokens=True)},
    {'posemb': rotary.RotaryAxial(reference=(5, 5), learned=TABLE)},
    {'posemb': rotary.RotaryDino(), 'pooling': QUERY, 'attention': 'pallas'},
    {'posemb': rotary.RotaryMixed(), 'remat': 'full', 'scan': True},
  ],
)
def test_an_image_in_a_batch_is_that_image_alone(fields):
  model = tiny.vit(num_classes=4, head=Head(init_std=0.5), **fields)
  model, params = bundle.build(tiny.weights(model, (12, 12, 3)))
  apply = functools.partial(model.apply, {'params': params}, method='features')
  run, grid = jax.jit(functools.partial(apply, maps=(-1,))), BATCH['grid']
  pixels = np.float32(BATCH['image']) / 255
  out = run(pixels, grid=grid)
  noise = np.where(BATCH['image'] == 0, 9, pixels)
  jax.tree.map(np.testing.assert_array_equal, run(noise, grid=grid), out)
  for i, (whole, (rows, columns)) in enumerate(zip(WHOLE, GRIDS)):
    plain = run(whole[None] / np.float32(255))
    np.testing.assert_allclose(out['logits'][i], plain['logits'][0], atol=3e-6)
    cells, padding = np.split(out['map_-1'][i, 0], [rows * columns])
    expected = plain['map_-1'].reshape(cells.shape)
    np.testing.assert_allclose(cells, expected, atol=5e-6)
    assert not padding.any()


def test_predictions_and_a_teacher_keep_the_aspect(tmp_path):
  model = tiny.vit(num_classes=4, posemb=TABLE)
  weights = tiny.weights(model, (12, 12, 3), transforms=(KEEP,))
  formats.write(weights, tmp_path / 'w.npz', 'vit_jax')
  teacher = Teacher(str(tmp_path / 'w.npz')).open(model)
  params = teacher.load(sharding.make_mesh(jax.devices()[:1]))
  (tmp_path / 'a.png').write_bytes(tiny.encode(PHOTOS[1]))
  (found,) = predict.predict(weights, [f'{tmp_path}/a.png'])
  logits = teacher(params, jax.tree.map(lambda x: x[1:2], BATCH))
  expected = jax.nn.softmax(logits[0])
  np.testing.assert_allclose(found['probabilities'], expected, atol=1e-6)


@pytest.mark.parametrize('pooling, squeezes', [(Map(), False), (None, True)])
def test_an_export_keeps_the_number_of_patches(pooling, squeezes, tmp_path):
  fields = {'pooling': pooling} if pooling else {'num_classes': 4}
  model = tiny.vit(posemb=FlexiPositions(stored=(3, 3)), **fields)
  weights = tiny.weights(model, (12, 12, 3), transforms=(KEEP,))
  formats.write(weights, tmp_path, 'timm')
  last = formats.read(tmp_path).transforms[-1]
  assert getattr(last, 'max_patches', None) == (None if squeezes else 12)
  assert str(weights.notes).count('without keeping') == squeezes


class AxialLayers(Layers):
  def layer(self, model):
    return AxialBlock


def test_what_cannot_take_them_is_refused_by_name():
  source = Synthetic(image_size=12, num_classes=4, num_examples=8)
  data, mesh = Data(source, 8, (KEEP,)), sharding.make_mesh()
  model = tiny.vit(num_classes=4, posemb=None)
  given = {'optimizer': None, 'schedule': None, 'total': steps(1)}
  given |= {'model': model, 'data': data}
  how = setup.Examples.of(data), mesh, lambda model, images: model
  mixed = functools.partial(Mixed, mixer=Mixup(1.0), objective=softmax_xent)
  for objective, name in (mixed, 'Mixed'), (Mae, 'Mae'):
    with pytest.raises(ValueError, match=f'{name} .*KeepAspect'):
      setup.make(Training(objective=objective, **given), *how)
  learned, in_layers = posemb.Learned(), FlexiPositions(at='layers')
  for name, part, said in (
    *(('posemb', learned, 'Learned'), ('pooling', NoPooling(), 'NoPooling')),
    *(('embedding', ConvStem(), 'ConvStem'), ('posemb', in_layers, 'layers')),
    ('posemb', rotary.RotaryAxial(learned), ' Learned'),
    ('posemb', FlexiPositions(resize_method='bicubic'), 'FlexiPositions'),
    ('layers', AxialLayers(), 'AxialBlock'),
  ):
    with pytest.raises(ValueError, match=f'KeepAspect.*{said}'):
      grid_of(model.clone(**{name: part}), BATCH)
  for make in Representation, functools.partial(Classification, flip=True):
    with pytest.raises(ValueError, match='KeepAspect'):
      make(model, preprocess=np.float32, mesh=mesh, data=data)
