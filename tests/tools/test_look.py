"""Numbers of the tool, compared with numpy on the model's q and k."""

import dataclasses
import functools
import pathlib
import sys

import jax
import numpy as np
import pytest
from PIL import Image

sys.path.append(str(pathlib.Path(__file__).parents[1] / 'weights'))
from small import random_weights

from vit_jax import tree
from vit_jax.models.axial import AxialViT
from vit_jax.models.layers import PatchEmbedding
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import ClassToken, Map, Mean
from vit_jax.models.posemb import Learned, PositionEmbedding, Relative, SinCos2d
from vit_jax.models.resnet import Hybrid, ResNet
from vit_jax.models.vit import VisionTransformer
from vit_jax.reports import embeddings
from vit_jax.tools import predict
from vit_jax.tools.look import arrays, figures
from vit_jax.tools.look.__main__ import main
from vit_jax.weights import formats

SIZES = {'width': 16, 'depth': 2, 'mlp_dim': 16, 'num_heads': 2}
VIT = functools.partial(
  VisionTransformer, **SIZES, embedding=PatchEmbedding(4), num_classes=6
)
SHAPE = (8, 12, 3)
ROOT = Hybrid(patch_size=1, stages=())  # a cell is 4 pixels
MIXER = MlpMixer(
  width=8,
  depth=1,
  tokens_mlp_dim=8,
  channels_mlp_dim=8,
  embedding=PatchEmbedding(4),
)
RESNET = ResNet(stages=(1,))


def load(path):
  with np.load(path) as arrays:
    return dict(arrays)


def make_weights(model=VIT(), shape=SHAPE):
  return random_weights(model, shape, origin='tiny')


@pytest.fixture(scope='module', autouse=True)
def fast_compilation():
  """Little is computed here, so XLA's optimizations would not pay off."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture(scope='module')
def gallery(tmp_path_factory):
  """Pictures of the model's size: nothing is resized."""
  folder = tmp_path_factory.mktemp('gallery')
  rng = np.random.default_rng(1)
  for i in range(3):
    pixels = rng.integers(0, 256, SHAPE, np.uint8)
    Image.fromarray(pixels).save(folder / f'{i}.png')
  return folder


@pytest.fixture(scope='module')
def paths(gallery):
  return [str(path) for path in sorted(gallery.iterdir())]


def record(weights, paths):
  """The q and k of pictures, as the model records them."""
  model = weights.model
  pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
  _, recorded = jax.jit(
    lambda v, x: model.apply(v, x, mutable=['intermediates'])
  )(
    {'params': tree.unflatten(weights.params)},
    pixels.astype(np.float32) / 127.5 - 1,
  )
  return recorded['intermediates']


def numpy_look(weights, recorded, index, prefix, grid, query):
  """Everything of one picture: weights [L, h, N, N] and what is made of it."""
  layers = []
  for i in range(2):
    found = recorded[f'block_{i}']['attn']
    q, k = (np.asarray(found[name][0][index], np.float64) for name in 'qk')
    scores = np.einsum('qhd,nhd->hqn', q, k)
    if isinstance(weights.model.posemb, Relative):
      scores += np.asarray(found['position_logits'][0][index])
    scores = scores / np.sqrt(q.shape[-1])
    e = np.exp(scores - scores.max(-1, keepdims=True))
    layers.append(e / e.sum(-1, keepdims=True))
  attention = np.array(layers)
  tokens = attention.shape[-1]
  start = np.zeros(tokens)
  if query is not None:
    start[prefix + query[0] * grid[1] + query[1]] = 1
  elif isinstance(weights.model.pooling, ClassToken):
    start[0] = 1
  else:
    start[prefix:] = 1 / (tokens - prefix)
  mixed = (attention.mean(1) + np.eye(tokens)) / 2
  within = attention[:, :, prefix:, prefix:]
  within = within / within.sum(-1, keepdims=True)
  at = 4 * np.array([(y, x) for y in range(grid[0]) for x in range(grid[1])])
  apart = np.sqrt(((at[:, None] - at[None]) ** 2).sum(-1))
  return {
    'maps': (start @ attention)[..., prefix:].reshape(2, 2, *grid),
    'rollout': (start @ mixed[1] @ mixed[0])[prefix:].reshape(grid),
    'distance': (within * apart).sum((-1, -2)) / len(apart),
  }


