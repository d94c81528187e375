"""Numbers of the tool, compared with analysis on the model's q and k."""

import dataclasses
import functools
import pathlib

import in_process
import jax
import numpy as np
import pytest
from PIL import Image

from vit_jax import tree
from vit_jax.analysis import attention, embeddings
from vit_jax.models.axial import AxialViT
from vit_jax.models.pooling import ClassToken, Map, Mean
from vit_jax.models.posemb import Learned, PositionEmbedding, Relative, SinCos2d
from vit_jax.models.resnet import Hybrid
from vit_jax.tools import predict
from vit_jax.tools.look import __main__ as command
from vit_jax.tools.look import arrays, figures
from vit_jax.zoo import names

MIXER = functools.partial(names.create, 'Mixer-S/16', num_classes=2)
RESNET = functools.partial(names.create, 'BiT-R50x1', num_classes=2)


def load(path):
  with np.load(path) as arrays:
    return dict(arrays)


@pytest.fixture(scope='module')
def seen(tmp_path_factory):
  """Images of the model's size: nothing is resized."""
  folder = tmp_path_factory.mktemp('seen')
  rng = np.random.default_rng(1)
  paths = [str(folder / f'{i}.png') for i in range(3)]
  for path in paths:
    Image.fromarray(rng.integers(0, 256, (32, 48, 3), np.uint8)).save(path)
  return paths


def analysed(weights, paths, prefix):
  """The same numbers of all images, by the functions of analysis."""
  pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
  start = np.zeros((1, 1, prefix + 6), np.float32)
  if isinstance(weights.model.pooling, ClassToken):
    start[..., 0] = 1
  else:
    start[..., prefix:] = 1 / 6
  distances = attention.cell_distances((2, 3), (16, 16))

  @jax.jit
  def run(params, images):
    apply = functools.partial(weights.model.apply, mutable=['intermediates'])
    recorded = apply({'params': params}, images)[1]['intermediates']
    layers = attention.recorded(recorded)
    apart = functools.partial(attention.mean_distance, distances=distances)
    rows = start[:, None] @ attention.per_layer(attention.weights, *layers)
    rollout = attention.rollout(*layers, start=start)[..., prefix:]
    return {
      'maps': rows[..., prefix:].reshape(-1, 2, 2, 2, 3),
      'rollout': rollout.reshape(-1, 2, 3),
      'distance': attention.per_layer(apart, *layers),
    }

  images = pixels.astype(np.float32) / 127.5 - 1
  return jax.device_get(run(tree.unflatten(weights.params), images))


@pytest.mark.parametrize(
  'fields, prefix',
  [
    ({'posemb': Relative(), 'pooling': ClassToken(num_registers=2)}, 3),
    ({'posemb': SinCos2d(), 'pooling': Mean(class_token=True)}, 1),
  ],
  ids=['registers-relative', 'mean'],
)
def test_look(model, make_weights, fields, prefix, seen):
  weights = make_weights(model.clone(**fields))
  layout = arrays.layout(weights)
  assert (layout.grid, layout.prefix) == ((2, 3), prefix)
  looks = list(arrays.look_at(weights, seen[:2]))
  assert [look['path'] for look in looks] == seen[:2]
  for name, wanted in analysed(weights, seen[:2], prefix).items():
    found = np.stack([look[name] for look in looks])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=3e-5, err_msg=name)


