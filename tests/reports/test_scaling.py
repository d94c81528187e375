"""Scaling pictures: the points that are drawn, and those not there yet."""

import dataclasses
import json

import numpy as np
import PIL.Image
import pytest
from etils import epath

from vit_jax.reports.results import Results
from vit_jax.reports.scaling import Scaling


def make_results(path, done):
  names = [f'{m}_{n}_seed{s}' for m in 'ab' for n in (10, 100) for s in (0, 1)]
  for i, name in enumerate(names):
    (path / name).mkdir()
    record = {'step': 1, 'acc': i / 10, 'exaflops': float(1 + i // 2)}
    (path / name / 'metrics.jsonl').write_text(json.dumps(record) + '\n')
  return Results(names, epath.Path(path), names[:done])


def panel(title, x_of, **more):
  lines = {
    f'model {m}': [
      {'x': x_of(m, n), 'y': {'runs': rf'{m}_{n}_seed\d', 'metric': 'acc'}}
      for n in (100, 10)
    ]
    for m in 'ab'
  }
  axes = {'xlabel': 'images', 'ylabel': 'accuracy (%)'}
  return {'title': title, **axes, 'lines': lines, **more}


def by_flops(model, number):
  return {'runs': rf'{model}_{number}_seed\d', 'metric': 'exaflops'}


def test_points(tmp_path, capsys):
  results = make_results(tmp_path, done=6)
  panels = (
    panel('size', lambda m, n: n, ticks={10: 'ten', 100: 'hundred'}),
    panel('compute', by_flops, joined=False),
  )
  report = Scaling(panels, title='Scaling', name='figure')
  report.check(results)
  rows = report(results)
  sizes = {
    (r['line'], r['x']): (r['mean'], r['std'])
    for r in rows
    if r['panel'] == 'size'
  }
  # The runs of model b with 100 are not done.
  assert sizes == {
    ('model a', 10): pytest.approx((0.05, 0.05)),
    ('model a', 100): pytest.approx((0.25, 0.05)),
    ('model b', 10): pytest.approx((0.45, 0.05)),
  }
  assert {r['x'] for r in rows if r['panel'] == 'compute'} == {1, 2, 3}
  assert len(json.loads((tmp_path / 'figure.json').read_text())) == 6
  assert '| size | model a | 10 | 5.0 ± 5.0 | 2 |' in (
    (tmp_path / 'figure.md').read_text()
  )
  assert '25.0 ± 5.0' in capsys.readouterr().out
  # Student's t with one degree of freedom is 12.706 at 97.5%.
  rows = dataclasses.replace(report, intervals=True)(results)
  assert rows[1]['bar'] == pytest.approx(12.706 * 0.05, abs=1e-4)
  assert rows[1]['text'] == '5.0 ± 63.5'
  image = np.asarray(PIL.Image.open(tmp_path / 'figure.png').convert('RGB'))
  assert image.shape == (494, 1352, 3) and (image != 255).mean() > 0.02


def test_x_relative_to_a_run(tmp_path):
  base = {'runs': r'a_100_seed\d', 'metric': 'exaflops'}
  report = Scaling((panel('compute', by_flops, relative_to=base),))
  xs = {}
  for done in (8, 2):  # with 2 the base is not measured yet
    path = tmp_path / str(done)
    path.mkdir()
    results = make_results(path, done)
    report.check(results)
    xs[done] = {(r['line'], r['x']) for r in report(results)}
  a, b = 'model a', 'model b'
  assert xs == {8: {(a, 0.5), (a, 1), (b, 1.5), (b, 2)}, 2: set()}
  for wrong in (
    panel('compute', by_flops, relative_to=dict(base, runs='c')),
    panel('size', lambda m, n: {'runs': 'c', 'metric': 'exaflops'}),
  ):
    with pytest.raises(ValueError, match=r"'c' matches none of the runs"):
      Scaling((wrong,)).check(results)
