"""Configs become objects, and every mistake in one has a clear error."""

import dataclasses
import decimal
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import ml_collections
import pytest
from ml_collections import config_dict

from vit_jax import config as configs
from vit_jax.config import ConfigError
from vit_jax.data.pipeline import Data
from vit_jax.data.transforms import CentralCrop, Resize
from vit_jax.durations import Duration, Interval, steps
from vit_jax.models.dense import Normalize
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.types import HARMLESS, MACHINE, Count, Dtype, PathRule, Size

RESIZE = 'vit_jax.data.transforms.Resize'


def here(name):
  return f'{__name__}.{name}'


@dataclasses.dataclass(frozen=True)
class Part:
  """A part of a run with its own keys."""

  size: Count = 1
  every: Interval | None = None


@dataclasses.dataclass(frozen=True)
class Scheduled:
  """A target with keys of its own next to it."""

  thing: Callable = dataclasses.field(metadata={'rest': True})
  every: Duration | None = None


def start(
  workdir,
  *,
  number: decimal.Decimal,
  total: Interval,
  part: Part = Part(),
  things: Mapping[str, Scheduled] | None = None,
  transforms: Sequence[Any] = (),
  objective: Callable | None = None,
  plain: Any = None,
  preprocess: Any = Normalize(),
  data: Data | None = None,
  scale: float = 1.0,
  fast: bool = False,
  mode: Literal['softmax', 'sigmoid'] = 'softmax',
  rules: Sequence[tuple[PathRule, float]] = (),
  dtype: Dtype = 'float32',
  side: Size = 8,
  threads: Annotated[Count, MACHINE] = 1,
  outputs: Annotated[Part, HARMLESS] = Part(),
  provenance: configs.Provenance | None = None,
):
  """Return what it got, like a run would use it."""
  return dict(locals())


def loss(model, *, preprocess, smoothing=0.0):
  return 'loss', model, preprocess, smoothing


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
  # With a target, the annotation counts: a function is called later.
  later = call(preprocess={'target': here('loss')})['preprocess']
  assert later(1, preprocess=2) == ('loss', 1, 2, 0.0)


def test_what_lacks_arguments_becomes_a_partial():
  given = call(objective={'target': here('loss'), 'smoothing': 0.1})
  made = given['objective']('model', preprocess='p')
  assert made == ('loss', 'model', 'p', 0.1)
  for more in ({}, {'preprocess': 1, 'other': 1}, {'smoothing': 0.2}):
    name = next(iter(more.keys() - {'preprocess'}), 'preprocess')
    with pytest.raises(ConfigError, match=f'loss: .*{name}'):
      given['objective']('model', **more)


@pytest.mark.parametrize(
  ('changes', 'parts'),  # parts of the message: the key, the value, the hint
  [
    ({'numbr': 1}, ['numbr:', "did you mean 'number'"]),
    ({'totl_steps': 1}, ['totl_steps:', "did you mean 'total_steps'"]),
    ({'workdir': 'other'}, ['workdir:']),
    ({'size': 1, 'part': {'size': 2}}, ['size:', "did you mean 'part.size'"]),
    ({'part': {'sise': 1}}, ['part.sise:', "did you mean 'size'"]),
    ({'things': {'a': NUMBER | {'evry_steps': 1}}}, ['a.evry_steps:', 'every']),
    ({'things': {'a': {'every_steps': 1}}}, ['things.a', "'target'"]),
    ({'things': {'a': {'trget': 'b.c'}}}, ['things.a', "'target'", 'trget']),
    (
      {'transforms': [{'target': RESIZE, 'size': 3, 'sise': 3}]},
      ['transforms.0.sise:', 'Resize'],
    ),
    ({'total_epochs': 1}, ['total', 'two units']),
    ({'total_steps': 1.5}, ['total_steps:', '1.5']),
    ({'total_steps': '7'}, ['total_steps:', "'7'"]),
    ({'part': {'every': 1}}, ['part.every=1', 'every_steps']),
    ({'part': {'every_steps': 0}}, ['part.every_steps=0', 'above 0']),
    ({'total_epochs': 0, 'total_steps': None}, ['total_epochs=0', 'above 0']),
    ({'part': {'size': 0}}, ['part.size=0', 'at least 1']),
    ({'part': {'size': True}}, ['part.size=True', 'integer']),
    ({'part': 3}, ['part=3', 'Part']),
    (
      {'data': {'source': {'target': 'vit_jax.data.sources.folder.Folder'}}},
      ['data.source:', "'path'"],
    ),
    ({'scale': '2'}, ["scale='2'", 'number']),
    ({'scale': math.nan}, ['scale=nan', 'finite']),
    ({'fast': 'False'}, ["fast='False'", 'boolean']),
    ({'mode': 'sofmax'}, ["mode='sofmax'", "did you mean 'softmax'"]),
    ({'rules': [['[', 1.0]]}, ["rules=[['[', 1.0]]", 'regular expression']),
    ({'rules': [['a']]}, ["rules=[['a']]"]),
    ({'rules': 'abc'}, ["rules='abc'"]),
    ({'dtype': 'float8'}, ["dtype='float8'", 'bfloat16']),
    ({'side': (8, 0)}, ['side=(8, 0)', 'pixels']),
    ({'number': {'target': 'decimal.Decimals'}}, ['number.target', 'Decimal']),
    ({'number': {'target': 'vit_jax.optin.sgd'}}, ["'vit_jax.optin.sgd'"]),
    ({'number': {'target': 'no_such.thing'}}, ["no module 'no_such'"]),
    ({'number': {'target': 'adam'}}, ["'adam'"]),
    ({'number': {'target': 'vit_jax.optim'}}, ['number:', 'not a class']),
    ({'run': here('absent')}, ["'absent'"]),
    ({'run': None}, ["'run'"]),
  ],
)
def test_mistakes(changes, parts):
  with pytest.raises(ConfigError) as error:
    call(**changes)
  assert all(part in str(error.value) for part in parts)


