"""Configs become objects, and every mistake in one has a clear error."""

import dataclasses
import decimal
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import ml_collections
import pytest
from ml_collections import config_dict

from vit_jax import config as configs
from vit_jax.config import ConfigError
from vit_jax.data.pipeline import Data
from vit_jax.data.transforms import CentralCrop, Resize
from vit_jax.models.common import PatchEmbedding
from vit_jax.models.vit import VisionTransformer
from vit_jax.optim.durations import Duration, steps
from vit_jax.preprocess import Normalize

RESIZE = 'vit_jax.data.transforms.Resize'


def here(name):
  return f'{__name__}.{name}'


@dataclasses.dataclass(frozen=True)
class Part:
  """A part of a run with its own keys."""

  size: int = 1
  every: Duration | None = None


@dataclasses.dataclass(frozen=True)
class Scheduled:
  """A target with keys of its own next to it."""

  thing: Callable = dataclasses.field(metadata={'rest': True})
  every: Duration | None = None


def start(
  workdir,
  *,
  number: decimal.Decimal,
  total: Duration,
  part: Part = Part(),
  things: Mapping[str, Scheduled] | None = None,
  transforms: Sequence[Any] = (),
  objective: Callable | None = None,
  plain: Any = None,
  preprocess: Any = Normalize(),
  data: Data | None = None,
  later: Annotated[Callable, ('data', Data)] | None = None,
  scale: float = 1.0,
  fast: bool = False,
  record=None,
):
  """Return what it got, like a run would use it."""
  return {k: v for k, v in locals().items() if k != 'record'}


def loss(model, *, preprocess, smoothing=0.0):
  return 'loss', model, preprocess, smoothing


def wrapper(model, *, preprocess, objective, alpha=0.2):
  """An objective that wraps an objective."""
  return alpha, objective(model, preprocess=preprocess)


VIT_FIELDS = {
  'width': 8,
  'depth': 1,
  'mlp_dim': 8,
  'num_heads': 2,
  'embedding': PatchEmbedding((4, 2)),
}
NUMBER = {'target': 'decimal.Decimal', 'value': '1.5'}
MINIMAL = {'run': here('start'), 'number': NUMBER, 'total_steps': 3}


def call(**changes):
  settings = ml_collections.ConfigDict(MINIMAL | changes)
  return configs.run(settings, 'DIR')


def test_targets_become_objects_also_in_lists_and_dicts():
  given = call(
    plain={'deep': ({'target': 'decimal.Decimal', 'value': '4'}, 3)},
    transforms=[{'target': RESIZE, 'size': 8}],
  )
  assert given['number'] == decimal.Decimal('1.5')
  assert given['plain'] == {'deep': (decimal.Decimal(4), 3)}
  assert given['transforms'] == [Resize(8)]
  assert (given['workdir'], given['scale'], given['part']) == ('DIR', 1, Part())


def test_annotations_are_the_schema():
  given = call(
    part={'size': 2, 'every_epochs': 0.5},
    things={'a': {**NUMBER, 'every_steps': 4}, 'b': NUMBER},
  )
  assert given['total'] == steps(3)
  assert given['part'] == Part(2, Duration(0.5, 'epochs'))
  a, b = given['things'].values()
  assert a == Scheduled(decimal.Decimal('1.5'), steps(4))
  assert b.every is None


def test_a_default_is_the_schema_too():
  assert call(preprocess={'mean': 1.0})['preprocess'] == Normalize(mean=1.0)
  with pytest.raises(ConfigError, match=r"preprocess\.men: .*mean 'mean'"):
    call(preprocess={'men': 1.0})


def test_what_lacks_arguments_becomes_a_partial():
  given = call(objective={'target': here('loss'), 'smoothing': 0.1})
  made = given['objective']('model', preprocess='p')
  assert made == ('loss', 'model', 'p', 0.1)
  with pytest.raises(ConfigError, match=r"loss: 'preprocess' is missing"):
    given['objective']('model')
  with pytest.raises(ConfigError, match=r'loss: smoothing is set by the code'):
    given['objective']('model', preprocess='p', smoothing=0.2)
  with pytest.raises(ConfigError, match=r'passes other, which it does not'):
    given['objective']('model', preprocess='p', other=1)


def pair(data, size=1):
  return data, size


def test_what_the_code_makes_itself_is_a_partial():
  """Also if nothing is missing; `data` without an annotation is a Data."""
  given = call(later={'target': here('pair'), 'data': {'a': 1}})
  assert given['later'](size=2) == ({'a': 1}, 2)
  data = {'source': {'target': 'decimal.Decimal', 'value': '1'}}
  given = call(later={'target': here('pair'), 'data': data | {'batch_size': 2}})
  assert given['later']()[0] == Data(decimal.Decimal(1), 2)
  with pytest.raises(ConfigError, match=r'later\.data\.size: .*batch_size'):
    call(later={'target': here('pair'), 'data': data | {'size': 2}})


