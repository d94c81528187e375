"""What is kept, what is restored, and what does not fit."""

import gc
import logging
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from nightly import nightly
from options import all_set

from vit_jax.durations import Timeline, steps
from vit_jax.parallel import sharding
from vit_jax.runs import checkpoint, workdirs
from vit_jax.runs.checkpoint import Checkpointer, Checkpoints
from vit_jax.train import TrainState
from vit_jax.types import Kind, UserError

SGD = optax.sgd(0.1, momentum=0.9)


def make_state(step=0, *, width=8, ema=True, seed=0, rule=optax.adam(0.1)):
  rng = np.random.default_rng(seed)
  params = {
    'head': {'kernel': jnp.asarray(rng.normal(size=(3, width)), jnp.float32)},
    'cls': jnp.asarray(rng.normal(size=(1, 1, width)), jnp.float32),
  }
  _, opt_state = rule.update(params, rule.init(params))  # no zeros
  return TrainState(
    step=jnp.asarray(step, jnp.int32),
    params=params,
    opt_state=opt_state,
    rng=jax.random.key(seed + 1),
    ema=jax.tree.map(lambda x: 2 * x, params) if ema else None,
  )


def abstract(state, rules=(), mesh=None):
  mesh = mesh or sharding.make_mesh()
  shapes = jax.eval_shape(lambda: state)
  return sharding.annotate(shapes, sharding.infer(shapes, rules, mesh))


def assert_same(actual, expected):
  def numpy(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    return np.asarray(x)

  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(numpy(a), numpy(b)),
    actual,
    expected,
  )


def names_in(workdir):
  return sorted(p.name for p in (workdir / 'checkpoints').iterdir())


ODD = """ !"#$%&'()+,-:;<=>@^`{|}~\t\né"""  # in names that a shell allows


@pytest.mark.parametrize('odd', '*?[]\\')
def test_a_path_that_orbax_cannot_read_back(odd, tmp_path):
  with pytest.raises(UserError, match=f'with {re.escape(odd)}\\. .*faults.md'):
    Checkpointer(tmp_path / f'lr={odd}')


def test_everything_comes_back_on_any_mesh(tmp_path):
  tmp_path /= ODD
  state, checkpointer = make_state(5), Checkpointer(tmp_path)
  assert checkpointer.latest_step() is None
  # As eight devices of FSDP have it ...
  split = sharding.infer(
    state, [('params/head/kernel', (None, 'data'))], sharding.make_mesh()
  )
  checkpointer.save(5, jax.device_put(state, split), {'position': 40})
  checkpointer.close()
  # ... and as others want it.
  mesh = sharding.make_mesh(data=4, model=2)
  for rules, shard in (
    ([], (3, 8)),
    ([('params/head/kernel', (None, 'model'))], (3, 4)),
  ):
    wanted = abstract(state, rules, mesh)
    restored, data = Checkpointer(tmp_path).restore(wanted)
    assert_same(restored, state)
    assert data == {'position': 40}
    kernel = restored.params['head']['kernel']
    assert {s.data.shape for s in kernel.addressable_shards} == {shard}


def test_the_best_survives_a_restart(tmp_path):
  scores = {1: 0.1, 2: 0.9, 3: 0.5, 4: None, 5: 0.3, 6: 0.8, 7: 0.2}
  for process in ([1, 2, 3], [4, 5], [6, 7]):  # three processes
    rules = Checkpoints(best_metric='val/accuracy')
    checkpointer = Checkpointer(tmp_path, rules)
    for step in process:
      metrics = {'val/loss': 1.0}
      if scores[step] is not None:
        metrics['val/accuracy'] = scores[step]
      state = make_state(step, ema=False)
      checkpointer.save(step, state, {}, metrics=metrics)
    checkpointer.close()
    assert names_in(tmp_path) == ['2', str(process[-1])]


def test_without_the_metric_the_loss_decides(tmp_path, capsys):
  checkpointer = Checkpointer(tmp_path, Checkpoints(best_metric='val/auc'))
  for step, loss in enumerate((0.5, 0.1, 0.9)):
    metrics = {'val/loss': loss}
    checkpointer.save(step, make_state(step, ema=False), {}, metrics=metrics)
  checkpointer.save(3, make_state(3, ema=False), {})  # as at a stop
  checkpointer.close()
  assert names_in(tmp_path) == ['1', '3']
  shown = capsys.readouterr()
  assert 'val/auc has no value' in shown.out
  assert 'tracked_metric' not in shown.err


def test_the_best_loss_is_the_lowest(tmp_path):
  rules = Checkpoints(best_metric='val/loss')
  kinds = {'val/': Kind(better='lower')}
  checkpointer, _ = rules.open(tmp_path, Timeline(1, 1, 1), {'val': 1}, kinds)
  for step, loss in enumerate((0.5, 0.1, 0.9)):
    metrics = {'val/loss': loss}
    checkpointer.save(step, make_state(step, ema=False), {}, metrics=metrics)
  checkpointer.close()
  assert names_in(tmp_path) == ['1', '2']


