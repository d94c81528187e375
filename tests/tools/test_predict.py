"""Predictions are those of the model on each image by itself."""

import csv
import dataclasses
import functools
import io
import itertools
import json
import logging
import os
import pathlib
import shutil

import in_process
import jax
import numpy as np
import packed
import pyarrow.parquet
import pytest
import scipy.special
from jax.experimental.compilation_cache import compilation_cache

from vit_jax.data import targets
from vit_jax.data.transforms import CentralCrop, ResizeSmall
from vit_jax.tools import predict as tool
from vit_jax.tools.predict import predict
from vit_jax.weights import formats


def probabilities(layers):
  return scipy.special.softmax(layers['logits'])


def test_equals_the_model_on_each_image(weights, paths, expected, caplog):
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    results = list(predict(weights, paths, batch_size=1))  # 8 devices: 8 + 3
  for step in ('tracing', 'XLA compilation'):
    started = [r for r in caplog.messages if r.startswith(f'Finished {step}')]
    assert len([r for r in started if 'forward' in r]) == 1
  assert [r['path'] for r in results] == paths
  for result in results:
    wanted = probabilities(expected[result['path']])
    assert result['probabilities'].dtype == np.float32
    np.testing.assert_allclose(result['probabilities'], wanted, atol=1e-6)
    assert result.keys() == {'path', 'probabilities'}


@pytest.mark.parametrize('layer', ['pre_logits', 'block_0'])
def test_features_and_activations(weights, paths, expected, layer):
  weights = dataclasses.replace(weights, activation='sigmoid')
  (result,) = predict(weights, paths[:1], layer=layer)
  layers = expected[paths[0]]
  np.testing.assert_allclose(result['features'], layers[layer], atol=2e-5)
  wanted = 1 / (1 + np.exp(-layers['logits']))
  np.testing.assert_allclose(result['probabilities'], wanted, atol=1e-6)


def test_unreadable_images(weights, paths, expected, bad):
  mixed = [*paths[:9], bad, *paths[9:]]
  results = list(predict(weights, mixed, batch_size=8))
  assert [r['path'] for r in results] == mixed
  assert results[9].keys() == {'path', 'error'}
  wanted = probabilities(expected[mixed[10]])
  np.testing.assert_allclose(results[10]['probabilities'], wanted, atol=1e-6)


def test_errors(model, make_weights, weights, paths):
  headless = make_weights(model.clone(num_classes=None))
  with pytest.raises(ValueError, match=r'no head.*--features'):
    predict(headless, ['none.png'])
  for layer, known in (('block_7', 'block_0'), ('map_2', 'tokens')):
    with pytest.raises(ValueError, match=f"'{layer}'; there are .*{known}"):
      predict(weights, ['none.png'], layer=layer)
  other = dataclasses.replace(weights, transforms=weights.transforms[:1])
  with pytest.raises(ValueError, match=r'00\.png.*\(40, 50, 3\).*\(32, 48, 3'):
    list(predict(other, paths))


def test_images_have_the_channels_of_the_model(make_weights, model, paths):
  transforms = ResizeSmall(40), CentralCrop((32, 48))
  grey = make_weights(model, (32, 48, 1), transforms=transforms)
  (result,) = predict(grey, paths[:1])
  assert result['probabilities'].shape == (6,)


def test_top():
  rng = np.random.default_rng(0)
  for count, k in [(1000, 5), (7, 7), (3, 9), (1, 1)]:
    p = rng.permutation(count).astype(np.float32)
    assert tool.top(p, k) == list(np.argsort(-p)[:k])
  assert tool.top(np.ones(4), 4) == [0, 1, 2, 3]


call = functools.partial(in_process.call, tool)


def test_output(file, expected, gallery, paths, capsys, weights):
  command = [f'--weights={file}', '--top_k=3', gallery]
  assert call(*command) == 0
  rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
  for i, path in enumerate(paths):
    p = probabilities(expected[path])
    for rank, id_ in enumerate(np.argsort(-p)[:3]):
      row = rows[3 * i + rank]
      assert (row['path'], row['rank']) == (path, str(rank + 1))
      assert row['class_id'] == str(id_)
      assert row['class_name'] == weights.class_names[id_]
      assert float(row['probability']) == pytest.approx(p[id_], abs=2e-6)


CLASSES = 'path,rank,class_id,class_name,probability'


