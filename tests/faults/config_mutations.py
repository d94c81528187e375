"""Mutations of the shipped configs.

The mutations are made from the configs and from the signatures of everything
that they name: wrong types, numbers out of range, misspelt keys, missing keys,
wrong targets, two units.
"""

import copy
import dataclasses
import functools
import inspect
import math
import re
import typing
import zlib
from typing import Any

import ml_collections

from vit_jax import config as configs
from vit_jax.optim.durations import UNITS, Duration

# One argument of each shipped config. Their data are replaced.
# Runs come before studies: a mutation is made in the first base that has the
# argument, and the dry run of a study does not trace its runs.
BASES = (
  'pretrain_paper:imagenet,B/16,tiny',
  'finetune:cifar10,S/16,dev,polyak,tiny',
  *('finetune:cifar10,Mixer-B/16,tiny', 'finetune:flowers,R50x1,bit,tiny'),
  *('masked_patches:B/16,imagenet,tiny', 'train_folder:tiny'),
  *('pretrain_bit:imagenet,R50x1,tiny', 'pretrain_paper:imagenet21k,B/16,tiny'),
  'pretrain_scaling_vit:G/14,fsdp,tensor=2,tiny',
  *('pretrain_paper:jft,R50+L/32,tiny', 'pretrain_better_plain:S/16,tiny'),
  *('deit:deit3,tiny', 'deit:tiny'),
  *('evaluate_imagenet', 'fewshot'),
  'evaluate:tfds,accuracy,knn,logistic,probe',
  *('masked_patches_embedded:tiny', 'quickstart:tiny', 'ablations:shape,tiny'),
  *('scaling:compute,tiny', 'scaling:data,tiny', 'scaling_embedded:tiny'),
  *('scaling:shape,tiny', 'transfer:R50x1,pets,bit,tiny'),
  'vtab:seeds=1,sweep,dtd,tiny',
)


class Mutation(typing.NamedTuple):
  """A change of one key of a base.

  Attributes:
    base: config and argument, one of BASES.
    path: dotted path of the key.
    kind: kind of the change, such as 'out of range' or 'misspelt'.
    new: key that replaces the last one of the path; None to remove that key.
    value: value of the new key, as Python source, because it can be NaN.
    annotation: annotation of the argument, as text.
    argument: full name of the argument. Each is mutated in one base only.
  """

  base: str
  path: str
  kind: str
  new: str | None
  value: str
  annotation: str
  argument: str

  def __str__(self) -> str:
    *parents, _ = self.path.split('.')
    where = '.'.join([*parents, self.new or ''])
    if self.new is None:
      return f'{self.base} without {self.path}'
    return f'{self.base} {where}={self.value}'


NUMBERS = {
  'out of range': (
    *('0', '-1', 'math.nan', 'math.inf', '-math.inf', '10**9', '2**70'),
    *('1e-300', '1e300'),
  ),
  'wrong type': ("'3'", "'many'", 'None', '[1]', 'True', "{'a': 1}", '1.5'),
}
TEXTS = {
  'out of range': ("''", "'bogus'", "'['"),
  'wrong type': ('3', '1.5', 'None', "['a']", 'True', "{'a': 1}"),
}
BOOLS = {'wrong type': ("'yes'", '2', 'None', '[True]', '0.5', "{'a': 1}")}
LISTS = {
  'out of range': ('()', '(0,)', '(-1, -1)', '(math.nan,)', '(10**9, 10**9)'),
  'wrong type': ("'text'", '3.5', 'None', "('x', None)", '((),)', "{'a': 1}"),
}
OTHERS = {'wrong type': ("'text'", '3', '[1]', "{'a': 1}", 'True')}
TARGETS = {
  'wrong target': (
    *("'no_such.module.Name'", "'vit_jax.models.vit.VisionTransfromer'"),
    *(
      "'vit_jax.optim.optimizers'",
      "'os.getcwd'",
      "'vit_jax.data.transforms.FlipLR'",
    ),
    *("'vit_jax.evals.classification.Classification'", "'optax.adamw'"),
    *("'vit_jax.models.pooling.Mean'", 'None', '3', "''"),
  )
}