@pytest.mark.parametrize(
  'model, prefix, query',
  [
    (VIT(posemb=Relative(), pooling=ClassToken(num_registers=2)), 3, None),
    pytest.param(
      VIT(posemb=SinCos2d(), pooling=Mean(class_token=True)),
      1,
      None,
      marks=pytest.mark.slow,
    ),
    pytest.param(VIT(embedding=ROOT), 1, (1, 2), marks=pytest.mark.slow),
  ],
  ids=['registers-relative', 'mean', 'hybrid-query'],
)
def test_look(model, prefix, query, paths):
  weights = make_weights(model)
  layout = arrays.layout(weights)
  assert (layout.grid, layout.prefix) == ((2, 3), prefix)
  looks = list(arrays.look_at(weights, paths[:2], query=query))
  assert [look['path'] for look in looks] == paths[:2]
  recorded = record(weights, paths[:2])
  for i, look in enumerate(looks):
    wanted = numpy_look(weights, recorded, i, prefix, (2, 3), query)
    for name, value in wanted.items():
      assert look[name].dtype == np.float32
      np.testing.assert_allclose(look[name], value, atol=2e-5, err_msg=name)
    assert look['rollout_prefix'].shape == (prefix,)
    total = look['rollout'].sum() + look['rollout_prefix'].sum()
    np.testing.assert_allclose(total, 1, atol=1e-5)
    assert look['maps_prefix'].shape == (2, 2, prefix)


@pytest.mark.slow
def test_look_with_a_map_head_and_scan(paths):
  looks = {}
  for scan in (False, True):
    weights = make_weights(VIT(pooling=Map(), scan=scan))
    (looks[scan],) = arrays.look_at(weights, paths[:1])
  assert looks[True].keys() == looks[False].keys()
  for name, value in looks[True].items():
    if name != 'path':
      np.testing.assert_allclose(value, looks[False][name], atol=2e-6)
  np.testing.assert_allclose(looks[True]['rollout'].sum(), 1, atol=1e-5)


def test_query_that_is_no_patch(paths):
  with pytest.raises(ValueError, match=r'query=\(2, 0\).*2x3'):
    arrays.look_at(make_weights(), paths, query=(2, 0))


@pytest.mark.parametrize(
  'model, figure, message',
  [
    (MIXER, 'rollout', r'tiny: cannot draw rollout: .*no attention'),
    (RESNET, 'distance', r'cannot draw distance: .*no attention'),
    (MIXER, 'frames', r"figure='frames' must be one of 'maps', 'rollout"),
  ],
)
def test_models_without_attention(model, figure, message, paths):
  weights = make_weights(model, (32, 32, 3))
  with pytest.raises(ValueError, match=message):
    arrays.look_at(weights, paths, figures=[figure])


def test_weights_that_lack_what_is_shown():
  with pytest.raises(ValueError, match=r'draw filters: .*feature maps'):
    arrays.filters(make_weights(VIT(embedding=ROOT)))
  with pytest.raises(ValueError, match=r'draw positions: .*no position'):
    arrays.positions(make_weights(VIT(posemb=None)))
  with pytest.raises(ValueError, match=r'draw positions: .*no position'):
    arrays.positions(make_weights(MIXER, (8, 8, 3)))
  assert len(arrays.filters(make_weights(MIXER, (8, 8, 3)), 5)[0]) == 5


@dataclasses.dataclass(frozen=True)
class Diagonal(PositionEmbedding):
  """Position embeddings from outside the package."""

  def table(self, params, grid, width):
    return np.eye(grid[0] * grid[1], width).reshape(*grid, width)