KINDS = {
  targets.Classes(): (f'{CLASSES}\na[b].png,1,1,[red],0.75', {'[red]': 0.75}),
  targets.Labels(): (
    'path,x,[red],labels\na[b].png,0.25,0.75,[red]',
    {'[red]': 0.75},
  ),
  targets.Numbers(): (
    'path,x,[red]\na[b].png,0.25,0.75',
    'x 0.25, [red] 0.75',
  ),
}


@pytest.mark.parametrize('kind', KINDS)
def test_kinds(weights, capsys, monkeypatch, kind):
  (table, shown), p = KINDS[kind], np.float32([0.25, 0.75])
  names = ['x', '[red]']
  weights = dataclasses.replace(weights, class_names=names, targets=kind)
  results = [{'path': 'a[b].png', kind.outputs: p}]
  tool.show(tool.rows(weights, results, 1, 0.5))
  assert capsys.readouterr().out == f'{table}\n'
  monkeypatch.setattr('sys.stdout.isatty', lambda: True)
  monkeypatch.setenv('TERM', 'dumb')  # without colors
  tool.show(tool.rows(weights, results, 1, 0.5))
  found = capsys.readouterr().out.split()
  assert found == table.replace(',', ' ').split()
  assert kind.shown(p, names, 1) == shown


def test_labels_have_the_thresholds_of_their_checkpoint(tmp_path):
  records = [
    {'step': step, 'time': 0.0, 'val/threshold/a/b': 0.1 * step, 'val/f1': 1.0}
    for step in (1, 2)
  ]
  lines = ''.join(json.dumps(x) + '\n' for x in records)
  (tmp_path / 'metrics.jsonl').write_text(lines)
  found = formats._thresholds(tmp_path / 'checkpoints/2')
  assert found == {'a/b': 0.2}
  p, names = np.float32([0.3, 0.4, 0.5]), ['a/b', 'c', 'd']
  for threshold, named in (found, 'a/b|d'), (0.35, 'c|d'), ({}, 'd'):
    (row,) = targets.Labels().rows(p, names, 1, threshold)
    assert row['labels'] == named


def test_features_file(
  file, expected, gallery, paths, tmp_path, capsys, bad, monkeypatch
):
  features = tmp_path / 'f.npz'
  command = [f'--weights={file}', gallery, f'--features={features}']
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  jax.config.update('jax_compilation_cache_dir', None)  # the default
  assert call(*command) == 0
  assert (tmp_path / 'vit_jax/xla').is_dir()
  compilation_cache.reset_cache()
  assert capsys.readouterr().out == ''
  with np.load(features) as found:
    assert sorted(found) == ['features', 'paths']
    assert found['paths'].tolist() == paths
    wanted = expected[paths[4]]['pre_logits']
    np.testing.assert_allclose(found['features'][4], wanted, atol=2e-5)
  command += [bad, '--layer=tokens']
  assert call(*command) == 1
  assert '1 of 12 skipped:\n' in capsys.readouterr().err
  with np.load(features) as found:
    assert found['features'].shape == (11, 7, 32)


@pytest.mark.parametrize('target', ['missing/f.npz', 'folder.npz', 'f.txt'])
def test_targets_are_checked_first(
  file, paths, tmp_path, capsys, monkeypatch, target
):
  monkeypatch.setattr(tool, 'predict', None)
  (tmp_path / 'folder.npz').mkdir()
  status = call(f'--weights={file}', f'--features={tmp_path}/{target}', *paths)
  reason = {'missing/f.npz': 'No such file'}.get(target, 'no .npz or .parquet')
  said = f'{status} {capsys.readouterr().err}'
  assert target in said and reason in said
  assert os.listdir(tmp_path) == ['folder.npz']


@pytest.mark.parametrize('ending', ['npz', 'parquet'])
def test_a_killed_command_resumes(
  file, paths, bad, tmp_path, monkeypatch, capsys, ending
):
  def features(name, *images):
    options = f'--features={tmp_path}/{name}.{ending}', '--batch_size=4'
    return call(f'--weights={file}', *options, *images)

  def killed(weights, images, **options):
    counts.append(len(images))
    yield from itertools.islice(predict(weights, images, **options), 6)
    raise KeyboardInterrupt

  counts, images = [], [*paths, bad]  # in parts of 4
  with monkeypatch.context() as patch:
    patch.setattr(tool, 'predict', killed)
    assert {features('killed', *images) for _ in range(3)} == {130}
  assert counts == [12, 8, 4] and not (tmp_path / f'killed.{ending}').exists()
  others = {'images': paths, 'layer': ['--layer=tokens', *images]}
  others['weights'] = ['--image_size=64x96', *images]
  for what, words in others.items():
    said = features('killed', *words)
    assert f'has 12 images of a stopped command with other {what}. ' in said
  assert features('killed', *images) == features('whole', *images) == 1
  said = capsys.readouterr().err
  assert 'has 12 images, resuming' in said and said.count('1 of 12 skip') == 2
  assert not [*tmp_path.glob('*.parts')]
  files = [tmp_path / f'{x}.{ending}' for x in ('killed', 'whole')]
  if ending == 'npz':
    one, two = ({**np.load(x)} for x in files)
  else:
    one, two = (pyarrow.parquet.read_table(x).to_pydict() for x in files)
  assert one.keys() == two.keys()
  for name, values in one.items():
    np.testing.assert_array_equal(values, two[name])


