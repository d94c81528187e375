"""Configs become objects, and every mistake in one has a clear error."""

import decimal

import ml_collections
import pytest
from ml_collections import config_dict

from vit_jax import build
from vit_jax.config import Reader, call, instantiate, locate

RESIZE = 'vit_jax.data.transforms.Resize'


def make(*args, sizes=(), scale: float = 1.0, fast=False, **rest):
  """Something to be built that shows what it got."""
  return args, sizes, scale, fast, rest


def strict(first, *, second=2):
  return first, second


def here(name):
  return f'{__name__}.{name}'


def test_nested_targets_are_built_first_also_in_lists():
  config = ml_collections.ConfigDict(
    {
      'target': 'collections.OrderedDict',
      'number': {'target': 'decimal.Decimal', 'value': '1.5'},
      'many': [{'target': 'decimal.Decimal', 'value': '2'}, 3],
      'plain': {'deep': ({'target': 'decimal.Decimal', 'value': '4'},)},
    }
  )
  assert dict(instantiate(config, more=5)) == dict(
    number=decimal.Decimal('1.5'),
    many=[decimal.Decimal(2), 3],
    plain={'deep': (decimal.Decimal(4),)},
    more=5,
  )
  assert config.number.target == 'decimal.Decimal'  # the config is unharmed


def test_locate_reaches_into_classes():
  assert locate('collections.OrderedDict.fromkeys')('ab').keys() == {'a', 'b'}


@pytest.mark.parametrize(
  ('target', 'message'),
  [
    ('vit_jax.optim.adan', r"vit_jax.optim has no 'adan' \(did you mean 'adam"),
    ('vit_jax.optin.adam', r"vit_jax has no 'optin'"),
    ('no_such_package.thing', r'cannot be imported.*package installed'),
    ('adam', r"'adam' cannot be imported\. A target is a dotted path"),
    (None, 'None cannot be imported'),
    ('vit_jax.optim', 'is no target: name a class or a function'),
  ],
)
def test_unknown_target(target, message):
  with pytest.raises(ValueError, match=message):
    instantiate({'target': target})


def test_a_module_that_fails_to_import_says_so_itself(tmp_path, monkeypatch):
  (tmp_path / 'broken_module.py').write_text('import surely_not_installed')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match='surely_not_installed'):
    locate('broken_module.thing')


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    ({'size': 3}, r"A 'target' is missing from \{'size': 3\}"),
    (
      {'target': here('make'), 'sizes': [{'target': RESIZE, 'sise': 3}]},
      r"Resize: no argument 'sise' \(did you mean 'size'\?\).*'size' is miss",
    ),
    ({'target': here('strict')}, r"strict: argument 'first' is missing"),
    (
      {'target': here('strict'), 'first': 1, 'third': 3},
      r"strict: no argument 'third'.*It takes: first, second",
    ),
    ({'target': here('make'), 'scale': '2'}, r"scale='2' is text, not a num"),
    ({'target': here('make'), 'fast': 'False'}, r"fast='False' is text"),
  ],
)
def test_wrong_arguments(config, message):
  with pytest.raises(ValueError, match=message):
    instantiate(config)
  with pytest.raises(ValueError, match=message):
    instantiate(ml_collections.ConfigDict(config))


def test_what_the_code_sets_the_config_cannot():
  with pytest.raises(ValueError, match=r"\['second'\] cannot be set in the"):
    call(strict, {'second': 1}, 0, second=2)


def test_check_arguments_knows_what_is_honoured_elsewhere():
  with pytest.raises(ValueError, match=r"did you mean 'clip_norm'.*Beside"):
    build.check_arguments(
      strict, {'clip_nrm': 1, 'first': 1}, also=['clip_norm']
    )


def test_reader_finds_what_nothing_read():
  config = Reader(
    ml_collections.ConfigDict(
      {
        'run': 'somewhere',
        'seed': 1,
        'sede': 2,
        'model': {'width': 1, 'depth': 2},
        'data': {'source': {'a': 1}},
        'nothing': None,
      }
    )
  )
  assert (config.seed, config.model.width) == (1, 1)
  assert config.get('nothing', 7) == 7
  assert config.get('absent', 8) == 8
  assert 'nothing' not in config and 'seed' in config
  assert config.unread() == ['data', 'model.depth', 'sede']
  build.resolve(config.data)  # whatever is built from is read
  assert config.unread() == ['model.depth', 'sede']
  with pytest.raises(
    ValueError,
    match=r"no config key 'model.depth'.*'sede' \(did you mean 'seed'",
  ):
    config.check_all_read('train')


def test_reader_names_what_is_missing():
  config = ml_collections.ConfigDict({'model': {'width': 1, 'depth': None}})
  config = Reader(config)
  with pytest.raises(ValueError, match=r"lacks 'modle' \(did you mean 'model'"):
    _ = config.modle
  with pytest.raises(ValueError, match=r"lacks 'model\.depth'"):
    _ = config.model.depth


def test_required_placeholders():
  config = ml_collections.ConfigDict({'seed': 1, 'data': {'source': {}}})
  config.data.source.path = config_dict.required_placeholder(str)
  config.lr = config_dict.required_placeholder(float)
  message = r'--config\.data\.source\.path=\.\.\. --config\.lr=\.\.\.'
  with pytest.raises(ValueError, match=message):
    Reader(config)
  with pytest.raises(ValueError, match=r'leaves source\.path to be set'):
    build.resolve(config.data)
  config.lr, config.data.source.path = 0.1, 'x'
  assert Reader(config).data.source.path == 'x'