@pytest.mark.slow
def test_look_with_a_map_head_and_scan(model, make_weights, seen):
  looks = {}
  for scan in (False, True):
    weights = make_weights(model.clone(pooling=Map()))
    weights.model = weights.model.clone(scan=scan)
    (looks[scan],) = arrays.look_at(weights, seen[:1])
  for name, value in looks[True].items():
    if name != 'path':
      np.testing.assert_allclose(value, looks[False][name], atol=2e-6)
  np.testing.assert_allclose(looks[True]['rollout'].sum(), 1, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Diagonal(PositionEmbedding):
  """Position embeddings from outside the package."""

  def table(self, params, grid, width):
    return np.eye(grid[0] * grid[1], width).reshape(*grid, width)


def test_obstacles(model, make_weights):
  weights = make_weights(model.clone(posemb=Diagonal()))
  similarity = embeddings.similarity(arrays.table(weights))
  np.testing.assert_array_equal(similarity.reshape(6, 6), np.eye(6))
  sizes = ('width', 'depth', 'mlp_dim', 'num_heads', 'embedding', 'num_classes')
  axial = AxialViT(**{name: getattr(model, name) for name in sizes})
  each = {
    'layers': model.clone(posemb=Learned(at='layers')),
    'shared': model.clone(posemb=Learned(at='layers_shared')),
    'relative': model.clone(posemb=Relative()),
    'axial': axial,
    'mixer': MIXER(),
    'none': model.clone(posemb=None),
  }
  found = {k: list(arrays.obstacles(make_weights(m))) for k, m in each.items()}
  hybrid = model.clone(embedding=Hybrid(patch_size=4, stages=()))
  assert 'pixels' in arrays.obstacles(make_weights(hybrid))['filters']
  assert 'distance' in arrays.obstacles(make_weights(RESNET()))
  assert found == {
    'layers': ['positions'],
    'shared': [],
    'relative': ['positions'],
    'axial': list(arrays.OF_ATTENTION),
    'mixer': [*arrays.OF_ATTENTION, *arrays.OF_PATCHES, 'positions'],
    'none': ['positions'],
  }


call = functools.partial(in_process.call, command)


def test_command(
  file, weights, expected, gallery, paths, tmp_path, capsys, monkeypatch
):
  sheet, sheets = figures.attention_figures.sheet, []
  monkeypatch.setattr(
    figures.attention_figures,
    'sheet',
    lambda rows, *a, **k: [sheet(rows, *a, **k), sheets.append(rows)],
  )
  monkeypatch.setattr(figures, 'PER_SHEET', 6)
  monkeypatch.setattr(figures, '_PX', 40)  # large images are drawn slowly
  monkeypatch.setattr(command, '_LEAST', 5)
  status = call(
    *(f'--weights={file}', f'--output={tmp_path}/out/new', gallery),
    *('--num_maps=1', '--num_points=5'),
  )
  assert not status
  assert [len(rows) for rows in sheets] == [6, 5, 6, 6, 6]
  told, said = capsys.readouterr()
  assert 'maps: 1 of 11 images (--num_maps)' in said
  assert 'tsne: 5 of 11 images (--num_points)' in said
  told = told.split()
  names = ['filters', 'positions', 'maps-1', 'rollout', 'rollout-2']
  names += ['distance', 'tsne', 'norms', 'pca', 'similarity']
  jpg = {'maps-1', 'rollout', 'rollout-2', 'pca', 'similarity'}
  endings = ['jpg' if x in jpg else 'png' for x in names]
  folder = f'{tmp_path}/out/new'
  assert told == [f'{folder}/{n}.{end}' for n, end in zip(names, endings)]
  for path in told:
    with Image.open(path) as image:
      assert min(image.size) > 100
      assert np.asarray(image.convert('L')).std() > 1
  saved = {n: load(tmp_path / 'out/new' / f'{n}.npz') for n in names}
  looks = list(arrays.look_at(weights, paths))
  best = looks[0]['probabilities'].max()
  assert arrays.in_words(weights, looks[0]).endswith(f' {best:.0%}')
  wanted = np.stack([look['rollout'] for look in looks])
  for name, part in (('rollout', slice(6)), ('rollout-2', slice(6, None))):
    np.testing.assert_allclose(saved[name]['rollout'], wanted[part], atol=1e-6)
    assert list(saved[name]['paths']) == paths[part]
    np.testing.assert_allclose(saved[name]['mean'], wanted.mean(0), atol=1e-6)
  np.testing.assert_allclose(
    saved['maps-1']['maps'], looks[0]['maps'], atol=1e-6
  )
  of_each = np.stack([look['distance'] for look in looks])
  np.testing.assert_allclose(
    saved['distance']['distance'], of_each.mean(0), atol=1e-4
  )
  np.testing.assert_allclose(
    saved['distance']['uniform'],
    arrays.cell_distances(weights).mean(),
    rtol=1e-6,
  )
  assert saved['positions']['similarity'].shape == (2, 3, 2, 3)
  assert saved['filters']['components'].shape == (28, 16, 16, 3)
  assert saved['tsne']['points'].shape == (5, 2)
  assert saved['tsne']['paths'].tolist() == [paths[i] for i in (0, 2, 5, 7, 10)]
  assert saved['tsne']['classes'].tolist() == list('aaabb')
  assert (tmp_path / 'out/new/norms-maps.jpg').exists()
  for i, path in enumerate(paths):
    wanted = np.linalg.norm(expected[path]['block_1'], axis=-1)
    np.testing.assert_allclose(saved['norms']['norms'][i, 1], wanted, atol=1e-4)
  maps = np.stack([expected[p]['tokens'][1:] for p in paths[:6]])
  maps = maps.reshape(6, 2, 3, -1)
  components, shares = embeddings.patch_components(maps, 3)
  np.testing.assert_allclose(saved['pca']['components'], components, atol=1e-3)
  np.testing.assert_allclose(saved['pca']['shares'], shares, atol=1e-5)
  wanted = [embeddings.similarity(x) for x in maps]
  found = saved['similarity']['similarity']
  for rows, shown, places in zip(wanted, found, saved['similarity']['places']):
    np.testing.assert_allclose(shown, rows[tuple(places.T)], atol=1e-4)
  for row, places in zip(sheets[-1], saved['similarity']['places']):
    for shown, at in zip(row[1:], places):  # patches are 48 pixels large
      red = (shown == [255, 0, 0]).all(-1)
      assert red.sum() == 48**2 and red[tuple(48 * at)]
  results = predict.predict(weights, paths[:2], layer='pre_logits')
  for look, result in zip(looks, results):
    np.testing.assert_allclose(look['features'], result['features'], atol=2e-5)


def test_options_reach_look_at(file, paths, tmp_path, monkeypatch):
  given = {}

  def record(weights, paths, **options):
    given.update(options)
    return iter([])

  monkeypatch.setattr(arrays, 'look_at', record)
  command = [f'--weights={file}', f'--output={tmp_path}', '--figure=distance']
  command += ['--batch_size=3', '--max_image_bytes=9']
  assert call(*command, paths[0]) == 0
  numbers = {'batch_size': 3, 'max_image_bytes': 9}
  assert given == {'figures': ['distance'], **numbers}


def test_without_images(file, weights, paths, tmp_path, capsys):
  assert not call(f'--weights={file}', f'--output={tmp_path}')
  assert sorted(p.name for p in tmp_path.glob('*.png')) == [
    'filters.png',
    'positions.png',
  ]
  assert 'Not drawn: maps: no images' in capsys.readouterr().err
  found = command._choose(None, weights, paths)
  assert 'tsne' not in found and 'rollout' in found
  assert 'tsne: it needs at least 30 images' in capsys.readouterr().err
  status = call(f'--weights={file}', f'--output={tmp_path}', '--figure=maps')
  assert 'maps: no images' in status


@pytest.mark.slow
def test_unreadable_images_and_another_size(file, paths, tmp_path, capsys, bad):
  command = [
    f'--weights={file}',
    f'--output={tmp_path}/out',
    '--image_size=64x96',
    *('--figure=rollout', '--figure=positions'),
    '--format=pdf',
    '--style=heat',
    bad,
  ]
  assert call(*command, *paths[:3]) == 1
  assert '1 of 4 skipped' in capsys.readouterr().err
  out = tmp_path / 'out'
  assert {p.stem for p in out.iterdir()} == {'rollout', 'positions'}
  assert (out / 'rollout.pdf').read_bytes().startswith(b'%PDF')
  assert load(out / 'rollout.npz')['rollout'].shape == (3, 4, 6)
  assert load(out / 'positions.npz')['similarity'].shape == (4, 6) * 2


def test_classes_are_folders():
  paths = ['/x/cat/1.png', '/x/cat/2.png', 'gs://x/a dog/3.png']
  assert arrays.classes(paths) == ['cat', 'cat', 'a dog']
  assert arrays.classes(paths[:2]) == []  # one folder is not a class


def test_tsne_keeps_neighbours():
  rng = np.random.default_rng(0)
  groups = np.repeat(np.arange(3), 20)
  features = 10 * rng.normal(size=(3, 70))[groups] + rng.normal(size=(60, 70))
  points = arrays.tsne(features)
  np.testing.assert_array_equal(points, arrays.tsne(features))
  distances = np.linalg.norm(points[:, None] - points, axis=-1)
  np.fill_diagonal(distances, np.inf)
  np.testing.assert_array_equal(groups[distances.argmin(1)], groups)


@pytest.mark.parametrize('num_classes', [1, 30])
def test_figure_of_points(tmp_path, num_classes, monkeypatch):
  rng = np.random.default_rng(0)
  monkeypatch.setattr(arrays, 'tsne', np.stack)
  looks = [{'path': str(i), 'features': rng.normal(size=2)} for i in range(60)]
  for i, look in enumerate(looks if num_classes > 1 else ()):
    look['class'] = f'_class $ {i % num_classes} of a long name'
  figures.tsne(None, tmp_path / 'x.png', looks)
  with Image.open(tmp_path / 'x.png') as image:
    assert min(image.size) > 900 and max(image.size) < 2000


def test_positions_of_a_large_grid_are_every_third(tmp_path, monkeypatch):
  found = []
  monkeypatch.setattr(
    figures.pictures, 'save', lambda made, *_, **__: found.append(made)
  )
  table = np.random.default_rng(0).normal(size=(9, 37, 8))
  monkeypatch.setattr(arrays, 'table', lambda weights: table)
  figures.positions(None, tmp_path / 'positions.png')
  axes = found[0].axes[0]
  labels = [int(x.get_text()) for x in axes.get_xticklabels()]
  assert labels == [*range(1, 38, 3)] and len(axes.get_yticks()) == 3
  shown = axes.images[0].get_array()
  wanted = embeddings.similarity(table)[6, 36]
  np.testing.assert_array_equal(shown[-9:, -37:], wanted)


def test_finer_images(weights, tmp_path):
  """A photograph larger than the model's images, drawn finer than it sees."""
  from sklearn.datasets import load_sample_image

  photo = load_sample_image('china.jpg')
  path = pathlib.Path(tmp_path / 'china.png')
  Image.fromarray(photo).save(path)
  (picture,) = figures.finer_images(weights, [str(path)], 100)
  assert picture.shape == (128, 192, 3)
  side = 427 * 32 / 40  # of the part that the model sees
  top, left = (427 - side) / 2, (640 - side * 1.5) / 2
  box = (left, top, left + 1.5 * side, top + side)
  wanted = Image.fromarray(photo).resize((192, 128), box=box)
  assert np.abs(np.asarray(wanted, np.float32) - picture).mean() < 8
