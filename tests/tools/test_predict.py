"""Predictions are those of the model on each picture by itself."""

import csv
import fcntl
import io
import json
import logging
import os
import pathlib
import select
import shutil
import struct
import sys
import termios

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from rich.cells import cell_len

sys.path.append(str(pathlib.Path(__file__).parents[1] / 'weights'))
from small import random_weights

from vit_jax import config, pretrained, tree
from vit_jax.data.transforms import CentralCrop, FlipLR, ResizeSmall
from vit_jax.models.vit import VisionTransformer
from vit_jax.preprocess import Normalize
from vit_jax.runs import terminal
from vit_jax.runs.checkpoint import Checkpointer
from vit_jax.step import TrainState
from vit_jax.tools import convert, outputs
from vit_jax.tools.predict import main, predict
from vit_jax.weights import bundle, export, formats

FIELDS = {'width': 16, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2}
FIELDS |= {'patch_size': 4, 'num_classes': 6}
SHAPE = (8, 12, 3)
NAMES = ['cat', 'dog', 'owl', 'ant', 'bee', 'a, b']
TRANSFORMS = ResizeSmall(14), CentralCrop((8, 12))
NORMALIZE = Normalize(mean=90.0)


def make_weights(**fields):
  return random_weights(
    bundle.from_fields(VisionTransformer, **FIELDS | fields),
    SHAPE,
    preprocess=NORMALIZE,
    transforms=TRANSFORMS,
    class_names=NAMES,
  )


@pytest.fixture(scope='module')
def weights():
  return make_weights()


@pytest.fixture(scope='module')
def gallery(tmp_path_factory):
  folder = tmp_path_factory.mktemp('gallery')
  rng = np.random.default_rng(1)
  for i in range(11):  # the smaller side is 14 already: nothing is resized
    pixels = rng.integers(0, 256, (14, 16 + i, 3), np.uint8)
    Image.fromarray(pixels).save(folder / f'{i:02}.png')
  return folder


@pytest.fixture(scope='module')
def paths(gallery):
  return [str(p) for p in sorted(gallery.iterdir())]


def crop(path):
  pixels = np.asarray(Image.open(path))
  left = (pixels.shape[1] - 12) // 2
  return pixels[3:11, left : left + 12]


@pytest.fixture(scope='module')
def expected(weights, paths):
  """{path: {layer: output of the model for this image}}."""
  model = weights.model
  params = {'params': tree.unflatten(weights.params)}
  features = jax.jit(lambda x: model.apply(params, x, method='features'))
  out = {}
  for path in paths:
    layers = features((crop(path)[None].astype(np.float32) - 90) / 127.5)
    out[path] = {name: np.asarray(x[0]) for name, x in layers.items()}
  return out


def softmax(logits):
  e = np.exp(logits - logits.max())
  return e / e.sum()


def test_equals_the_model_on_each_image(weights, paths, expected, caplog):
  """Also: one program for full and partial batches."""
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    results = list(predict(weights, paths, batch_size=1))  # 8 devices: 8 + 3
  compiled = [r for r in caplog.messages if r.startswith('Finished XLA')]
  assert len([r for r in compiled if 'forward' in r]) == 1
  assert [r['path'] for r in results] == paths
  for result in results:
    wanted = softmax(expected[result['path']]['logits'])
    assert result['probabilities'].dtype == np.float32
    np.testing.assert_allclose(result['probabilities'], wanted, atol=1e-6)
    assert result.keys() == {'path', 'probabilities'}


@pytest.mark.parametrize('layer', ['pre_logits', 'block_0'])
def test_features(weights, paths, expected, layer):
  results = list(predict(weights, paths[:3], layer=layer, batch_size=2))
  for result in results:
    wanted = expected[result['path']][layer]
    np.testing.assert_allclose(result['features'], wanted, atol=2e-5)
    assert 'probabilities' in result


def test_activation_is_that_of_the_weights(paths, expected):
  weights = make_weights()
  weights.activation = 'sigmoid'
  wanted = 1 / (1 + np.exp(-expected[paths[0]]['logits']))
  (found,) = predict(weights, paths[:1])
  np.testing.assert_allclose(found['probabilities'], wanted, atol=1e-6)