def test_positions_that_can_be_drawn():
  similarity = arrays.positions(make_weights(VIT(posemb=Diagonal())))
  np.testing.assert_array_equal(similarity.reshape(6, 6), np.eye(6))
  axial = AxialViT(**SIZES, embedding=PatchEmbedding(4), num_classes=6)
  obstacles = {
    'layers': arrays.obstacles(make_weights(VIT(posemb=Learned(at='layers')))),
    'shared': arrays.obstacles(
      make_weights(VIT(posemb=Learned(at='layers_shared')))
    ),
    'relative': arrays.obstacles(make_weights(VIT(posemb=Relative()))),
    'axial': arrays.obstacles(make_weights(axial)),
  }
  assert {name: list(found) for name, found in obstacles.items()} == {
    'layers': ['positions'],
    'shared': [],
    'relative': ['positions'],
    'axial': list(arrays.OF_ATTENTION),
  }


def call(*args):
  """Exit status of the command."""
  with pytest.raises(SystemExit) as exit:
    main([str(a) for a in args])
  return exit.value.code


@pytest.fixture(scope='module')
def npz(tmp_path_factory):
  path = tmp_path_factory.mktemp('weights') / 'tiny.npz'
  formats.write(make_weights(), str(path), 'npz')
  return path


def test_command(npz, gallery, paths, tmp_path, capsys, monkeypatch):
  looks, look_at = [], arrays.look_at

  def record(*args, **options):
    for look in look_at(*args, **options):
      looks.append(look)
      yield look

  monkeypatch.setattr(arrays, 'look_at', record)
  status = call(
    *(f'--weights={npz}', f'--output={tmp_path}/out/new', gallery),
    *('--num_maps=1', '--per_sheet=2', '--as_seen'),
  )
  assert not status
  told = capsys.readouterr().out.split()
  names = ['filters', 'positions', 'maps-0', 'rollout', 'rollout-2', 'distance']
  assert told == [f'{tmp_path}/out/new/{name}.png' for name in names]
  for path in told:
    with Image.open(path) as image:
      assert min(image.size) > 100
      assert np.asarray(image.convert('L')).std() > 1
  saved = {n: load(tmp_path / 'out/new' / f'{n}.npz') for n in names}
  assert [look['path'] for look in looks] == paths
  wanted = np.stack([look['rollout'] for look in looks])
  np.testing.assert_allclose(saved['rollout']['rollout'], wanted[:2], atol=1e-6)
  np.testing.assert_allclose(
    saved['rollout-2']['rollout'], wanted[2:], atol=1e-6
  )
  assert list(saved['rollout-2']['paths']) == paths[2:]
  np.testing.assert_allclose(
    saved['maps-0']['maps'], looks[0]['maps'], atol=1e-6
  )
  of_each = np.stack([look['distance'] for look in looks])
  np.testing.assert_allclose(
    saved['distance']['distance'], of_each.mean(0), atol=1e-5
  )
  assert saved['positions']['similarity'].shape == (2, 3, 2, 3)
  assert saved['filters']['components'].shape == (15, 4, 4, 3)
  assert not list(tmp_path.rglob('.*'))  # nothing half-written


def test_without_pictures(npz, paths, tmp_path, capsys):
  assert not call(f'--weights={npz}', f'--output={tmp_path}')
  assert sorted(p.name for p in tmp_path.glob('*.png')) == [
    'filters.png',
    'positions.png',
  ]
  assert 'Not drawn:\n  maps: no images are given' in capsys.readouterr().err
  status = call(f'--weights={npz}', f'--output={tmp_path}', '--figures=maps')
  assert 'maps: no images are given: add images' in status
  status = call(
    *(f'--weights={npz}', f'--output={tmp_path / "filters.png"}', paths[0])
  )
  assert 'Cannot create the folder' in status


