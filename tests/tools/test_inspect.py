"""The tool's numbers are those of numpy on the model's q and k, by file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax import tree
from vit_jax.config import instantiate
from vit_jax.tools import inspect_figures, inspection
from vit_jax.tools.look import main
from vit_jax.weights import formats
from vit_jax.weights.bundle import Weights

VIT = 'vit_jax.models.vit.VisionTransformer'
SETTINGS = {'target': VIT, 'width': 16, 'depth': 2, 'mlp_dim': 16}
SETTINGS |= {'num_heads': 2, 'patch_size': 4, 'num_classes': 6}
SHAPE = (8, 12, 3)
HYBRID = {'patch_size': 1, 'resnet_stages': ()}  # a cell is 4 pixels


def make_weights(settings=None, shape=SHAPE, **fields):
  settings = (settings or SETTINGS) | fields
  shapes = jax.eval_shape(
    instantiate(settings).init, jax.random.key(0), jnp.zeros((1, *shape))
  )
  rng = np.random.default_rng(0)
  return Weights(
    settings=settings,
    params={
      path: rng.normal(size=leaf.shape, scale=0.3).astype(np.float32)
      for path, leaf in tree.flatten(shapes['params']).items()
    },
    image_shape=shape,
    origin='tiny',
  )


MIXER = {'target': 'vit_jax.models.mixer.MlpMixer', 'width': 8, 'depth': 1}
MIXER |= {'tokens_mlp_dim': 8, 'channels_mlp_dim': 8, 'patch_size': 4}
RESNET = {'target': 'vit_jax.models.resnet.ResNet', 'stages': (1,)}
RESNET |= {'width_factor': 1}


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
  model = instantiate(weights.settings)
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
    if weights.settings.get('posemb') == 'relative':
      scores += np.asarray(found['position_logits'][0][index])
    scores = scores / np.sqrt(q.shape[-1])
    e = np.exp(scores - scores.max(-1, keepdims=True))
    layers.append(e / e.sum(-1, keepdims=True))
  attention = np.array(layers)
  tokens = attention.shape[-1]
  start = np.zeros(tokens)
  if query is not None:
    start[prefix + query[0] * grid[1] + query[1]] = 1
  elif weights.settings.get('pooling', 'token') == 'token':
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
  'fields, prefix, query',
  [
    ({'num_registers': 2}, 3, None),
    (
      {'pooling': 'gap', 'class_token': True, 'posemb': 'sincos2d'},
      1,
      None,
    ),
    (HYBRID, 1, (1, 2)),
    ({'posemb': 'relative'}, 1, None),
  ],
  ids=['registers', 'gap', 'hybrid', 'relative'],
)
def test_look(fields, prefix, query, paths):
  weights = make_weights(**fields)
  assert inspection.geometry(weights) == ((2, 3), (4, 4), prefix)
  looks = list(inspection.look(weights, paths[:2], query=query))
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
    weights = make_weights(pooling='map')
    weights.settings['scan'] = scan
    (looks[scan],) = inspection.look(weights, paths[:1])
  assert looks[True].keys() == looks[False].keys()
  for name, value in looks[True].items():
    if name != 'path':
      np.testing.assert_allclose(value, looks[False][name], atol=2e-6)
  np.testing.assert_allclose(looks[True]['rollout'].sum(), 1, atol=1e-5)


def test_query_that_is_no_patch(paths):
  with pytest.raises(ValueError, match=r'query=\(2, 0\).*2x3'):
    inspection.look(make_weights(), paths, query=(2, 0))


@pytest.mark.parametrize(
  'settings, figure, message',
  [
    (MIXER, 'rollout', r'tiny: rollout cannot be shown, .*no attention'),
    (RESNET, 'distance', r'distance cannot be shown, .*no attention'),
    (MIXER, 'frames', r"No figure 'frames'; there are maps, rollout"),
  ],
)
def test_models_without_attention(settings, figure, message, paths):
  weights = make_weights(settings, (32, 32, 3))
  with pytest.raises(ValueError, match=message):
    inspection.look(weights, paths, figures=[figure])


def test_weights_that_lack_what_is_shown():
  with pytest.raises(ValueError, match=r'filters cannot.*feature map'):
    inspection.filters(make_weights(**HYBRID))
  with pytest.raises(ValueError, match=r"positions cannot.*posemb='none'"):
    inspection.positions(make_weights(posemb='none'))
  with pytest.raises(ValueError, match=r'positions cannot be shown'):
    inspection.positions(make_weights(MIXER, (8, 8, 3)))
  assert len(inspection.filters(make_weights(MIXER, (8, 8, 3)), 5)[0]) == 5


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


def test_command(npz, gallery, paths, tmp_path, capsys):
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
  saved = {n: np.load(tmp_path / 'out/new' / f'{n}.npz') for n in names}
  looks = list(inspection.look(make_weights(), paths))
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


@pytest.mark.slow
def test_another_size_as_pdf(npz, paths, tmp_path):
  status = call(
    *(f'--weights={npz}', f'--output={tmp_path}', '--image_size=16x12'),
    *('--figures=rollout,positions', '--format=pdf', '--style=heat', paths[0]),
  )
  assert not status
  assert (tmp_path / 'rollout.pdf').read_bytes().startswith(b'%PDF')
  assert np.load(tmp_path / 'rollout.npz')['rollout'].shape == (1, 4, 3)
  assert np.load(tmp_path / 'positions.npz')['similarity'].shape == (4, 3) * 2
  assert {p.stem for p in tmp_path.iterdir()} == {'rollout', 'positions'}


def test_without_pictures(npz, paths, tmp_path, capsys):
  assert not call(f'--weights={npz}', f'--output={tmp_path}')
  assert sorted(p.name for p in tmp_path.glob('*.png')) == [
    'filters.png',
    'positions.png',
  ]
  assert 'Left out:\n  maps: there are no pictures' in capsys.readouterr().err
  status = call(f'--weights={npz}', f'--output={tmp_path}', '--figures=maps')
  assert 'maps: there are no pictures: name images' in status
  status = call(
    *(f'--weights={npz}', f'--output={tmp_path / "filters.png"}', paths[0])
  )
  assert 'filters.png cannot be made a folder' in status


def test_a_mixer_has_filters_alone(paths, tmp_path, capsys):
  path = str(tmp_path / 'mixer.npz')
  formats.write(make_weights(MIXER, (8, 8, 3)), path, 'npz')
  assert not call(f'--weights={path}', f'--output={tmp_path}/out', paths[0])
  told = capsys.readouterr()
  assert told.out.split() == [f'{tmp_path}/out/filters.png']
  assert 'rollout: the model has no attention' in told.err
  status = call(f'--weights={path}', '--output=o', '--figures=maps', paths[0])
  assert 'cannot be drawn:\n  maps: the model has no attention' in status


@pytest.mark.slow
def test_unreadable_pictures(npz, paths, tmp_path, capsys):
  (tmp_path / 'bad.png').write_bytes(b'no picture')
  command = [
    f'--weights={npz}',
    f'--output={tmp_path}/out',
    '--figures=distance',
  ]
  command += [tmp_path / 'bad.png', *paths]
  assert 'bad.png: cannot decode' in call(*command)
  assert call(*command, '--on_error=skip') == 1
  assert '1 of 4 skipped' in capsys.readouterr().err
  assert len(np.load(tmp_path / 'out/distance.npz')['paths']) == 3
  status = call(*command[:3], tmp_path / 'bad.png', '--on_error=skip')
  assert 'No picture could be read' in status


@pytest.mark.parametrize(
  'argument, message',
  [
    ('--figures=maps,frames', "'frames' is none of maps, rollout, distance"),
    ('--query=3', "'3'; expected ROW,COLUMN"),
    ('--num_maps=0', "'0' is no whole number"),
  ],
)
def test_arguments(argument, message, capsys):
  assert call('--weights=w', '--output=o', argument) == 2
  assert message in capsys.readouterr().err


def test_names_of_figures():
  paths = ['a/x.png', 'b/x.jpg', 'x-2.png', 'c/x.png', 'y.z.png']
  names = inspect_figures._names(paths)
  assert names == ['x', 'x-2', 'x-2-2', 'x-3', 'y.z']


@pytest.mark.slow
def test_photographs(tmp_path):
  """Real ones, larger than the model's images, shown finer than it sees."""
  from sklearn.datasets import load_sample_images

  found = load_sample_images()
  for name, image in zip(('china', 'flower'), found.images):
    Image.fromarray(image).save(tmp_path / f'{name}.png')
  weights = make_weights()
  looks = list(
    inspection.look(weights, [str(p) for p in sorted(tmp_path.iterdir())])
  )
  figures = inspect_figures.Figures(weights, tmp_path / 'out')
  figures.rollout(looks)
  (picture, _) = figures._pictures(looks, 200)
  assert picture.shape == (200, 300, 3)
  ours = np.asarray(
    Image.fromarray(found.images[0]).resize((300, 200)), np.float32
  )
  assert np.abs(ours - picture).mean() < 8
  with Image.open(tmp_path / 'out/rollout.png') as image:
    assert image.width > 600