def test_unreadable_pictures(weights, paths, expected, tmp_path):
  (tmp_path / 'bad.png').write_bytes(b'no picture')
  mixed = [*paths[:9], str(tmp_path / 'bad.png'), *paths[9:]]
  with pytest.raises(ValueError, match=r'bad\.png: cannot decode.*skip'):
    list(predict(weights, mixed))
  results = list(predict(weights, mixed, on_error='skip', batch_size=8))
  assert [r['path'] for r in results] == mixed
  assert results[9].keys() == {'path', 'error'}
  wanted = softmax(expected[mixed[10]]['logits'])
  np.testing.assert_allclose(results[10]['probabilities'], wanted, atol=1e-6)


@pytest.mark.parametrize(
  'fields, arguments, message',
  [
    ({'num_classes': None}, {}, r'have no head.*--features'),
    ({'pooling': 'none'}, {}, r'logits for each patch.*--features'),
    ({}, {'layer': 'block_7'}, r"No layer 'block_7'; there are .*block_0"),
    ({}, {'activation': 'relu'}, r"'relu' must be one of 'softmax', 'sigmoid'"),
    ({}, {'on_error': 'ask'}, r"'ask' must be one of 'raise', 'skip'"),
    ({}, {'batch_size': 0}, r'batch_size=0'),
  ],
)
def test_errors_come_before_any_picture(fields, arguments, message):
  with pytest.raises(ValueError, match=message):
    predict(make_weights(**fields), ['none.png'], **arguments)


def test_features_alone_cannot_be_a_table():
  results = iter([{'path': 'x.png', 'features': np.zeros(3, np.float32)}])
  with pytest.raises(ValueError, match=r'Leave out --format'):
    outputs.write_csv(io.StringIO(), results, None, 1)


def test_transforms_that_lead_elsewhere(weights, paths):
  other = make_weights()
  other.transforms = TRANSFORMS[:1]
  with pytest.raises(ValueError, match=r'00\.png.*\(14, 16, 3\).*\(8, 12, 3'):
    list(predict(other, paths))