def test_a_mixer_has_filters_alone(paths, tmp_path, capsys):
  path = str(tmp_path / 'mixer.npz')
  formats.write(make_weights(MIXER, (8, 8, 3)), path, 'npz')
  assert not call(f'--weights={path}', f'--output={tmp_path}/out', paths[0])
  told = capsys.readouterr()
  assert told.out.split() == [f'{tmp_path}/out/filters.png']
  assert 'rollout: the model has no attention' in told.err
  status = call(f'--weights={path}', '--output=o', '--figures=maps', paths[0])
  assert 'cannot draw\n  maps: the model has no attention' in status


@pytest.mark.slow
def test_unreadable_images_and_another_size(npz, paths, tmp_path, capsys):
  bad = tmp_path / 'bad.png'
  bad.write_bytes(b'no image')
  command = [
    f'--weights={npz}',
    f'--output={tmp_path}/out',
    '--image_size=16x12',
    '--figures=rollout,positions',
    '--format=pdf',
    '--style=heat',
    bad,
  ]
  assert 'bad.png: cannot decode' in call(*command, *paths)
  assert call(*command, *paths, '--on_error=skip') == 1
  assert '1 of 4 skipped' in capsys.readouterr().err
  out = tmp_path / 'out'
  assert {p.stem for p in out.iterdir()} == {'rollout', 'positions'}
  assert (out / 'rollout.pdf').read_bytes().startswith(b'%PDF')
  saved = load(out / 'rollout.npz')
  assert saved['rollout'].shape == (3, 4, 3) and len(saved['paths']) == 3
  assert load(out / 'positions.npz')['similarity'].shape == (4, 3) * 2
  status = call(*command, '--on_error=skip')
  assert 'No image could be read' in status


@pytest.mark.parametrize(
  'argument, message',
  [
    (
      '--figures=maps,frames',
      "'frames' must be one of maps, rollout, distance",
    ),
    ('--query=3', "'3': expected ROW,COLUMN"),
    ('--num_maps=0', "'0' is not an integer"),
  ],
)
def test_arguments(argument, message, capsys):
  assert call('--weights=w', '--output=o', argument) == 2
  assert message in capsys.readouterr().err


def test_classes_are_folders():
  paths = ['/x/cat/1.png', '/x/cat/2.png', '/x/a dog/3.png']
  assert arrays.classes(paths) == ['cat', 'cat', 'a dog']
  assert arrays.classes(paths[:2]) is None  # one folder is not a class
  assert arrays.classes(paths[:2], ['cat', 'owl']) == ['cat', 'cat']
  deep = ['/x/cat/old/1.png', '/x/owl/new/1.png']
  assert arrays.classes(deep) == ['old', 'new']
  assert arrays.classes(deep, ['cat', 'owl']) == ['cat', 'owl']
  assert arrays.classes(['1.png', 'gs://x/cat/1.png']) == ['', 'cat']


def test_tsne_keeps_neighbours():
  """Groups of features stay groups; the points are the same each time."""
  rng = np.random.default_rng(0)
  groups = np.repeat(np.arange(3), 20)
  features = 10 * rng.normal(size=(3, 70))[groups] + rng.normal(size=(60, 70))
  points = arrays.tsne(features)
  np.testing.assert_array_equal(points, arrays.tsne(features))
  distances = np.linalg.norm(points[:, None] - points, axis=-1)
  np.fill_diagonal(distances, np.inf)
  np.testing.assert_array_equal(groups[distances.argmin(1)], groups)
  assert np.isfinite(arrays.tsne(np.ones((5, 4)))).all()
  shown = arrays.apart(points)
  sides = np.abs(points[shown][:, None] - points[shown]).max(-1)
  assert 3 <= len(shown) <= len(points)
  assert sides[sides > 0].min() > 0.045 * np.ptp(points, axis=0).max()


def test_at_equal_distances():
  assert arrays.sample(list('abcde'), 3) == ['a', 'c', 'e']
  assert arrays.sample(list('ab'), 5) == ['a', 'b']


