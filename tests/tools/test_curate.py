"""tools.curate on digits; their features are their pixels."""

import csv
import functools
import itertools
import json
import os
import re

import in_process
import numpy as np
import packed
import pytest
import tiny
from sklearn.datasets import load_digits

from vit_jax.data.sources.named import open_source
from vit_jax.data.targets import Labels, Numbers
from vit_jax.evals import curation, doubts
from vit_jax.evals.knn import nearest, neighbours
from vit_jax.tools import curate, features, predict

call = functools.partial(in_process.call, curate)
COUNT = 400
DIGITS = load_digits()
X, Y = DIGITS.data[:COUNT].astype(np.float32), DIGITS.target[:COUNT]
ODD = 'a "b", <script>\udcff.png'  # with a byte that is not UTF-8
WRONG = np.random.default_rng(0).permutation(COUNT)[:20]
LABELS = Y.copy()
LABELS[WRONG] = (Y[WRONG] + 3) % 10


def test_wrong_labels_are_the_least_likely():
  x, y = np.concatenate([X, X[:2]]), [*LABELS, np.nan, 77]  # missing, alone
  own, best = doubts.classes(x, np.array(y, float), *nearest(x, 10))
  assert np.isnan(own[COUNT:]).all() and not np.isnan(own[:COUNT]).any()
  assert len({*np.argsort(own[:COUNT])[:20]} & {*WRONG}) >= 18
  assert np.mean(best[WRONG] == Y[WRONG]) > 0.8
  own, _ = doubts.classes(x[:9], np.zeros(9), *nearest(x[:9], 10))
  assert np.isnan(own).all()  # one class


def test_numbers_are_estimated_by_other_images():
  ink = X.sum(axis=1)
  found = doubts.numbers(X, np.where(np.arange(COUNT) == 7, np.nan, ink))
  assert np.isnan(found[7]) and np.isnan(doubts.numbers(X[:9], ink[:9])).all()
  rest = np.delete(np.arange(COUNT), 7)
  np.testing.assert_allclose(found[rest], ink[rest], rtol=0.02)


def test_several_copies_of_an_image_are_found():
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 240, (30, curation.SIDE, curation.SIDE), np.uint8)
  pixels[1:4] = pixels[0, ::-1], np.rot90(pixels[0]), pixels[0] // 2
  pixels[1:4] += rng.integers(0, 16, pixels[1:4].shape, np.uint8)
  x = rng.normal(size=(30, 8)).astype(np.float32)
  x[1:4] = x[0] + 0.01 * x[1:4]
  found = curation.copies(nearest(x, 10)[1], pixels, 0.2)
  assert {x[:2] for x in found} == {*itertools.combinations(range(4), 2)}


def test_images_to_label_cover_the_set():
  def radius(rows):
    return 1 - neighbours(X[rows], X, 1)[0].min()

  rng = np.random.default_rng(0)
  found = radius(curation.cover(X, 20, []))
  assert found < min(radius(rng.permutation(COUNT)[:20]) for _ in range(20))
  known = np.flatnonzero(Y != 4)
  assert (Y[curation.cover(X, 5, known)] == 4).all()
  assert sorted(curation.cover(X[:9], 99, [0, 1])) == [*range(2, 9)]


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
  """Folder of digits in two splits, with two copies, and x.npz of all."""
  drawn = np.kron(DIGITS.images[:COUNT] * 15, np.ones((7, 7))).astype(np.uint8)
  drawn = np.pad(drawn, ((0, 0), (2, 5), (3, 1)))
  split = ['train', 'train', 'train', 'test']
  names = [f'{split[i % 4]}/{LABELS[i]}/{i:03}.png' for i in range(COUNT)]
  images = dict(zip(names, drawn))
  images |= {f'test/0/{ODD}': drawn[0, :, ::-1], 'train/0/c.png': drawn[1]}
  files = {k: tiny.encode(np.stack([v] * 3, -1)) for k, v in images.items()}
  broken = {'train/0/broken.png': b'no image'}
  root = packed.write_folder(tmp_path_factory.mktemp('digits'), files | broken)
  paths = [f'{root}/{name}' for name in images]
  np.savez(root / 'x.npz', paths=paths, features=[*X, X[0], X[1]])
  return root


def table(path):
  with open(path, errors='surrogateescape') as file:
    return [*csv.DictReader(file)]