def test_all_rules_of_checkpoints_act(tmp_path):
  rules = all_set(
    Checkpoints, every=steps(3), keep_last=2, best_metric='val/accuracy'
  )
  checkpointer, every = rules.open(tmp_path, Timeline(1, 1, 10), {'val': 1})
  assert every == 3
  for step, score in ((2, 0.1), (4, 0.9), (6, 0.2), (8, 0.3), (10, 0.5)):
    metrics, state = {'val/accuracy': score}, make_state(step, ema=False)
    checkpointer.save(step, state, {'position': step}, metrics=metrics)
  checkpointer.save(10, make_state(0, ema=False), {'position': 0})  # is there
  checkpointer.close()
  assert names_in(tmp_path) == ['10', '4', '8']
  wanted = abstract(make_state(ema=False))
  restored, data = Checkpointer(tmp_path).restore(wanted)
  assert (int(restored.step), data) == (10, {'position': 10})


@pytest.mark.parametrize(
  ('saved', 'wanted', 'message'),
  [
    (
      {},
      {'width': 4},
      r'(?s)does not fit this run. In \'params\' of the checkpoint \(-\), in '
      r'this run \(\+\):\n- cls \(1, 1, 8\)\n\+ cls \(1, 1, 4\)\n- head/kernel '
      r'\(3, 8\)'
      r'\n\+ head/kernel \(3, 4\)\nUse the config.*another workdir',
    ),
    ({'ema': False}, {}, r"In 'ema' of the checkpoint"),
    ({}, {'ema': False}, r"In 'ema' of the checkpoint"),
    ({}, {'rule': SGD}, r"'train'.*\n- opt_state/0/count"),
  ],
)
def test_another_config_is_an_error(saved, wanted, message, tmp_path):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, make_state(**saved), {})
  checkpointer.wait()
  with pytest.raises(ValueError, match=message):
    checkpointer.restore(abstract(make_state(**wanted)))
  checkpointer.close()
  assert names_in(tmp_path) == ['1']  # it does not count as damage


def test_when_checkpoints_are_written(tmp_path):
  timeline, evals = Timeline(1, 1, 10), {'test': 2}
  assert Checkpoints().open(tmp_path, timeline, {})[1] == 10
  for count, name in ((4, 'dev'), (3, 'test')):
    rules = Checkpoints(every=steps(count), best_metric=f'{name}/accuracy')
    with pytest.raises(ValueError, match=f"no evaluator '{name}' runs at each"):
      rules.open(tmp_path, timeline, evals)


def test_find_and_load_params(tmp_path, caplog):
  run, plain = tmp_path / 'run', tmp_path / 'plain'
  checkpointer = Checkpointer(run, Checkpoints(keep_last=2))
  for step in (9, 10):
    checkpointer.save(step, make_state(step, seed=step), {})
  checkpointer.close()
  checkpointer = Checkpointer(plain)
  checkpointer.save(3, make_state(3, ema=False), {})
  checkpointer.close()

  folder = run / 'checkpoints'
  find = workdirs.find_checkpoint
  assert find(run) == folder / '10'  # as numbers, not as text
  assert find(run, 9) == folder / '9'
  assert find(folder) == folder / '10'
  assert find(str(folder / '9')) == folder / '9'
  for path, step, message in (
    (tmp_path / 'nowhere', None, 'nowhere does not exist'),
    (tmp_path, None, r'has no checkpoint; it has \[\]'),
    (run, 4, r'has no step 4; it has \[9, 10\]'),
  ):
    with pytest.raises(ValueError, match=message):
      find(path, step)

  caplog.clear()
  caplog.set_level(logging.WARNING)
  for ema, factor in (('auto', 2), (True, 2), (False, 1)):
    params, directory = checkpoint.load_params(run, step=9, ema=ema)
    assert directory == folder / '9'
    expected = make_state(seed=9).params
    assert params.keys() == {'cls', 'head/kernel'}
    assert type(params['cls']) is np.ndarray
    np.testing.assert_array_equal(params['cls'], factor * expected['cls'])
  assert not caplog.records  # absl's warnings would alarm the user
  params, _ = checkpoint.load_params(plain)
  np.testing.assert_array_equal(params['cls'], make_state().params['cls'])
  with pytest.raises(ValueError, match='has no EMA'):
    checkpoint.load_params(plain, ema=True)


WIDTH = 800  # Values of smaller arrays are in the index, which has checksums.


def saved(workdir, *steps, ema=False):
  """Save some small states, and return a function that restores one."""
  checkpointer = Checkpointer(workdir, Checkpoints(keep_last=9))
  for step in steps:
    state = make_state(step, width=WIDTH, ema=ema, seed=step)
    checkpointer.save(step, state, {'position': 2 * step})
  checkpointer.close()
  wanted = abstract(make_state(width=WIDTH, ema=ema))
  return lambda: Checkpointer(workdir).restore(wanted)


@pytest.fixture
def broken_reads():
  """Collect the coroutines that Orbax leaves behind when a read fails."""
  yield
  gc.collect()


def reads_damage(test):
  """Decorate a test that reads damaged checkpoints."""
  ignore = 'ignore::pytest.PytestUnraisableExceptionWarning'
  test = pytest.mark.usefixtures('broken_reads')(test)
  return pytest.mark.filterwarnings(ignore)(test)