@pytest.mark.parametrize(
  'num_classes', [1, pytest.param(12, marks=pytest.mark.slow), 30]
)
def test_figure_of_points(tmp_path, num_classes):
  rng = np.random.default_rng(0)
  points = rng.normal(size=(60, 2))
  classes = None
  if num_classes > 1:
    classes = [f'_class $ {i % num_classes} of a long name' for i in range(60)]
  images = {3: np.zeros((8, 12, 1), np.uint8)}
  embeddings.scatter(points, tmp_path / 'x.png', classes, images)
  with Image.open(tmp_path / 'x.png') as image:
    assert min(image.size) > 900 and max(image.size) < 2000


@pytest.mark.parametrize(
  'model', [pytest.param(VIT(), marks=pytest.mark.slow), RESNET]
)
def test_tsne(model, tmp_path, capsys):
  """One point for each image of a model with and without attention."""
  rng = np.random.default_rng(0)
  paths = [str(tmp_path / f'in/{x}/{i}.png') for x in 'ab' for i in range(3)]
  for path in paths:
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(path)
  weights = tmp_path / 'weights.npz'
  formats.write(make_weights(model, (32, 32, 3)), str(weights), 'vit_jax')
  out = tmp_path / 'out'
  given = f'--weights={weights}', f'--output={out}', '--figures=tsne'
  assert not call(*given, tmp_path / 'in')
  assert capsys.readouterr().out.split() == [f'{out}/tsne.png']
  found = load(out / 'tsne.npz')
  assert found['paths'].tolist() == paths
  assert found['classes'].tolist() == ['a'] * 3 + ['b'] * 3
  assert found['points'].shape == (6, 2) and np.isfinite(found['points']).all()
  read = formats.read(weights)
  looks = arrays.look_at(read, paths[:2], figures=['tsne'])
  expected = predict.predict(read, paths[:2], layer='pre_logits')
  for look, result in zip(looks, expected, strict=True):
    features = result['features']
    np.testing.assert_allclose(look['features'], features, atol=2e-5)
  assert not call(*given, '--num_points=5', '--thumbnails', tmp_path / 'in')
  assert load(out / 'tsne.npz')['paths'].tolist() == (
    [paths[i] for i in (0, 1, 2, 3, 5)]
  )
  said = call(*given, *paths[:4])
  assert 'tsne: it needs at least 5 images' in said


def test_captions():
  looks = [{'path': 'a/x.png', 'class': 'a'}, {'path': 'b/x.png', 'class': 'b'}]
  assert figures._captions(looks) == ['a / x', 'b / x-2']
  assert figures._captions(looks, files=False) == ['a', 'b']
  looks = [{'path': 'a/x.png'}]
  assert figures._captions(looks) == ['x']
  assert figures._captions(looks, files=False) is None


def test_names_of_figures():
  paths = ['a/x.png', 'b/x.jpg', 'x-2.png', 'c/x.png', 'y.z.png']
  names = figures._names([{'path': path} for path in paths])
  assert names == ['x', 'x-2', 'x-2-2', 'x-3', 'y.z']


@pytest.mark.slow
def test_photographs(tmp_path):
  """Real ones, larger than the model's images, shown finer than it sees."""
  from sklearn.datasets import load_sample_images

  found = load_sample_images()
  for name, image in zip(('china', 'flower'), found.images):
    Image.fromarray(image).save(tmp_path / f'{name}.png')
  rollout = np.random.default_rng(0).uniform(size=(2, 3))
  looks = [
    {'path': str(path), 'rollout': rollout, 'rollout_prefix': rollout[0]}
    for path in sorted(tmp_path.iterdir())
  ]
  weights = make_weights()
  drawn = figures.Figures(weights, tmp_path / 'out')
  drawn.rollout(looks)
  (picture, _) = drawn._images(looks, 200)
  assert picture.shape == (200, 300, 3)
  ours = np.asarray(
    Image.fromarray(found.images[0]).resize((300, 200)), np.float32
  )
  assert np.abs(ours - picture).mean() < 8
  with Image.open(tmp_path / 'out/rollout.png') as image:
    assert image.width > 600