def test_an_objective_wraps_an_objective():
  inner = {'target': here('loss'), 'smoothing': 0.1}
  given = call(objective={'target': here('wrapper'), 'objective': inner})
  made = given['objective']('model', preprocess='p')
  assert made == (0.2, ('loss', 'model', 'p', 0.1))


def test_a_transform_is_no_objective():
  flip = {'target': 'vit_jax.data.transforms.FlipLR'}
  mixer = {'target': 'vit_jax.objectives.mixing.Mixup', 'alpha': 1.0}
  mixed = {'target': 'vit_jax.objectives.mixing.mixed', 'mixer': mixer}
  with pytest.raises(ConfigError, match=r'objective\.objective\.target='):
    call(objective=mixed | {'objective': flip})


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'numbr': 1}, r"numbr: .*start has no argument 'numbr' \(did you mean 'n"),
    ({'totl_steps': 1}, r"no argument 'totl_steps' \(did you mean 'total_step"),
    ({'record': {}}, r"start has no argument 'record'"),
    (
      {'part': {'sise': 1}},
      r"part\.sise: .*no argument 'sise' .*'size",
    ),
    (
      {'things': {'a': {**NUMBER, 'evry_steps': 1}}},
      r"things\.a\.evry_steps: decimal.Decimal has no argument 'evry_steps'",
    ),
    ({'things': {'a': {'every_steps': 1}}}, r"things\.a needs a 'target'"),
    (
      {'objective': {'trgetx': 'wrapper', 'objective': {'target': RESIZE}}},
      r"objective needs a 'target', .* it has \['objective', 'trgetx'\]",
    ),
    (
      {'transforms': [{'target': RESIZE, 'size': 3, 'sise': 3}]},
      r"transforms\.0\.sise: .*Resize has no argument 'sise'",
    ),
    ({'total_epochs': 1}, r'total is set in two units|two units\. Keep one'),
    ({'total_steps': 1.5}, r'total_steps: steps=1.5 must be a whole number'),
    (
      {'part': {'every': 1}},
      r'part\.every=1 has no unit\. Use one of every_st',
    ),
    (
      {'data': {'source': {'target': 'vit_jax.data.folder.Folder'}}},
      r"data\.source: vit_jax\.data\.folder\.Folder: 'path' is missing",
    ),
    (
      {'data': {'transforms': [{'target': 'vit_jax.models.pooling.Mean'}]}},
      r"data\.transforms\.0\.target='.*Mean' is not a Transform",
    ),
    (
      {'data': {'transforms': [{'target': RESIZE}]}},
      r"data\.transforms\.0: .*Resize: 'size' is missing",
    ),
    ({'scale': '2'}, r"scale='2' is text, not a number"),
    ({'fast': 'False'}, r"fast='False' is text"),
    (
      {'number': {'target': 'decimal.Decimals'}},
      r"has no 'Decimals' \(did",
    ),
    ({'number': {'target': 'vit_jax.optin.sgd'}}, r"vit_jax has no 'optin'"),
    (
      {'number': {'target': 'no_such.thing'}},
      r"no module 'no_such'\. Is",
    ),
    (
      {'number': {'target': 'adam'}},
      r"'adam' cannot be imported\. A",
    ),
    (
      {'number': {'target': 'vit_jax.optim.optimizers'}},
      'is not a class or a function',
    ),
    ({'run': here('absent')}, "has no 'absent'"),
  ],
)
def test_mistakes(changes, message):
  with pytest.raises(ConfigError, match=message):
    call(**changes)


def test_all_mistakes_are_reported_before_anything_is_called():
  with pytest.raises(ConfigError) as error:
    call(scle=1, part={'sise': 2}, plain={'target': here('never')})
  assert "'scle'" in str(error.value) and "'sise'" in str(error.value)
  without = {k: v for k, v in MINIMAL.items() if k != 'total_steps'}
  with pytest.raises(ConfigError, match=r"start: 'total' is missing"):
    configs.run(ml_collections.ConfigDict(without), 'DIR')


def never():
  raise AssertionError('this is not called')


def test_a_missing_argument_is_an_error_where_an_object_is_needed():
  message = r"part: .*Strict: 'size' is missing"
  settings = ml_collections.ConfigDict({'run': here('strict_run'), 'part': {}})
  with pytest.raises(ConfigError, match=message):
    configs.run(settings, 'DIR')


@dataclasses.dataclass
class Strict:
  """A part with a required field."""

  size: int


def strict_run(workdir, *, part: Strict):
  return part


def test_a_module_that_fails_to_import_says_so_itself(tmp_path, monkeypatch):
  (tmp_path / 'broken_module.py').write_text('import surely_not_installed')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match='surely_not_installed'):
    configs.locate('broken_module.thing')


def test_locate_reaches_into_classes():
  fromkeys = configs.locate('collections.OrderedDict.fromkeys')
  assert fromkeys('ab').keys() == {'a', 'b'}


