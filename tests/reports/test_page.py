"""Pages about runs and studies: what they say, also in a headless Chromium."""

import json
import math
import pathlib
import re
import types

import chromium
import jax
import numpy as np
import pytest
from PIL import Image
from processes import python

from vit_jax.evals.classification import Classification
from vit_jax.reports import charts, confusion, page, table, worst
from vit_jax.runs.records import OF_A_RUN
from vit_jax.tools import report
from vit_jax.types import Kind

KINDS = OF_A_RUN | {f'val/{k}': x for k, x in Classification.metrics.items()}
NASTY = '</script><img src=x onerror=alert(1)>&"\''


def write_run(folder, records, **files):
  """Write a workdir: metrics.jsonl, and NAME.json of each keyword."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    (folder / f'{name}.json').write_text(json.dumps(content))
  kinds = json.dumps({name: vars(x) for name, x in KINDS.items()})
  (folder / 'kinds.json').write_text(kinds)
  lines = [json.dumps(record) + '\n' for record in records]
  if lines:
    (folder / 'metrics.jsonl').write_text(''.join(lines))
  return folder


def training(*, steps=100, every=10, lr=0.1, **more):
  """Return the records of a training run, with an evaluation per 5 records."""
  records = []
  for step in range(every, steps + 1, every):
    base = {'step': step, 'time': '2026-01-02T03:04:05+00:00'}
    loss = 2 / step + lr
    records.append(
      {**base, 'train/loss': loss, 'train/lr': lr, 'images_per_s': 100.0}
      | {'progress': step / steps}
      | {'seconds/setup': 2.0, 'seconds/steps': step * 0.1}
      | more
    )
    if step == steps:  # the others say the speed
      records[-1]['images_per_s'] = 1.0
    if step % (5 * every) == 0:
      accuracy = 1 - 10 / (step + 20)
      records.append(
        {**base, 'val/accuracy': accuracy, 'val/num_examples': 768}
        | {'val/accuracy_low': accuracy - 0.02, 'val/loss': loss + 0.1}
        | {'val/accuracy_high': accuracy + 0.02}
        | {f'val/class_accuracy/{NASTY}': 0.25}
      )
  return records


CONFIG = {'run': 'vit_jax.train.train', 'seed': 1, 'note': NASTY}
PRESET = {
  'config': 'configs/x.py:tiny,folder,resize,adam,epochs=60,held_out=25',
  'about': 'Train x.',
  'changed': {
    **{'seed': [0, 1], 'mesh.fsdp': [None, 8], 'evals.val.seed': [0, 1]},
    'model.mlp.target': ['a.B', 'a.C'],
  },
  'defaults': {'config.accum_steps': '1'},
}
ENVIRONMENT = {
  'argv': [
    *('/a/vit_jax/main.py', '--config=configs/x.py:tiny', NASTY),
    *('--config.seed=1', '-config.model.mlp=dict', '--config.mesh.fsdp=8'),
  ],
  'git_commit': 'abc+dirty',
  'devices': ['cpu:0'],
  'device_kind': 'cpu',
  'packages': {'jax': '0.10.2', 'grain': None},
}


LARGE = np.random.default_rng(0).integers(0, 255, (400, 300, 3), np.uint8)


class Images(list):
  def describe(self, index):
    return NASTY


def write_mistakes(folder, name, count=12):
  """Write what an evaluator got wrong: all predictions are class 0."""
  true = np.arange(count) % 3
  predictions = confusion.Predictions(
    classes=np.arange(3),
    class_names=[f'{NASTY}{i}' for i in range(3)],
    true=true,
    predicted=np.zeros(count, int),
    true_log_probability=np.log(0.1 + true / 30),
    predicted_probability=np.full(count, 0.5),
    index=np.arange(count),
  )
  images = [{'image': LARGE}, {'image': LARGE[:8, :8, :1]}] * 6
  data = types.SimpleNamespace(source=Images(images))
  evaluator = types.SimpleNamespace(predictions=predictions, data=data)
  worst.write_all(folder, {name: evaluator, 'other': object()})


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A study with a finished, a diverged and a stopped run, and one not done."""
  study = tmp_path_factory.mktemp('reports') / 'my study'
  of_run = {'config': CONFIG, 'preset': PRESET, 'environment': ENVIRONMENT}
  first = write_run(study / 'first', training(), **of_run, done={'seconds': 3})
  write_mistakes(first, 'val')
  (first / 'confusion-val.png').unlink()  # the run was killed before
  page.write_at_end(first)
  diverged = {'seconds': 1, 'diverged': f'loss=nan {NASTY}'}
  nan = [*training(steps=20, lr=0.3), {'step': 20, 'val/loss': math.nan}]
  write_run(study / 'second', nan, config=CONFIG, done=diverged)
  write_run(study / 'third', training(steps=90, lr=0.2)[:3], config=CONFIG)
  runs = dict.fromkeys(('first', 'second', 'third', 'fourth'), CONFIG)
  config = {'run': 'vit_jax.study.study', 'runs': runs, 'order': list(runs)}
  write_run(study, [], config=config, preset=PRESET)
  table = f'# Table {NASTY}\n\n| | a |\n|---|---|\n| row | 93.1 ± 0.4 |\n'
  (study / 'table.md').write_text(table)
  paired = table.replace('Table', 'Differences (95% intervals)')
  (study / 'paired.md').write_text(paired)
  Image.fromarray(LARGE).save(study / 'curves.png')
  report.main([str(study)])
  return study