def test_top():
  rng = np.random.default_rng(0)
  for count, k in [(1000, 5), (7, 7), (3, 9), (1, 1)]:
    p = rng.permutation(count).astype(np.float32)
    assert list(outputs.top(p, k)) == list(np.argsort(-p)[:k])
  assert list(outputs.top(np.ones(4), 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
  'old, new, before, after',
  [
    ((224, 224), (384, 384), (256, 224), (439, (384, 384))),
    ((224, 224), (112, 448), (256, 224), (512, (112, 448))),
    ((8, 12), (8, 12), (9, (8, 12)), (9, (8, 12))),
    ((8, 12), (24, 12), (13, (8, 12)), (26, (24, 12))),
  ],
)
def test_transforms_of_another_size(old, new, before, after):
  transforms = ResizeSmall(before[0]), CentralCrop(before[1])
  small, crop = pretrained.scale(transforms, old, new)
  assert (small.size, crop.size) == after
  assert pretrained.scale([FlipLR()], old, new) == (FlipLR(),)


@pytest.fixture(scope='module')
def run(weights, tmp_path_factory):
  """A workdir as training leaves it; its average has another head."""
  workdir = tmp_path_factory.mktemp('run')
  params = tree.unflatten(tree.stack_blocks(weights.params))
  raw = params | {'head': jax.tree.map(np.zeros_like, params['head'])}
  state = TrainState(
    step=jnp.asarray(7),
    params=jax.tree.map(jnp.asarray, raw),
    opt_state=(),
    rng=jax.random.key(0),
    ema=jax.tree.map(jnp.asarray, params),
  )
  checkpointer = Checkpointer(workdir)
  checkpointer.save(7, state, {'position': 0})
  checkpointer.close()
  content = {
    'model': config.describe(bundle.replace(weights.model, scan=True)),
    'preprocess': config.describe(NORMALIZE),
    'image_shape': SHAPE,
    'transforms': config.describe(TRANSFORMS),
    'class_names': NAMES,
  }
  (workdir / 'model.json').write_text(json.dumps(content))
  return workdir


def call(*args):
  """Exit status of the command."""
  with pytest.raises(SystemExit) as exit:
    main([str(a) for a in args])
  return exit.value.code


def ranking(layers):
  p = softmax(layers['logits'])
  order = np.argsort(-p)
  return [(int(i), NAMES[i], p[i]) for i in order]


def test_csv_and_json(run, expected, gallery, paths, tmp_path, capsys):
  command = [f'--weights={run}', '--top_k=3', str(gallery)]
  assert call(*command, '--format=csv') == 0
  rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
  file = tmp_path / 'out.json'
  assert call(*command, '--format=json', f'--output={file}') == 0
  assert capsys.readouterr().out == ''
  items = json.loads(file.read_text())
  assert [item['path'] for item in items] == paths
  for i, path in enumerate(paths):
    for rank, (id_, name, p) in enumerate(ranking(expected[path])[:3]):
      row, item = rows[3 * i + rank], items[i]['predictions'][rank]
      assert row['path'] == path and row['rank'] == str(rank + 1)
      assert (row['class_id'], row['class_name']) == (str(id_), name)
      assert float(row['probability']) == pytest.approx(p, abs=2e-6)
      assert (item['class_id'], item['class_name']) == (id_, name)
      assert item['probability'] == pytest.approx(p, abs=2e-6)


@pytest.fixture
def terminal_of(monkeypatch):
  """Function: columns -> reader of what is printed on such a terminal."""
  ends = []

  def open_terminal(columns):
    ours, theirs = os.openpty()
    size = struct.pack('HHHH', 24, columns, 0, 0)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    stdout = os.fdopen(theirs, 'w', encoding='utf-8')
    ends.append((ours, stdout))
    monkeypatch.setattr(sys, 'stdout', stdout)
    monkeypatch.setattr(sys, '__stdout__', stdout)
    monkeypatch.delenv('COLUMNS', raising=False)

    def read():
      stdout.flush()
      found = b''
      while select.select([ours], [], [], 0.2)[0]:
        found += os.read(ours, 100_000)
      return found.decode().replace('\r\n', '\n')

    return read

  yield open_terminal
  for ours, stdout in ends:
    stdout.close()
    os.close(ours)


def test_a_table_on_a_terminal(run, expected, paths, terminal_of):
  """Columns are aligned, and lines fit."""
  read = terminal_of(60)
  assert call(f'--weights={run}', *paths[:2], '--top_k=9') == 0
  header, *lines = read().splitlines()
  assert header.split() == ['image', 'rank', 'class', 'probability']
  assert {len(line) for line in [header, *lines]} == {60}
  rows = [
    (f'{rank}', name, f'{p:.2%}', path if rank == 1 else '')
    for path in paths[:2]
    for rank, (_, name, p) in enumerate(ranking(expected[path]), 1)
  ]
  ends = [header.index(word) + len(word) for word in ('rank', 'probability')]
  start = header.index('class')
  for line, (rank, name, p, path) in zip(lines, rows, strict=True):
    assert line[: ends[0]].endswith(f' {rank}')
    assert line[start:].startswith(f'{name} ')
    assert line[: ends[1]].endswith(f' {p}')
    image = line[: ends[0] - 4].strip()
    assert path.endswith(image.removeprefix('…')) and bool(image) == bool(path)


def test_a_pipe_gets_csv(run, paths, tmp_path, capsys):
  assert call(f'--weights={run}', *paths[:2], '--top_k=2') == 0
  rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
  assert [row['path'] for row in rows] == [paths[0]] * 2 + [paths[1]] * 2
  for name, start in (('x.csv', 'path,rank'), ('x.json', '['), ('x', 'image')):
    file = tmp_path / name
    assert call(f'--weights={run}', paths[0], f'--output={file}') == 0
    assert file.read_text().startswith(start)
  given = f'--output={tmp_path / "x.csv"}', '--format=json'
  assert call(f'--weights={run}', paths[0], *given) == 0
  assert json.loads((tmp_path / 'x.csv').read_text())


def test_table_of_names_of_any_width(terminal_of):
  """Wide characters take two cells; names with line breaks stay in line."""
  names = ['猫', 'zebra', 'x' * 50]
  rows = [
    ('/a/ü, b.png', [0.25, 0.75, 0]),
    ('/a/犬\n.png', [0.9, 0.1, 0]),
    ('/a/' + 'c' * 40 + '.png', [0, 0, 1]),
  ]
  results = [{'path': path, 'probabilities': np.float32(p)} for path, p in rows]
  paths = [path for path, _ in rows]
  file = io.StringIO()
  outputs.write_table(file, iter(results), names, 1, paths)
  assert file.getvalue().splitlines() == [
    f'{"image":47}  rank  {"class":40}  probability',
    f'{"/a/ü, b.png":47}     1  {"zebra":40}       75.00%',
    f'{"/a/犬?.png":46}     1  {"猫":39}       90.00%',
    f'{paths[2]}     1  {"x" * 39}…      100.00%',
  ]
  read = terminal_of(50)
  outputs.write_table(sys.stdout, iter(results), names, 1, paths)
  lines = read().splitlines()
  assert {cell_len(line) for line in lines} == {50}
  assert lines[3].startswith('…') and 'ccc.png  ' in lines[3]
  file = io.StringIO()
  outputs.write_table(file, iter(results[:1]), None, 1)
  assert 'class 1' in file.getvalue()


def test_ema_and_names(run, paths, tmp_path, capsys):
  names = tmp_path / 'names.json'
  names.write_text(json.dumps([f'n{i}' for i in range(6)]))
  # The head of the raw parameters is zero.
  command = [f'--weights={run}', paths[0], '--ema=off', '--top_k=2']
  command.append('--activation=sigmoid')
  assert call(*command, f'--class_names={names}') == 0
  rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))[1:]
  assert rows == [
    [paths[0], '1', '0', 'n0', '0.5'],
    [paths[0], '2', '1', 'n1', '0.5'],
  ]
  names.write_text('["a"]')
  assert 'has 1 names; the model has 6' in call(
    *command, f'--class_names={names}'
  )


