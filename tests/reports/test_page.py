"""Pages about runs and studies: what they say, also in a headless Chromium."""

import io
import json
import re
import types

import chromium
import jax
import numpy as np
import pytest
from PIL import Image

from vit_jax.evals.classification import Predictions
from vit_jax.reports import confusion, markup, page, series
from vit_jax.tools import report

NASTY = '</script><img src=x onerror=alert(1)>&"\''


def write_run(folder, records, **files):
  """Write a workdir: metrics.jsonl, and NAME.json of each keyword."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    (folder / f'{name}.json').write_text(json.dumps(content))
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
      | {'images_per_s_per_device': 100.0, 'progress': step / steps}
      | {'seconds/setup': 2.0, 'seconds/steps': step * 0.1}
      | {'goodput': 0.5, **more}
    )
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
  'config': 'configs/x.py:tiny',
  'changed': {'seed': [0, 1], 'mesh.fsdp': [None, 8]},
  'defaults': {'config.accum_steps': '1'},
}
ENVIRONMENT = {
  'argv': ['/a/vit_jax/main.py', '--config=configs/x.py:tiny', NASTY],
  'git_commit': 'abc+dirty',
  'devices': ['cpu:0'],
  'device_kind': 'cpu',
  'packages': {'jax': '0.10.2', 'grain': None},
}


def write_mistakes(folder, name, classes=3, files=None):
  """Write what an evaluator got wrong: all predictions are class 0."""
  count = 4 * classes
  true = np.arange(count) % classes
  confusion.write(
    folder,
    name,
    Predictions(
      classes=np.arange(classes),
      class_names=[f'{NASTY}{i}' for i in range(classes)],
      true=true,
      predicted=np.zeros(count, int),
      true_log_probability=np.log(0.1 + true / (10 * classes)),
      predicted_probability=np.full(count, 0.5),
      index=np.arange(count),
      describe=lambda i: str(files[i % len(files)]) if files else NASTY,
    ),
    figure=False,
  )


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A study with a finished, a diverged and a stopped run, and one not done."""
  study = tmp_path_factory.mktemp('reports') / 'my study'
  of_run = {'config': CONFIG, 'preset': PRESET, 'environment': ENVIRONMENT}
  first = write_run(study / 'first', training(), **of_run, done={'seconds': 3})
  image = study / 'image.jpg'
  pixels = np.random.default_rng(0).integers(0, 255, (400, 300, 3), np.uint8)
  Image.fromarray(pixels).save(image)
  write_mistakes(first, 'val', files=[image, study / 'gone.jpg'])
  diverged = {'seconds': 1, 'diverged': f'loss=nan {NASTY}'}
  nan = [*training(steps=20, lr=0.3), {'step': 20, 'val/loss': float('nan')}]
  write_run(study / 'second', nan, config=CONFIG, done=diverged)
  write_run(study / 'third', training(steps=90, lr=0.2)[:3], config=CONFIG)
  runs = dict.fromkeys(('first', 'second', 'third', 'fourth'), CONFIG)
  config = {'run': 'vit_jax.study.study', 'runs': runs, 'order': list(runs)}
  write_run(study, [], config=config)
  table = f'# Table {NASTY}\n\n| | a |\n|---|---|\n| row | 93.1 ± 0.4 |\n'
  (study / 'table.md').write_text(table)
  Image.fromarray(pixels).save(study / 'curves.png')
  assert report.main([str(study)]) == 0
  return study


def text_of(path):
  """Return the page without its data, styles and tags."""
  found = re.sub(r'(?s)<(script|style).*?</\1>', ' ', path.read_text())
  return re.sub(r'\s+', ' ', re.sub(r'<[^>]*>', ' ', found))


def test_a_run(folder):
  said = text_of(folder / 'first' / 'report.html')
  for expected in (
    'Training run of the study my study · finished · last record 2026-01-02',
    'val/accuracy 91.7% 95%: 89.7% to 93.7%',
    'accuracy 0.9167 [0.8967, 0.9367] 0.9167 100',
    'num_examples 768',
    '12 s of wall time. Goodput, the fraction in training steps: 83.3%',
    'seed 0 1',
    'mesh.fsdp – 8',
    'Preset: configs/x.py:tiny',
    'accum_steps 1',
    'git commit abc+dirty',
    'python -m vit_jax.main --config=configs/x.py:tiny',
    '8 examples are misclassified',
  ):
    assert expected in said, expected
  pictures = (folder / 'first/report.html').read_text().count('image/jpeg;')
  assert pictures == 4  # of 8 examples, whose other files are gone