def text_of(path):
  """Return the page without its data, styles and tags."""
  found = re.sub(r'(?s)<(script|style).*?</\1>', ' ', path.read_text())
  return re.sub(r'\s+', ' ', re.sub(r'<[^>]*>', ' ', found))


def test_a_run(folder):
  file = folder / 'first' / 'report.html'
  shown, said = file.read_text(), text_of(file)
  for expected in (
    'Training run of the study my study · finished · last record 2026-01-02',
    'val accuracy 91.67% [89.67%, 93.67%] n = 768',
    'Images per second 100 ',
    'Steps 100 of 100',
    'Wall time 0:00:12',
    'accuracy 91.67% [89.67%, 93.67%]',
    'loss 0.22',
    'num examples 768',
    'Single draws and classes',
    'steps 0:00:10 83.3%',
    'seed 0 1',
    'mesh.fsdp null 8',
    f'Preset: {PRESET["config"]}',
    'accum_steps',
    'abc+dirty',
    'python -m vit_jax.main --config=configs/x.py:tiny',
    '8 examples are misclassified',
    '0 4 100.0%',  # of the most confused classes
  ):
    assert expected in said, expected
  assert 'model.mlp.target' in said and 'evals.val.seed' not in said  # typed
  # Rows 1, 2, 4, 5, ... are wrong; large images are JPEGs.
  assert shown.count('image/jpeg;') == shown.count('image/png;') - 1 == 4
  assert 'alt="confusion matrix of val"' in shown
  assert '<code>&lt;/script' in shown  # names of files, to copy


def test_a_study(folder):
  file = folder / 'report.html'
  shown, said = file.read_text(), text_of(file)
  for expected in (
    'Study · 2 of 4 runs are done Train x. A tiny preset shows',
    'mean nothing. Time of all runs',
    'run status steps time val accuracy',
    'row 93.1 ± 0.4',
    'first finished 100 0:00:12 91.67%',
    'second diverged 20 0:00:04',
    'third stopped or running, step 30 of 90',
    'fourth no results yet',
  ):
    assert expected in said, expected
  assert 'image/png;' in shown and 'href="third/report.html"' in shown
  assert 'href="fourth' not in shown
  assert said.index('Table') < said.index('Differences')
  assert 'evals.val.seed 0 1' in said  # without a command: all that changed
  said = text_of(folder / 'second' / 'report.html')
  assert '· diverged ·' in said and 'loss=nan' in said
  assert 'last interval' not in said and 'loss nan' in said