def test_features_file(run, expected, gallery, paths, tmp_path, capsys):
  file, table = tmp_path / 'f.npz', tmp_path / 'table.csv'
  (tmp_path / 'bad.png').write_bytes(b'no picture')
  command = [f'--weights={run}', gallery, f'--features={file}']
  assert call(*command) == 0
  assert capsys.readouterr().out == ''
  with np.load(file) as found:
    assert sorted(found) == ['features', 'paths']
    assert found['paths'].tolist() == paths
    assert found['features'].shape == (11, 16)
    wanted = expected[paths[4]]['pre_logits']
    np.testing.assert_allclose(found['features'][4], wanted, atol=2e-5)
  command += [tmp_path / 'bad.png', '--format=csv', f'--output={table}']
  assert 'bad.png' in call(*command)
  assert not table.exists()  # nothing half-written
  assert call(*command, '--on_error=skip', '--layer=tokens') == 1
  assert '1 of 12 skipped:\n' in capsys.readouterr().err
  with np.load(file) as found:
    assert found['features'].shape == (11, 7, 16)
  assert len(table.read_text().splitlines()) == 1 + 11 * 5
  assert sorted(p.name for p in tmp_path.iterdir()) == (
    ['bad.png', 'f.npz', 'table.csv']
  )


@pytest.fixture(scope='module')
def exported(weights, tmp_path_factory):
  """Files that convert wrote: any batch, and 3 images after preprocessing."""
  folder = tmp_path_factory.mktemp('exported')
  options = {'images': 'float', 'batch_size': 3, 'platforms': ['cpu']}
  convert.save(weights, folder / 'any.stablehlo', 'stablehlo')
  convert.save(weights, folder / 'three.stablehlo', 'stablehlo', **options)
  return folder


@pytest.mark.parametrize('name', ['any', 'three'])
def test_stablehlo(exported, name, paths, expected, tmp_path, capsys):
  """On 8 devices, with batches that the fixed size does not divide."""
  file, features = f'{exported}/{name}.stablehlo', tmp_path / 'x.npz'
  assert call(f'--weights={file}', *paths, '--top_k=2') == 0
  rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
  for i, path in enumerate(paths):
    for row, (id_, name, p) in zip(rows[2 * i :], ranking(expected[path])[:2]):
      assert (row['path'], row['class_id']) == (path, str(id_))
      assert row['class_name'] == name
      assert float(row['probability']) == pytest.approx(p, abs=2e-6)
  command = f'--weights={file}', paths[0], f'--features={features}'
  assert "No layer 'pre_logits'; there are logits" in call(*command)
  assert call(*command, '--layer=logits') == 0
  with np.load(features) as found:
    wanted = expected[paths[0]]['logits']
    np.testing.assert_allclose(found['features'][0], wanted, atol=2e-5)