def damage(file, how):
  if how == 'delete':
    file.unlink()
  elif how == 'empty':
    file.write_bytes(b'')
  elif how == 'truncate':
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
  elif how == 'other position':  # still JSON
    text = file.read_text()
    file.write_text(text.replace('"position": 10', '"position": 11'))
  else:  # flip a bit
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))


@reads_damage
@pytest.mark.parametrize(
  ('file', 'how'),
  [
    ('ema/ocdbt.process_0/d/*', 'flip'),
    ('train/ocdbt.process_0/d/*', 'flip'),
    ('train/_METADATA', 'delete'),
    ('record/metadata', 'other position'),
    *nightly([('record/metadata', 'flip')]),
    *nightly([('params/ocdbt.process_0/d/*', 'truncate')]),
  ],
)
def test_a_run_resumes_from_the_newest_whole_step(file, how, tmp_path, capsys):
  restore = saved(tmp_path, 3, 5, ema=True)
  newest = tmp_path / 'checkpoints' / '5'
  damage(max(newest.glob(file), key=lambda f: f.stat().st_size), how)
  state, data = restore()
  assert_same(state, make_state(3, width=WIDTH, seed=3))
  assert data == {'position': 6}
  assert names_in(tmp_path) == ['3', 'damaged-5']
  [line] = capsys.readouterr().out.splitlines()
  assert '5 is damaged and was renamed to damaged-5: ' in line
  assert restore()[1] == {'position': 6}  # and now it is no longer seen


@reads_damage
def test_a_step_that_is_damaged_again(tmp_path, capsys):
  restore = saved(tmp_path, 3, 5)
  newest = tmp_path / 'checkpoints' / '5'
  for name in ('damaged-5', 'damaged-5+', 'damaged-5++'):
    damage(newest / 'record' / 'metadata', 'empty')
    assert restore()[1] == {'position': 6}
    said = f'5 is damaged and was renamed to {name}: '
    assert said in capsys.readouterr().out
    shutil.copytree(newest.with_name(name), newest)


@reads_damage
@pytest.mark.parametrize(
  ('item', 'file', 'how', 'reason'),
  [
    ('ema', 'ocdbt*/d/*', 'flip', '1 arrays .* differ from their checksum'),
    ('params', 'ocdbt*/d/*', 'flip', '1 arrays'),
    ('params', 'manifest.ocdbt', 'flip', 'DATA_LOSS: Error opening'),
    *nightly(
      [('params', '_METADATA', 'flip', ''), ('record', 'metadata', 'flip', '')]
    ),
  ],
)
def test_damaged_parameters_are_refused(item, file, how, reason, tmp_path):
  saved(tmp_path, 3, 5, ema=True)
  files = (tmp_path / 'checkpoints' / '5' / item).glob(file)
  damage(max(files, key=lambda f: f.stat().st_size), how)
  with pytest.raises(
    UserError, match=rf'5 is damaged: {reason}.*\. Put .* of \[3, 5\]'
  ):
    checkpoint.load_params(tmp_path, ema=item != 'params')
  checkpoint.load_params(tmp_path, step=3)
  assert names_in(tmp_path) == ['3', '5']


@reads_damage
def test_without_a_whole_checkpoint_nothing_is_changed(tmp_path):
  restore = saved(tmp_path, 3, 5)
  for step in '35':
    damage(tmp_path / 'checkpoints' / step / 'record' / 'metadata', 'empty')
  message = r'(?s)no whole checkpoint:\n  5: .*\n  3:'
  with pytest.raises(ValueError, match=message):
    restore()
  assert names_in(tmp_path) == ['3', '5']


# Checksums.

SHARDINGS = [('data',), (None, 'data'), (None, None)]


@pytest.mark.parametrize(
  'dtype', ['float32', 'bfloat16', 'int32', 'uint8', 'bool']
)
def test_host_and_devices_compute_the_same_checksum(dtype):
  rng = np.random.default_rng(0)
  array = rng.integers(0, 2, (8, 24, 5)) * rng.normal(size=(8, 24, 5)) * 50
  array = np.asarray(jnp.asarray(array).astype(dtype))
  mesh = sharding.make_mesh()
  of_host = checkpoint.checksums({'x': array})['x']
  for spec in SHARDINGS:
    split = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    found = sharding._reduce_on_devices(
      checkpoint._checksum, {'x': jax.device_put(array, split)}
    )
    assert int(found['x']) == of_host


def test_a_checksum_depends_on_values_and_places():
  array = np.arange(12, dtype=np.float32).reshape(3, 4)
  changed = [array + np.eye(3, 4, dtype=np.float32) * 1e-6]
  changed += [array[::-1], array[:, ::-1], -array, np.roll(array, 1)]
  found = [checkpoint.checksums({'x': x})['x'] for x in (array, *changed)]
  assert len({*found}) == len(found)
  scalar, key = np.float32(3), jax.random.key(1)
  assert len({*checkpoint.checksums({'a': scalar, 'b': key}).values()}) == 2