def test_the_last_lines_of_a_command(tmp_path):
  image = tmp_path / 'my images/train/a/1.jpg'
  image.parent.mkdir(parents=True)
  image.touch()
  source = {'path': f'{tmp_path}/my images', 'split': 'train[:90%]'}
  config = CONFIG | {'objective': {}, 'data': {'source': source}}
  model = {'target': 'mine.Vit', 'embedding': {'target': 'vit_jax.models.x.Y'}}
  run = write_run(
    tmp_path / 'run',
    training(),
    config=config,
    preset=PRESET,
    model={'model': model, 'transforms': [{'target': 'more.crops.Crop'}]},
  )
  trust = '--trust=mine --trust=more'
  note = 'A tiny preset shows that everything runs: its numbers mean nothing.'
  page.write_at_end(run)
  assert page.closing(run).splitlines() == [
    note,
    'Next:',
    f"  python -m vit_jax.tools.predict --weights={run} {trust} '{image}'",
    f'  python -m vit_jax.tools.look --weights={run} {trust} '
    f"--output={run}/look '{image}'",
    f'Report: {run}/report.html',
  ]
  assert note in (run / 'report.html').read_text()
  table.publish(run, 'table', 'Accuracy (%)', ['', 'a'], [['b', '1']], {})
  assert f'# Accuracy (%). {note}\n' in (run / 'table.md').read_text()
  config |= {'data': {'labels': False}}
  other = write_run(tmp_path / 'other', [], config=config)
  assert page.closing(other).splitlines()[1:] == [
    f'  python -m vit_jax.tools.predict --weights={other} '
    f'--features={other}/features.npz IMAGE.jpg',
    f'  python -m vit_jax.tools.look --weights={other} --output={other}/look '
    'IMAGE.jpg',
    f'Report: {other}',
  ]


@pytest.mark.parametrize(
  ('accuracy', 'mean', 'is_said'),
  [(0.68, 0.5, True), (0.79, 0.5, False), (0.6, 0.7, False)],
)
def test_a_result_of_guessing_is_said(tmp_path, accuracy, mean, is_said):
  found = {'accuracy': accuracy, 'mean_per_class_accuracy': mean}
  found |= {'majority_accuracy': 0.687}
  record = {'step': 4} | {f'test/{name}': x for name, x in found.items()}
  config = CONFIG | {'data': {}}
  run = write_run(tmp_path, [record], config=config)
  (run / 'model.json').write_text('{"model": {"num_classes": 2}}')
  assert ('68.7%' in page.closing(run)) == is_said


def test_what_files_say_is_escaped(folder):
  """Nothing from a file becomes an element, and pages load nothing."""
  for path in (folder / 'report.html', *folder.glob('*/report.html')):
    shown = path.read_text()
    assert '<img src=x' not in shown and shown.count('</script>') == 3
    assert not re.search(r'(src|href)="(?!data:|\.\./|[\w%]+/report)', shown)
    assert "default-src 'none'" in shown


def test_a_run_with_few_files(tmp_path):
  old = [{'step': 4, 'train/loss': 1.0, 'progress': 1.0, 'images_per_s': 9.0}]
  write_run(tmp_path, old, config=CONFIG)
  (tmp_path / 'misclassified-test.csv').write_text(
    ','.join(confusion.MISCLASSIFIED) + '\n'
  )
  said = text_of(page.write(tmp_path))
  assert 'finished' in said and '0 examples are misclassified' in said


def test_other_workdirs(tmp_path, capsys):
  with pytest.raises((ValueError, SystemExit), match='nor metrics'):
    report.main([str(tmp_path)])
  other = tmp_path / 'page.html'
  write_run(tmp_path, training())
  report.main([str(tmp_path), f'--output={other}'])
  assert capsys.readouterr().out == f'{other}\n' and other.exists()
  assert not (tmp_path / 'report.html').exists()


