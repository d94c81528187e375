"""Curves of several runs: what is averaged, and that a picture comes out."""

import numpy as np
import PIL.Image
from etils import epath

from vit_jax.reports import curves
from vit_jax.reports.results import Results

RECORDS = {
  'run_seed0': [
    {'step': 10, 'train/loss': 3.0, 'val/loss': 4.0},
    {'step': 20, 'train/loss': 1.0},
  ],
  'run_seed1': [
    {'step': 10, 'train/loss': 5.0},
    {'step': 20, 'train/loss': 2.0},
    {'step': 30, 'train/loss': 0.0},
  ],
  'other': [{'step': 20, 'train/loss': 9.0}],
}


def test_curve_takes_whole_names():
  assert curves.curve(RECORDS['run_seed0'], 'train/loss') == {10: 3.0, 20: 1.0}
  assert curves.curve(RECORDS['run_seed0'], 'loss') == {}


def test_band_is_over_the_steps_that_all_have():
  found = [curves.curve(RECORDS[f'run_seed{i}'], 'train/loss') for i in (0, 1)]
  steps, mean, std = curves.band(found)
  np.testing.assert_array_equal(steps, [10, 20])
  np.testing.assert_allclose(mean, [4.0, 1.5])
  np.testing.assert_allclose(std, [1.0, 0.5])
  assert [len(x) for x in curves.band([])] == [0, 0, 0]


def test_plot(tmp_path):
  panel = {
    'title': 'Loss',
    'ylabel': 'loss',
    'lines': {
      'runs': (r'run_seed\d', 'train/loss'),
      'nothing': ('other', 'no such metric'),
    },
  }
  results = Results(RECORDS, epath.Path(tmp_path), done=())
  results.records = RECORDS
  curves.Curves([panel, panel], 'two')(results)
  picture = np.asarray(PIL.Image.open(tmp_path / 'two.png').convert('RGB'))
  assert picture.shape == (494, 1352, 3) and (picture != 255).mean() > 0.02


def test_percent_levels_and_where_axes_start(tmp_path, monkeypatch):
  panel = {'title': 'T', 'ylabel': 'y (%)'}
  panel['levels'] = {'l': ('other', 'train/loss')}
  drawn = []
  monkeypatch.setattr(curves.pictures, 'save', lambda *x: drawn.append(x[0]))
  results = Results(RECORDS, epath.Path(tmp_path), done=())
  results.records = RECORDS
  lines = {'runs': (r'run_seed\d', 'train/loss')}
  curves.Curves([panel | {'lines': lines}])(results)
  (axes,) = drawn[0].axes
  line, level = axes.get_lines()
  np.testing.assert_allclose(line.get_ydata(), [400, 150])
  assert level.get_ydata()[0] == 900 and level.get_linestyle() == '--'
  assert axes.get_ylim()[0] in axes.get_yticks()
  assert all(tick == int(tick) for tick in axes.get_xticks())