def test_copies_labels_and_what_is_left(digits, tmp_path, capsys):
  splits = f'train={digits}/train', f'test={digits}/test'
  common = f'--features={digits}/x.npz', '--copies=0.05', *splits
  assert call(*common, f'--output={tmp_path}/all') is None
  assert 'without features (1): ' in capsys.readouterr().out
  copies = table(tmp_path / 'all/copies.csv')
  found = {(x['path'], x['copy_of']): x for x in copies}
  first, second = (f'{digits}/train/{LABELS[i]}/{i:03}.png' for i in (0, 1))
  odd = f'{digits}/test/0/{ODD}'.replace('\udcff', r'\udcff')
  # The image of the test stays, and else the first one.
  assert found.keys() == {(first, odd), (second, f'{digits}/train/0/c.png')}
  assert found[first, odd]['label_of'] == 'test: 0'
  named = [x['path'][-7:-4] for x in table(tmp_path / 'all/labels.csv')]
  assert len({f'{i:03}' for i in WRONG} & {*named[:20]}) >= 18
  page = (tmp_path / 'all/index.html').read_text()
  assert 'across splits' in page and '<script>\\' not in page
  (data,) = re.findall(r'id="pictures">(.*?)</script>', page, re.S)
  pictures = json.loads(data)
  assert len(pictures) == COUNT + 2 and len(pictures['0']['near']) == 10
  # What the page saves, and tables of the tool, are left out of a training.
  cell = odd.replace('"', '""')
  (tmp_path / 'leave_out.csv').write_text(f'path\n"{cell}"\n')
  out = (f'--leave_out={tmp_path}/{x}.csv' for x in ('leave_out', 'all/copies'))
  assert call(*common, *out, f'--output={tmp_path}/rest') is None
  train, test = (
    open_source(csv=tmp_path / f'rest/{x}.csv') for x in ('train', 'test')
  )
  assert (len(train), len(test)) == (299, 100)
  assert train.class_names == list('0123456789')
  kept = open_source(csv=tmp_path / 'all/test.csv')
  assert odd.replace(r'\udcff', '\udcff') in {
    os.path.abspath(kept.describe(i)) for i in range(len(kept))
  }


@pytest.mark.parametrize('option', ['labels=round', 'number=ink'])
def test_other_labels_are_judged_by_column(digits, tmp_path, option):
  is_round, ink = np.isin(Y, (0, 6, 8, 9)).astype(int), X.sum(axis=1)
  is_round[WRONG], ink[WRONG] = 1 - is_round[WRONG], 3 * ink[WRONG]
  with np.load(digits / 'x.npz') as file:
    paths, x = file['paths'][:COUNT], file['features'][:COUNT]
  lines = (f'{a},{b},{c}\n' for a, b, c in zip(paths, is_round, ink))
  (digits / 't.csv').write_text('path,round,ink\n' + ''.join(lines))
  words = f'--csv={digits}/t.csv', f'--{option}', digits, f'--output={tmp_path}'
  # Features of what is not in the table are refused.
  assert 'has the images (402)' in call(f'--features={digits}/x.npz', *words)
  np.savez(tmp_path / 'x.npz', paths=paths, features=x)
  assert call(f'--features={tmp_path}/x.npz', *words) is None
  found = table(tmp_path / 'labels.csv')
  assert len({*paths[WRONG]} & {x['path'] for x in found[:20]}) >= 17
  column = option.partition('=')[2]
  assert {x['column'] for x in found} == {column}
  kind = Labels if column == 'round' else Numbers
  rest = open_source(csv=tmp_path / 'train.csv', targets=kind([column]))
  assert rest.labels().shape == (COUNT, 1) and rest.class_names == [column]


def test_a_killed_pass_over_images_resumes(
  file, gallery, tmp_path, monkeypatch
):
  """Images without labels, of which there are fewer than neighbours."""
  real = predict.predict

  def killed(*args, **options):
    yield from itertools.islice(real(*args, **options), 4)
    raise KeyboardInterrupt

  words = f'--weights={file}', '--unlabelled', gallery, f'--output={tmp_path}'
  words += ('--batch_size=2',)
  with monkeypatch.context() as patch:
    patch.setattr(predict, 'predict', killed)
    assert call(*words) == 130
  assert call(*words, '--neighbours=20') is None
  path, whole = tmp_path / 'features.npz', tmp_path / 'whole.parquet'
  assert in_process.call(predict, *words[:3:2], f'--features={whole}') == 0
  (names, one), (others, two) = map(features.read, (path, whole))
  assert names == others and np.array_equal(one, two)
  assert f'{path} exists' in call(*words)
  assert 'no labels' in (tmp_path / 'index.html').read_text()
  assert (tmp_path / 'train.csv').read_text().startswith('path\n/')
  assert call(*words[1:], f'--features={whole}') is None
  out = tmp_path / 'out.csv'
  for text, said in ('name\n', "no column 'path'"), ('path\nx\n', 'no image'):
    out.write_text(text)
    assert said in call(*words, f'--leave_out={out}')