def test_a_comparison_of_runs(tmp_path, capsys):
  """Curves of each run, also of seeds; last metrics; keys that differ."""
  preset = PRESET | {'defaults': {'accum_steps': '1', 'ema': 'None'}}
  runs = [str(tmp_path / x) for x in ('x_seed0', 'x_seed1')]
  for run, every, more in zip(runs, (3, 9), ({}, {'accum_steps': 2})):
    records, config = training(steps=30, every=every), CONFIG | more
    write_run(pathlib.Path(run), records, config=config, preset=preset)
  report.main(runs)
  path = pathlib.Path(capsys.readouterr().out.strip())
  assert path == tmp_path / 'compare.html'
  said = text_of(path)
  assert 'Last metrics x_seed0 x_seed1 step 30 27 train/loss 0.1667 ' in said
  assert 'accum_steps 1 2' in said and ' ema ' not in said
  (drawn,) = re.findall(r'id="charts">(.*?)</script>', path.read_text())
  loss = next(x for x in json.loads(drawn) if x['title'] == 'train/loss')
  assert [x[0][:2] for x in loss['lines'].values()] == [[3, 6], [9, 18]]


def test_the_backend_of_jupyter_and_colab_may_be_missing():
  backend = 'module://matplotlib_inline.backend_inline'
  done = python('-c', 'import vit_jax, matplotlib', MPLBACKEND=backend)
  assert done.returncode == 0, done.stderr


def test_an_error_does_not_fail_the_run(tmp_path, capsys, monkeypatch):
  write_run(tmp_path, training())
  (tmp_path / 'done.json').write_text('half a fi')
  page.write_at_end(tmp_path)
  (said,) = capsys.readouterr().err.splitlines()
  assert said.startswith('report.html was not written: UserError: ')
  assert 'done.json' in said
  assert said.endswith(f'python -m vit_jax.tools.report {tmp_path}')
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  page.write_at_end(tmp_path)
  assert not capsys.readouterr().err


def test_charts_have_a_line_for_each_split():
  loss, accuracy, lr, speed = charts.of_run(training(), KINDS)
  assert [x['title'] for x in (loss, accuracy, lr, speed)] == [
    *('loss', 'accuracy (%)', 'learning rate', 'images per second')
  ]
  assert [x['group'] for x in (loss, lr, speed)] == [
    *('Results', 'Optimizer', 'Speed and memory')
  ]
  assert loss['lines']['val'] == ([50, 100], [0.24, 0.22])
  steps, values = loss['lines']['train']
  assert steps == list(range(10, 101, 10)) and values[0] == 0.3
  assert not loss['log']
  runs = {'a_1': training(), 'b': [], 'c': training(steps=20)}
  first, *others = charts.of_study((k, '', x, KINDS) for k, x in runs.items())
  assert first['title'] == 'train/loss' and first['group'] == 'a, c'
  assert first['lines'].keys() == {'a_1', 'c'}
  assert [x['title'] for x in others] == ['val/accuracy (%)', 'val/loss']
  wide = [{'step': i, 'train/loss': 10.0**-i} for i in range(5)]
  assert charts.of_run(wide, KINDS)[0]['log']
  ends = 'block_0/fc1', 'block_1/fc1', 'embedding', 'head'
  paths = [f'train/probes/n/grads/{x}/kernel' for x in ends]
  probed = [{'step': i, **dict.fromkeys(paths, 1.0)} for i in (1, 2)]
  found = charts.of_run(probed, OF_A_RUN)
  assert [(x['title'], *x['lines']) for x in found] == [
    ('n/grads/fc1/kernel', 'block_0', 'block_1'),
    ('n', 'grads/embedding/kernel', 'grads/head/kernel'),
  ]
  own = {'val/entropy': Kind(group='mine')}
  records = [{'step': i, 'val/entropy': 1.0, 'train/lr': 0.1} for i in (1, 2)]
  groups = [x['group'] for x in charts.of_run(records, KINDS | own)]
  assert groups == ['Optimizer', 'mine']