def test_values_that_fit():
  given = call(rules=[['.*', 1]], dtype='bfloat16', side=[8, 6], scale=1)
  assert given['rules'] == [['.*', 1]] and given['side'] == [8, 6]
  assert call(mode='sigmoid', side=8)['mode'] == 'sigmoid'


def test_all_mistakes_are_reported_before_anything_is_called():
  with pytest.raises(ConfigError) as error:
    call(scle=1, part={'sise': 2}, plain={'target': here('never')})
  assert "'scle'" in str(error.value) and "'sise'" in str(error.value)
  without = {k: v for k, v in MINIMAL.items() if k != 'total_steps'}
  with pytest.raises(ConfigError, match=r"'total' missing.*total_epochs"):
    configs.run(ml_collections.ConfigDict(without), 'DIR')


def never():
  raise AssertionError('this is not called')


def test_a_missing_argument_is_an_error_where_an_object_is_needed():
  message = r"part: .*Strict: 'size' missing"
  settings = ml_collections.ConfigDict({'run': here('strict_run'), 'part': {}})
  with pytest.raises(ConfigError, match=message):
    configs.run(settings, 'DIR')


@dataclasses.dataclass
class Strict:
  """A part with a required field."""

  size: int


def strict_run(workdir, *, part: Strict, provenance=None):
  return part


def test_a_module_that_fails_to_import_says_so_itself(tmp_path, monkeypatch):
  (tmp_path / 'broken_module.py').write_text('import surely_not_installed')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match='surely_not_installed'):
    configs.locate('broken_module.thing')


def test_locate_reaches_into_classes():
  fromkeys = configs.locate('collections.OrderedDict.fromkeys')
  assert fromkeys('ab').keys() == {'a', 'b'}


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


def test_keys_next_to_a_new_target_stay_and_are_named(capsys):
  rule = {'target': 'optax.adamw', 'b1': 0.8, 'b2': 0.95, 'clip_norm': None}
  found = ml_collections.ConfigDict({'rule': rule, 'same': NUMBER})
  typed = [
    'rule.b1=0.8',
    'rule.target=optax.lion',
    'same.target=decimal.Decimal',
  ]
  configs.override(found, typed)
  assert found.rule.to_dict() == rule | {'target': 'optax.lion'}
  line = '--config.rule.target keeps b2=0.95 of the config file.\n'
  assert capsys.readouterr().err == line


def test_files(tmp_path):
  path = tmp_path / 'some.py'
  path.write_text('def get_config(argument="none"):\n  return argument\n')
  assert configs.load(path) == 'none'
  assert configs.load(f'{path}:L/16,a=b:c') == 'L/16,a=b:c'


def test_settings_are_what_is_set_and_the_defaults():
  found = configs.plan_run(
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
  marks = {each.key: each.marks for each in configs.entries(found)}
  assert marks['threads'] == {MACHINE} and marks['scale'] == frozenset()
  assert marks['outputs.size'] == {HARMLESS}


# Objects as JSON.


def test_objects_are_described_and_built_again():
  objects = (Resize((8, 6)), CentralCrop(4), Normalize(mean=(1.0, 2.0)))
  described = configs.describe(objects)
  assert configs.build(described) == objects
  for fields in ({}, {'posemb': None}):  # None is not its default
    model = VisionTransformer(**VIT_FIELDS, **fields)
    again = configs.build(json.loads(json.dumps(configs.describe(model))))
    assert again == model


def test_only_trusted_names_are_imported():
  for target in (
    'os.system',
    'vit_jax.models.vit.jax.devices',
    'vit_jax.models.os.system',
    'vit_jax.data.sources.folder.Folder',
    'vit_jax.zoo.names.create',
    here('Strict'),
    7,
  ):
    for nested in ({'a': 1}, [{'a': 1}], {'b': [[{'a': 1}]]}):
      text = json.dumps(nested).replace('1', json.dumps({'target': target}))
      with pytest.raises(ValueError, match=r'not in the list|has no'):
        configs.build(json.loads(text))
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