def test_required_placeholders():
  settings = ml_collections.ConfigDict({'run': here('start'), 'part': {}})
  settings.part.size = config_dict.required_placeholder(int)
  settings.scale = config_dict.required_placeholder(float)
  with pytest.raises(
    ConfigError, match=r'--config\.part\.size=\.\.\. --config\.scale=\.\.\.'
  ):
    configs.run(settings, 'DIR')


# The command line.


def settings():
  found = ml_collections.ConfigDict(
    {
      'lr': 0.1,
      'steps': 3,
      'name': 'text',
      'part': {'path': config_dict.placeholder(str)},
      'transforms': [{'size': 3}, {'size': 4}],
      'mesh': None,
    }
  )
  found.copy = {'path': found.part.get_oneway_ref('path')}
  return found.lock()


def test_any_value_can_be_set():
  found = settings()
  configs.override(
    found,
    [
      *('lr=1', 'steps=5', 'name=5', 'part.path=gs://x', 'mesh.fsdp=8'),
      *('optimizer.layer_decay.rate=0.75', 'transforms.1.size=8', 'flag'),
      *("freeze=('a.*', 'b')", 'target=optax.lion', 'off=false', 'none=None'),
    ],
  )
  assert (found.lr, found.steps, found.name) == (1.0, 5, '5')
  assert found.part.path == found.copy.path == 'gs://x'  # references follow
  assert found.mesh.fsdp == 8
  assert found.optimizer.layer_decay.rate == 0.75
  assert [t['size'] for t in found.transforms] == [3, 8]
  assert found.flag is True and found.off is False and found.none is None
  assert tuple(found.freeze) == ('a.*', 'b')
  assert found.target == 'optax.lion'


@pytest.mark.parametrize(
  ('assignment', 'message'),
  [
    ('steps=1.5', r'--config\.steps=1\.5: '),
    ('lr=fast', r'--config\.lr=fast: '),
    ('lr.x=1', r'--config\.lr\.x: lr is 0\.1, which has no keys'),
    ('transforms.2.size=1', r"'2' is not an index below 2"),
  ],
)
def test_values_that_do_not_fit(assignment, message):
  with pytest.raises(ConfigError, match=message):
    configs.override(settings(), [assignment])


def test_files(tmp_path):
  path = tmp_path / 'some.py'
  path.write_text('def get_config(argument="none"):\n  return argument\n')
  assert configs.load(path) == 'none'
  assert configs.load(f'{path}:L/16,a=b:c') == 'L/16,a=b:c'
  with pytest.raises(ConfigError, match=r'absent\.py is not a file'):
    configs.load(tmp_path / 'absent.py')
  path.write_text('')
  with pytest.raises(ConfigError, match='no function get_config'):
    configs.load(path)


def test_settings_are_what_is_set_and_the_defaults():
  found, _ = configs.plan_run(
    ml_collections.ConfigDict(
      MINIMAL | {'things': {'a': {**NUMBER, 'every_steps': 4}}}
    )
  )
  lines = list(configs.settings(found))
  for line in (
    'config.total_steps = 3',
    'config.scale = 1.0  # default',
    'config.part.size = 1  # default',
    'config.things.a.target = decimal.Decimal',
    "config.things.a.value = '1.5'",
    'config.things.a.every_steps = 4',
  ):
    assert line in lines


# Objects as JSON.


def test_objects_are_described_and_built_again():
  objects = (Resize((8, 6)), CentralCrop(4), Normalize(mean=(1.0, 2.0)))
  described = configs.describe(objects)
  assert configs.build(described) == objects
  model = VisionTransformer(**VIT_FIELDS)
  again = configs.build(configs.describe(model))
  assert again == model


def test_only_trusted_names_are_imported():
  for target in (
    'os.system',
    'vit_jax.models.vit.jax.devices',
    'vit_jax.models.os.system',
    'vit_jax.data.folder.Folder',
    'vit_jax.models.names.create',
    here('Strict'),
    7,
  ):
    with pytest.raises(ValueError, match=r'not in the list|has no'):
      configs.build([{'a': {'target': target, 'size': 1}}])
  package = __name__.split('.')[0]
  message = rf"trust=\('{package}',\) or --trust={package}"
  with pytest.raises(ValueError, match=message):
    configs.build({'target': here('Strict'), 'size': 1})
  made = configs.build({'target': here('Strict'), 'size': 1}, trust=(package,))
  assert made == Strict(1)


def test_what_cannot_be_described():
  with pytest.raises(ValueError, match='cannot be described in JSON'):
    configs.describe(object())
  partial = functools.partial(loss, smoothing=0.5)
  assert configs.describe(partial) == {'target': here('loss'), 'smoothing': 0.5}


def test_a_plan_is_not_yet_made():
  found, _ = configs.plan_run(
    ml_collections.ConfigDict(MINIMAL | {'plain': {'target': here('never')}})
  )
  with pytest.raises(AssertionError, match='this is not called'):
    found.make('DIR')