def test_seeds_are_a_mean_and_a_band():
  runs = [('a', 'x', training(lr=i, steps=30)) for i in (0, 2)]
  runs.append(('b', 'y', training(steps=20)))
  mean, alone = charts.of_study((*run, KINDS) for run in runs)
  steps, values, stds = mean['lines']['a']
  assert (mean['group'], steps) == ('a', [10, 20, 30])
  np.testing.assert_allclose(values, 1 + 2 / np.array(steps), rtol=1e-5)
  np.testing.assert_allclose(stds, [1, 1, 1], rtol=1e-5)
  assert alone['group'] == 'b' and len(alone['lines']['b']) == 2


def test_few_points_keep_the_spikes():
  rng = np.random.default_rng(0)
  values = rng.random(50_000)
  values[31_234], values[40_001] = 9.0, -9.0
  places = charts.thinned(values, 1000).tolist()
  assert len(places) <= 1002 and places == sorted(set(places))
  assert {0, 49_999, 31_234, 40_001} <= set(places)
  assert charts.thinned(np.array([0.0, 0.5]), 10).tolist() == [0, 1]


def test_a_long_run_is_a_small_page(tmp_path):
  write_run(tmp_path, training(steps=20_000, every=1), config=CONFIG)
  assert page.write(tmp_path).stat().length < 400_000


@pytest.mark.slow
def test_pages_in_a_browser(folder, tmp_path):
  """Charts are drawn, linked and zoomed; tables are sorted; no errors."""
  with chromium.driver(tmp_path / 'profile', log='browser') as driver:
    from selenium.webdriver.common.action_chains import ActionChains

    def open_page(path):
      driver.get((folder / path).as_uri())
      assert not driver.get_log('browser')

    def find(selector):
      return driver.find_elements('css selector', selector)

    def legends():
      return [' '.join(x.text.split()) for x in find('.u-legend')]

    open_page('first/report.html')
    captions = [x.text.split()[0] for x in find('figcaption')]
    assert captions == ['loss', 'accuracy', 'lr', 'images_per_s']
    find('.u-legend th')[2].click()  # val, in all charts
    assert len(find('.u-legend .u-off')) == 2
    find('.u-legend th')[2].click()
    loss = find('.u-over')[0]
    driver.execute_script('arguments[0].scrollIntoView()', loss)
    width = loss.size['width']
    move = ActionChains(driver).move_to_element_with_offset
    move(loss, round(0.48 * width), 0).perform()
    # The other charts show their values of the same step.
    assert legends()[:2] == ['step100 train0.12 val0.22', 'step100 val91.67']
    move(loss, 0, 0).click_and_hold().move_by_offset(80, 0).release().perform()
    move(loss, round(-0.49 * width), 0).perform()
    assert int(legends()[0].split()[0][4:]) > 40  # zoomed
    find('figcaption button')[0].click()
    assert find('figcaption button')[0].get_attribute('aria-pressed') == 'true'

    open_page('report.html')
    find('.sortable thead th')[2].click()  # steps, most first
    names = [x.text for x in find('.sortable tbody th')]
    assert names == ['first', 'third', 'second', 'fourth']
    find('tbody a')[0].click()
    assert driver.title == 'first · vit_jax'
    for width in (390, 1280):
      size = {'width': width, 'height': 800, 'deviceScaleFactor': 1}
      driver.execute_cdp_cmd(
        'Emulation.setDeviceMetricsOverride', size | {'mobile': True}
      )
      for path in ('first/report.html', 'report.html'):
        open_page(path)
        wide = 'return document.documentElement.scrollWidth'
        assert driver.execute_script(wide) <= width  # only tables scroll