@functools.cache
def base(name: str) -> ml_collections.ConfigDict:
  """Return a base that runs without files: its data are small and embedded."""
  config = configs.load(f'vit_jax:{name}').copy_and_resolve_references()
  with config.unlocked():
    for part in (config, *config.get('runs', {}).values()):
      is_evaluation = part.run == 'vit_jax.evaluate.evaluate'
      if is_evaluation:
        part.image_shape = (24, 24, 3)
        part.model = _model()
      _embed(part, 24 if is_evaluation else None)
      for key in ('init_from', 'mesh'):  # they need files and devices
        if key in part:
          del part[key]
    if 'shared' in config:
      del config.shared
  return config


def _model():
  config = configs.load('vit_jax:pretrain_paper:imagenet,B/16,tiny')
  return config.model.to_dict() | {'num_classes': 10}


def _embed(value, size=None):
  """Replace every source in a config, in place, with one without files.

  If a size is given, all images are resized to it.
  """
  items = value.items() if isinstance(value, ml_collections.ConfigDict) else ()
  for key, inner in list(items):
    if key == 'source':
      if 'embedded' not in inner.target:
        value.source = {
          'target': 'vit_jax.data.embedded.digits.Synthetic',
          **{'image_size': 48, 'num_classes': 10, 'num_examples': 64},
        }
        value.transforms = [
          x for x in value.get('transforms', ()) if 'vtab' not in x['target']
        ]
      if size:
        resize = 'vit_jax.data.transforms.Resize'
        value.transforms = [{'target': resize, 'size': size}]
        value.image_size = None
    elif key == 'class_weights':
      value.class_weights = (1.0,) * 10
    else:
      _embed(inner, size)


def mutations() -> list[Mutation]:
  """Return all mutations, each argument once, in a random order.

  The order of two mutations does not change when others come or go.
  """
  found: dict[Any, Mutation] = {}
  for name in BASES:
    for each in _of_base(name):
      found.setdefault((each.argument, each.kind, each.value), each)
  return sorted(found.values(), key=lambda x: zlib.crc32(repr(x).encode()))


def _of_base(name):
  config = base(name)
  runs = {f'runs.{k}.': v for k, v in list(config.get('runs', {}).items())[:2]}
  for prefix, part in {'': config, **runs}.items():
    part = part.copy_and_resolve_references()
    if 'best_of' in part:
      del part.best_of
    call = configs.plan_run(part)
    for path, argument, annotation, value, given in _leaves(call, ''):
      yield from _of_leaf(
        *(name, f'{prefix}{path}', argument, annotation, value, given)
      )


def _leaves(call, where):
  """Yield (path, full argument, annotation, value, whether it is set)."""
  fn = call.fn if isinstance(call, configs.Call) else type(call)
  hints = _hints(fn)
  rest = ''
  if dataclasses.is_dataclass(fn):
    fields = [f.name for f in dataclasses.fields(fn) if f.metadata.get('rest')]
    rest = fields[0] if fields else ''
  full = f'{fn.__module__}.{fn.__qualname__}'
  if isinstance(call, configs.Call) and where and not rest:
    yield f'{where}.target', f'{_slot(where)}.target', 'target', full, True
  for name, parameter in inspect.signature(fn).parameters.items():
    if parameter.kind not in (
      parameter.POSITIONAL_OR_KEYWORD,
      parameter.KEYWORD_ONLY,
    ) or name in (*_OF_FLAGS, *getattr(call, 'hidden', ())):
      continue
    if isinstance(call, configs.Call):
      given, value = name in call.kwargs, call.kwargs.get(name, _MISSING)
    else:
      given, value = False, getattr(call, name)
    if value is _MISSING:
      value = parameter.default
    if value is parameter.empty:
      continue  # supplied by the code
    path = where if name == rest else f'{where}.{name}' if where else name
    annotation = hints.get(name, Any)
    if isinstance(value, Duration):
      yield f'{path}_{value.unit}', f'{full}.{name}', Duration, value, given
    elif _has_leaves(value):
      yield from _leaves(value, path)
    elif isinstance(value, dict | list | tuple) and _holds_calls(value):
      yield path, f'{full}.{name}', annotation, value, given
      items = value.items() if isinstance(value, dict) else enumerate(value)
      for key, inner in items:
        if _has_leaves(inner):
          yield from _leaves(inner, f'{path}.{key}')
        elif isinstance(inner, dict):
          for below, innermost in inner.items():
            if _has_leaves(innermost):
              yield from _leaves(innermost, f'{path}.{key}.{below}')
    else:
      unit = '_steps' if 'Duration' in str(annotation) else ''
      yield f'{path}{unit}', f'{full}.{name}', annotation, value, given