def test_a_study(folder):
  said = text_of(folder / 'report.html')
  for expected in (
    'Study · 2 of 4 runs are done',
    'row 93.1 ± 0.4',
    'first finished 100 12 s',
    'second diverged 20 4 s',
    'third stopped or running, step 30 of 90',
    'fourth no results yet',
  ):
    assert expected in said, expected
  shown = (folder / 'report.html').read_text()
  assert 'image/png;' in shown and 'href="third/report.html"' in shown
  assert 'href="fourth' not in shown
  said = text_of(folder / 'second' / 'report.html')
  assert '· diverged ·' in said and 'loss=nan' in said


def test_what_files_say_is_escaped(folder):
  """Nothing from a file becomes an element, and pages load nothing."""
  for path in (folder / 'report.html', *folder.glob('*/report.html')):
    shown = path.read_text()
    assert '<img src=x' not in shown and shown.count('</script>') == 2
    assert not re.search(r'(src|href)="(?!data:|\.\./|[\w%]+/report)', shown)
    assert "default-src 'none'" in shown and 'http' not in shown.replace(
      'http-equiv', ''
    ).replace('http://www.w3.org/2000/svg', '')


def test_a_matrix_of_many_classes_is_a_picture(folder, tmp_path):
  write_run(tmp_path, training(), config=CONFIG)
  write_mistakes(tmp_path, 'test', classes=60)
  shown = page.write(tmp_path).read_text()
  assert 'class="pixels"' in shown and shown.count('image/png;') == 1
  (tmp_path / 'confusion-test.csv').write_text('true_class,a\na,1\n')
  (tmp_path / 'misclassified-test.csv').write_text(
    ','.join(confusion.MISCLASSIFIED) + '\n'
  )
  assert 'No example is misclassified' in text_of(page.write(tmp_path))


def test_images_of_a_source_without_files(tmp_path):
  """A run saves them, so that later pages have them, too."""
  write_run(tmp_path, training(), config=CONFIG)
  write_mistakes(tmp_path, 'val')
  rng = np.random.default_rng(0)
  grey = rng.integers(0, 255, (8, 8, 1), np.uint8)
  file = io.BytesIO()
  Image.fromarray(grey[..., 0]).resize((300, 300)).save(file, 'PNG')
  broken = np.zeros((8, 8, 5), np.uint8)
  # Of 12 examples, those of class 0 are right.
  examples = [None, grey, file.getvalue(), None, broken] + [grey] * 7
  source = [{'image': x} for x in examples]
  evaluator = types.SimpleNamespace(
    predictions=True, data=types.SimpleNamespace(source=source)
  )
  page.write_at_end(tmp_path, {'val': evaluator, 'other': object()})
  for _ in range(2):
    shown = (tmp_path / 'report.html').read_text()
    assert shown.count('image/png;') == 6 and shown.count('image/jpeg;') == 1
    page.write(tmp_path)


def test_a_run_without_new_files(tmp_path):
  """Workdirs of before have no preset, no times and no commit."""
  old = [{'step': 4, 'train/loss': 1.0, 'eta_s': 0.0, 'images_per_s': 9.0}]
  write_run(tmp_path, old, config=CONFIG, environment={'argv': ['main.py']})
  said = text_of(page.write(tmp_path))
  assert 'finished' in said and 'did not record the preset' in said
  assert 'Goodput' not in said


def test_what_is_no_workdir(tmp_path, capsys):
  with pytest.raises(SystemExit) as end:
    report.main([str(tmp_path)])
  assert 'has neither config.json nor metrics.jsonl' in str(end.value)
  other = tmp_path / 'page.html'
  write_run(tmp_path, training())
  assert report.main([str(tmp_path), f'--output={other}']) == 0
  assert capsys.readouterr().out == f'{other}\n' and other.exists()
  assert not (tmp_path / 'report.html').exists()


def test_an_error_does_not_fail_the_run(tmp_path, capsys, monkeypatch):
  write_run(tmp_path, training())
  (tmp_path / 'done.json').write_text('half a fi')
  page.write_at_end(tmp_path)
  (said,) = capsys.readouterr().err.splitlines()
  assert said.startswith('report.html was not written: JSONDecodeError')
  assert said.endswith(f'python -m vit_jax.tools.report {tmp_path}')
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  page.write_at_end(tmp_path)
  assert not capsys.readouterr().err


def test_few_points_keep_the_spikes():
  rng = np.random.default_rng(0)
  values = rng.random(50_000)
  values[31_234], values[40_001], values[70] = 9.0, -9.0, np.nan
  curve = dict(zip(range(1, 50_001), values.tolist()))
  made = series.series('train', curve)
  assert len(made['x']) <= series.POINTS
  assert made['x'] == sorted(set(made['x']))
  assert (made['x'][0], made['x'][-1]) == (1, 50_000)
  found = dict(zip(made['x'], made['y']))
  assert (found[31_235], found[40_002], found[71]) == (9.0, -9.0, None)
  assert json.loads(json.dumps(made, allow_nan=False)) == made
  assert series.thin([1.0] * 7, 10) == list(range(7))