@pytest.mark.parametrize('kind', ['csv', 'list', 'parquet', 'tar'])
def test_sources(file, paths, tmp_path, monkeypatch, capsys, kind):
  """The predictions are those of the files; nothing else is on stdout."""
  datasets = pytest.importorskip('datasets')
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path))
  assert call(f'--weights={file}', *paths[:3]) == 0
  wanted = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
  path, files = tmp_path / f'my.{kind}', [pathlib.Path(x) for x in paths[:3]]
  files = {x.name: x.read_bytes() for x in files}
  if kind == 'parquet':
    images = [{'bytes': data, 'path': name} for name, data in files.items()]
    pyarrow.parquet.write_table(pyarrow.table({'image': images}), path)
  elif kind == 'tar':
    path.write_bytes(packed.tar_bytes(files))
  else:  # a row is repeated
    rows = ['path,split', *(f'{x},test' for x in [*paths[:3], paths[0]])]
    path.write_text('\n'.join(rows if kind == 'csv' else paths[:3]))
  word = f'--csv={path}' if kind in ('csv', 'list') else path
  assert call(f'--weights={file}', word) == 0
  found = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
  for row, like in zip(found, wanted, strict=True):
    name = f'({pathlib.Path(like["path"]).name})'
    assert row['path'] == like['path'] or name in row['path']
    assert row | {'path': ''} == like | {'path': ''}


def test_limits_of_images(file, paths, capsys):
  limit = '--max_image_bytes=6000'  # of 40 x 50 pixels
  assert call(f'--weights={file}', limit, *paths[:2]) == 1
  said = capsys.readouterr()
  assert said.out.count(paths[0]) == 5 and paths[1] not in said.out
  assert 'Set max_image_bytes=6120 to decode it.' in said.err
  for words in [], ['--csv=x.csv', 'a', 'b']:
    assert 'csv' in call(f'--weights={file}', *words)


def test_names_that_are_not_utf8(file, paths, tmp_path):
  image = os.fsdecode(os.fsencode(tmp_path) + b'/\xff.png')
  shutil.copy(paths[0], image)
  for ending in ('npz', 'parquet'):
    target = f'--features={tmp_path}/f.{ending}'
    assert call(f'--weights={file}', target, image) == 0
  assert np.load(tmp_path / 'f.npz')['paths'].tolist() == [image]
  found = pyarrow.parquet.read_table(tmp_path / 'f.parquet')
  assert found['path'].to_pylist() == [f'{tmp_path}/\\udcff.png']


@pytest.mark.parametrize(
  'layer, tokens', [('map_0', 'block_0'), ('map_-1', 'tokens')]
)
def test_maps_are_patch_tokens(file, paths, expected, tmp_path, layer, tokens):
  table = tmp_path / 'f.parquet'
  flags = f'--weights={file}', f'--features={table}', f'--layer={layer}'
  assert call(*flags, *paths[:2]) == 0
  found = pyarrow.parquet.read_table(table).to_pydict()
  assert found['path'] == paths[:2]
  for path, features in zip(paths, found['features']):
    wanted = expected[path][tokens][1:].reshape(2, 3, 32)
    np.testing.assert_allclose(features, wanted, atol=2e-5)


def test_options_reach_predict(file, paths, monkeypatch):
  given = {}

  def record(weights, paths, *options, **named):
    given.update(named, options=options)
    return iter([])

  monkeypatch.setattr(tool, 'predict', record)
  monkeypatch.setattr(tool, 'rows', record)
  command = [f'--weights={file}', paths[0], '--batch_size=3']
  for flags, rest in ((), (5, {})), (('--top_k=2', '--threshold=0'), (2, 0)):
    assert call(*command, *flags) == 0
    assert given['batch_size'] == 3 and given['options'] == rest