_MISSING = object()
# Set by Flax, or by flags of the command line.
_OF_FLAGS = ('parent', 'name', 'dry_run', 'member', 'report_only')


def _slot(where):
  """Return a path without names that differ between configs."""
  return re.sub(r'\b(runs|evals|data|readouts)\.\w+', r'\1.*', where)


def _has_leaves(value):
  is_object = dataclasses.is_dataclass(value) and not inspect.isclass(value)
  return isinstance(value, configs.Call) or is_object


def _holds_calls(value):
  if isinstance(value, dict):
    value = value.values()
  return any(
    _has_leaves(x) or (isinstance(x, dict) and _holds_calls(x)) for x in value
  )


def _hints(fn):
  try:
    return typing.get_type_hints(fn.__init__ if inspect.isclass(fn) else fn)
  except (NameError, TypeError, AttributeError):
    return {}


def _of_leaf(name, path, argument, annotation, value, given):
  *parents, key = path.split('.')
  text = annotation if isinstance(annotation, str) else _text(annotation)

  def mutation(kind, new, value):
    return Mutation(name, path, kind, new, value, text, argument)

  for kind, values in _values(annotation, value).items():
    for each in values:
      if each != repr(value):
        yield mutation(kind, key, each)
  shown = repr(getattr(value, 'value', value))
  if _is_plain(value):
    yield mutation('misspelt', key[:1] + key[2:] + 'x', shown)
    if parents and not parents[-1].isdecimal():
      # The value under a misspelt parent, as a flag would set it.
      above = '.'.join([*parents[:-1], parents[-1] + 'x', key])
      yield Mutation(
        *(name, above, 'misspelt above', key, shown, text, f'{argument} above')
      )
  if given and not isinstance(value, list | dict | tuple):
    yield mutation('missing', None, '')
  if annotation is Duration:
    stem = key.rpartition('_')[0]
    other = next(u for u in UNITS if not key.endswith(u))
    yield mutation('two units', f'{stem}_{other}', '1')
    yield mutation('no unit', stem, '1')


def _text(annotation):
  return str(annotation).removeprefix("<class '").removesuffix("'>")


def _is_plain(value):
  return value is None or isinstance(value, bool | int | float | str | Duration)


def _values(annotation, value):
  """Return {kind: new values} of a leaf."""
  value = getattr(value, 'value', value)
  text = str(annotation)
  if annotation == 'target':
    return TARGETS
  if isinstance(value, bool) or (value is None and 'bool' in text):
    return BOOLS
  if isinstance(value, int | float) or (value is None and is_number(text)):
    return NUMBERS
  if isinstance(value, str) or (value is None and 'str' in text):
    return TEXTS
  if isinstance(value, list | tuple) and not _holds_calls(value):
    return LISTS
  return OTHERS


def is_number(annotation: str) -> bool:
  """Return whether an annotation, as text, permits a number."""
  return bool(re.search(r'\b(int|float|Duration)\b', annotation))


def mutate(mutation: Mutation) -> ml_collections.ConfigDict:
  """Return the base with the mutation, as a config file could have it."""
  values = copy.deepcopy(base(mutation.base).to_dict())
  *parents, key = mutation.path.split('.')
  node = values
  for parent in parents:
    if isinstance(node, list | tuple):
      node = node[int(parent)]
    else:
      if isinstance(node.get(parent), tuple):
        node[parent] = list(node[parent])
      node = node.setdefault(parent, {})
  if mutation.kind != 'two units':
    node.pop(key, None)
  if mutation.new is not None:
    node[mutation.new] = read(mutation.value)
  return ml_collections.ConfigDict(values)


def read(value: str) -> Any:
  """Return the value of Python source, such as 'math.nan'."""
  return eval(value, {'math': math})