def test_stablehlo_without_a_head(paths, expected, tmp_path):
  """The activation, and what the function returns, come from the file."""
  headless = make_weights(num_classes=None)
  file = tmp_path / 'x.stablehlo'
  convert.save(headless, file, 'stablehlo', platforms=['cpu'])
  assert 'have no head' in call(f'--weights={file}', paths[0])
  features = tmp_path / 'x.npz'
  assert call(f'--weights={file}', paths[0], f'--features={features}') == 0
  assert np.load(features)['features'].shape == (1, 16)
  headed = make_weights()
  headed.activation = 'sigmoid'
  convert.save(headed, file, 'stablehlo', platforms=['cpu'], force=True)
  assert export.load(file).activation == 'sigmoid'
  assert export.load(file).class_names == NAMES


def test_stablehlo_that_cannot_be_used(exported, weights, paths, tmp_path):
  any_size = exported / 'any.stablehlo'

  def said(file, *flags):
    return call(f'--weights={file}', paths[0], *flags)

  flags = '--image_size=4', '--ema=off', '--set', 'gelu=exact'
  assert 'Leave out --image_size, --set, --ema' in said(any_size, *flags)
  tpu = tmp_path / 'tpu.stablehlo'
  convert.save(weights, tpu, 'stablehlo', platforms=['tpu'])
  assert 'exported for tpu, and this machine has cpu' in said(tpu)
  assert '--platforms=tpu,cpu' in said(tpu)
  alone = tmp_path / 'alone.stablehlo'
  shutil.copy(any_size, alone)
  assert 'alone.stablehlo.json is missing' in said(alone)
  shutil.copy(exported / 'three.stablehlo.json', f'{alone}.json')
  assert 'alone.stablehlo.json does not describe' in said(alone)
  shutil.copy(f'{any_size}.json', f'{alone}.json')
  alone.write_bytes(any_size.read_bytes()[:1000])
  assert 'cannot be read as a function of jax.export' in said(alone)
  assert 'gone.stablehlo does not exist' in said(tmp_path / 'gone.stablehlo')
  with pytest.raises(ValueError, match='without parameters to read'):
    formats.read(any_size)


def test_image_size(run, gallery, capsys):
  """Resizing and cropping double, so the same part of a picture is seen."""
  command = [f'--weights={run}', gallery, '--top_k=1', '--format=csv']
  assert call(*command, '--image_size=16x24') == 0
  captured = capsys.readouterr()
  assert 'pos_embedding 1x2x3x16 resized to 1x4x6x16' in captured.err
  assert len(captured.out.splitlines()) == 12
  assert 'cannot be cut into patches' in call(*command, '--image_size=10')


@pytest.mark.parametrize(
  'arguments, status',
  [
    (['--top_k=0', 'x.png'], 2),
    (['--image_size=4xx', 'x.png'], 2),
    (['--format=xml', 'x.png'], 2),
    (['gone.png'], r'gone.png does not exist'),
    (['--features=/none/f.npz', 'x.png'], '/none/f.npz cannot be written'),
    (['--set', 'gelu', 'x.png'], 'expected FIELD=VALUE'),
  ],
)
def test_arguments(run, tmp_path, monkeypatch, arguments, status):
  monkeypatch.chdir(tmp_path)
  Image.new('RGB', (20, 20)).save('x.png')
  found = call(f'--weights={run}', *arguments)
  assert found == status or str(status) in str(found)


def test_progress_of_a_long_job_in_a_log(capsys):
  items = terminal.track(range(4), 4, unit='pictures', every_s=0)
  assert list(items) == [0, 1, 2, 3]
  lines = capsys.readouterr().err.splitlines()
  assert lines[-1].startswith('4/4 pictures | ')
  assert lines[-1].endswith('/s | eta 0:00:00')
  list(terminal.track(range(4), 4, unit='pictures'))
  assert capsys.readouterr().err == ''


def test_an_error_is_one_message(run, paths, tmp_path, capsys):
  """Nothing but results is on stdout, also before an error."""
  bad = tmp_path / 'bad.png'
  bad.write_bytes(b'no picture')
  command = [f'--weights={run}', '--batch_size=1', '--format=csv']
  message = call(*command, *paths[:2], bad)
  assert message.startswith(f'\nValueError: {bad}: cannot decode')
  out = capsys.readouterr().out
  assert out.startswith('path,rank,class_id,class_name,probability\n')