def test_a_long_run_is_a_small_page(tmp_path):
  write_run(tmp_path, training(steps=20_000, every=1), config=CONFIG)
  assert page.write(tmp_path).stat().length < 400_000


def test_markup():
  assert markup.tag('p', '<', markup.Html('<b>'), None, class_='"') == (
    '<p class="&quot;">&lt;<b></p>'
  )


@pytest.mark.slow
def test_pages_in_a_browser(folder, tmp_path):
  """Pointer, keyboard, zoom, log axis, hidden series and sorting."""
  with chromium.driver(tmp_path / 'profile', log='browser') as driver:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def open_page(path):
      driver.get((folder / path).as_uri())
      errors = driver.get_log('browser')
      assert not errors

    def find(selector):
      return driver.find_elements('css selector', selector)

    def shown(selector):
      return find(selector)[0].text

    def move(chart, fraction):
      """Move the pointer to a part of a chart's width."""
      driver.execute_script('arguments[0].scrollIntoView()', chart)
      x = round((fraction - 0.5) * chart.size['width'])
      ActionChains(driver).move_to_element_with_offset(chart, x, 0).perform()

    open_page('first/report.html')
    titles = [x.text for x in find('.chart figcaption span')]
    assert titles == ['loss', 'accuracy', 'lr', 'images_per_s', 'goodput']
    loss = find('.chart svg')[0]
    move(loss, 0.97)
    assert shown('#tip').split() == [
      'step',
      '100',
      'train',
      '0.12',
      'val',
      '0.22',
    ]
    # The other charts show their values of the same step.
    accuracy = find('.chart')[1].text.split()
    assert accuracy[-2:] == ['val', '0.9167']
    move(loss, 0.55)
    (step,) = re.findall(r'step (\d+)', shown('#tip'))
    assert (40 <= int(step) <= 60 and 'at 50' in shown('#tip')) or step == '50'

    loss.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert 'step 20' in shown('#tip') and 'at 50' in shown('#tip')
    spoken = driver.execute_script(
      'return document.getElementById("live").textContent'
    )
    assert spoken.startswith('step 20: train 0.2, val')

    def paths():
      return [x.get_attribute('d') for x in find('.chart .curve')]

    before = paths()
    find('.toggle[aria-pressed]')[0].click()
    after = paths()
    assert after[0] != before[0] and after[2:] == before[2:]  # log of the loss
    move(loss, 0.5)
    drag = ActionChains(driver).click_and_hold().move_by_offset(80, 0)
    drag.release().perform()
    zoomed = paths()
    assert all(a != b for a, b in zip(zoomed, after))  # all charts
    find('#reset')[0].click()
    assert paths() == after
    find('[data-series=val]')[0].click()
    assert len(paths()) == len(after) - 2  # val/loss and val/accuracy
    assert len(find('.matrix td')) == 9 and len(find('.images img')) == 4
    assert find('.images img')[0].size['width'] > 50

    open_page('report.html')
    assert 'train/loss' in [x.text for x in find('.chart figcaption span')]
    move(find('.chart svg')[0], 0.2)
    assert {'first', 'second', 'third'} <= set(shown('#tip').split())

    def names():
      return [x.text for x in find('table.sortable tbody th')]

    find('th button')[2].click()  # steps, most first
    assert names()[:3] == ['first', 'third', 'second']
    assert names()[3] == 'fourth'  # without a value
    find('tbody a')[0].click()
    assert driver.title == 'first · vit_jax'
    for width, scheme in ((390, 'dark'), (1280, 'light')):
      driver.execute_cdp_cmd(
        'Emulation.setDeviceMetricsOverride',
        {'width': width, 'height': 800, 'deviceScaleFactor': 1, 'mobile': True},
      )
      features = [{'name': 'prefers-color-scheme', 'value': scheme}]
      options = {'features': features}
      driver.execute_cdp_cmd('Emulation.setEmulatedMedia', options)
      for path in ('first/report.html', 'report.html'):
        open_page(path)
        wide = driver.execute_script(
          'return document.documentElement.scrollWidth'
        )
        assert wide <= width  # only tables scroll sideways
        color = driver.execute_script(
          'return getComputedStyle(document.body).backgroundColor'
        )
        assert (color == 'rgb(255, 255, 255)') == (scheme == 'light')
