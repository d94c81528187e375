"""Weights of all formats, behind two functions: `read` and `write`.

  a workdir, or WORKDIR/checkpoints/STEP, with model.json    (read only)
  vit_jax      NAME.npz and NAME.json: any model, also your own
  npz          NAME.npz as the paper's authors publish them, and NAME.json
  timm         a folder: config.json, model.safetensors
  hf           a folder: these and preprocessor_config.json (transformers)

Also read: big_vision's .npz, files as authors publish them (original.py), and
ONNX files with names of timm or transformers. NAME.json is ours and describes
the model, as model.json does; published files have none. The format is
recognised by the names of the arrays. Nothing in a file is executed: pickles
are refused, and a file may only name the classes that `config.build` trusts.
"""

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from etils import epath

from vit_jax import config, tree
from vit_jax.config.values import hints_of, misfit
from vit_jax.io.files import read_json, write_json
from vit_jax.models.pooling import Head
from vit_jax.models.vit import Classifier, VisionTransformer, as_pair
from vit_jax.runs import workdirs
from vit_jax.runs.records import read_records
from vit_jax.types import PathLike, UserError
from vit_jax.weights import (
  array_files,
  bundle,
  family,
  huggingface,
  npz,
  original,
  timm,
)
from vit_jax.weights.bundle import Weights
from vit_jax.zoo import published

_WRITERS: dict[str, Any] = {'npz': npz, 'timm': timm, 'hf': huggingface}
_READERS = {'original': original} | _WRITERS  # the first that fits
FORMATS = ('vit_jax', *_WRITERS)
NPZ_FORMATS = ('vit_jax', 'npz')
_SAFETENSORS = 'model.safetensors'
# Models in a folder of the Hub's cache and of a Trainer, perhaps in shards.
_NESTED = [f'{x}/{_SAFETENSORS}*' for x in ('snapshots/*', 'checkpoint-*')]
_ENDINGS = ('.npz', '.safetensors', '.safetensors.index.json', '.onnx')
# What model.json and NAME.json have: objects, and plain values.
_OBJECTS = ('model', 'preprocess', 'transforms', 'decode', 'targets')
_USE = (*_OBJECTS, 'image_shape', 'class_names', 'activation', 'thresholds')
_USE += ('patch_resize',)
_PICKLES = ('.bin', '.pth', '.pt', '.ckpt', '.pkl')
# Parts that PyTorch's wrappers put into names, and DINOv2's chunks of layers.
_WRAPPER = r'(?<![^.])(_orig_mod|_(fsdp|checkpoint)_wrapped_module)\.'
_CHUNK = r'(?<=\bblocks\.)\d+\.(?=\d+\.)'


def find(path: PathLike | None, step: int | None = None) -> None:
  """Raise ValueError if there are no weights; download a remote file."""
  _, source = _locate(path, step)
  if source is not None:
    array_files.fetch(source, keep=lambda names: {})  # but no shard


def read(
  path: PathLike | None,
  *,
  step: int | None = None,
  ema: bool | Literal['auto'] = 'auto',
  trust: Sequence[str] = (),
  values: bool = True,
  **options: Any,
) -> Weights:
  """Return Weights of any format in the table above.

  Args:
    path: file or folder; local, gs://, s3://, http(s)://, hf://USER/MODEL as in
      `array_files.from_hub`, or package:NAME/FILE of an installed package.
    step, ema: for a workdir only, see `checkpoint.load_params`.
    trust: packages whose classes the file may name, for models and transforms
      of your own: ('my_package',).
    values: False: params are empty. Of a workdir only model.json is read; of a
      file names, shapes and types.
    **options: for what a file does not contain: grid=(rows, columns) of a
      position table that is not a square; image_size; use_size, of images
      later, which decides between grids; prefix='teacher.' of names; new_head=
      True to leave out a head of unknown name; and fields of the model as in
      `bundle.replace`, such as num_heads, 'block.mlp' or dtype.

  Raises:
    ValueError: there is nothing; the format is unknown; the file is a pickle;
      arrays are missing, unexpected or of another shape (lists all).
  """
  for name in ('grid', 'image_size', 'use_size', 'prefix'):
    if options.get(name, '') is None:
      del options[name]
  notes: list[str] = []

  def keep(names):
    arrays = dict(zip(names, names))
    found, notes[:] = _unwrapped(arrays, options.get('prefix'))
    return found

  try:
    directory, source = _locate(path, step, keep)
    if step is not None and source is not None:
      raise UserError(f'step={step} applies only to workdirs. Leave it out.')
    if directory is not None:
      weights = _described(workdirs.description(directory), trust, options)
      if values:
        from vit_jax.runs import checkpoint  # with Orbax, for workdirs only

        params, _ = checkpoint.load_params(directory, ema=ema)
        weights.params = _fitting(params, weights)
      weights.step = int(directory.name)
      weights.thresholds = _thresholds(directory)
    else:
      weights = _read_file(source, trust, options, values, keep, notes)
    count = getattr(weights.model, 'num_classes', None)
    if count and not options.get('new_head'):
      bundle.check_names(weights.class_names, count)
    size = weights.image_shape[:2]
    if as_pair(options.get('image_size', size)) != size:
      raise UserError(
        f'The weights are for images of {size[0]}x{size[1]}. Leave image_size '
        'out; `pretrained.load` adapts weights.'
      )
    bad = [k for k, x in weights.params.items() if not np.isfinite(x).all()]
    if bad:
      raise UserError(f'{bad[0]} has NaN or infinite values. Use another file.')
  except UserError as error:
    if str(path) in str(error):
      raise
    raise UserError(f'{path}: {error}') from error
  weights.origin += f', {directory or path}'
  if licence := published.licence(str(path).removeprefix('hf://')):
    weights.notes.append(f'  licence: {licence}')
  return weights if values else dataclasses.replace(weights, params={})


def _locate(path, step, keep=lambda names: {}):
  """Return (directory of a checkpoint, None), or (None, path of a file)."""
  if path is None:
    raise UserError(
      'No weights are named. Set --config.init_from.path=PATH to a workdir, a '
      'checkpoint, or a weights file.'
    )
  path = str(path)
  if path.startswith('hf://'):
    path = array_files.from_hub(path, keep)
  elif path.startswith('package:'):
    path = array_files.from_package(path)
  if path.startswith(('http://', 'https://')) or path.endswith(_ENDINGS):
    return None, path  # no folder has to be listed, which needs more packages
  folder, known = epath.Path(path), []
  if folder.is_file():
    return None, path
  if folder.is_dir() and not (folder / 'checkpoints').exists():
    names = sorted(child.name for child in folder.iterdir())
    known = [name for name in names if name.endswith(_ENDINGS)]
    # A pickle is refused when it is read.
    known = known or [x for x in names if x.endswith(_PICKLES)][:1]
    found = [] if known else [x for k in _NESTED for x in folder.glob(k)]
    known += sorted(str(x.relative_to(folder)) for x in found)
  for name in (f'{_SAFETENSORS}.index.json', _SAFETENSORS):
    known = [name] if name in known else known
  if len(known) > 1:
    raise UserError(f'{path} has {", ".join(known)}. Name one of them.')
  if known:
    return None, f'{path}/{known[0]}'
  directory = workdirs.find_checkpoint(path, step)
  if not (directory / 'params').exists():
    steps = [*{*workdirs.steps(directory.parent)} - {int(directory.name)}]
    raise UserError(f'{directory} is not whole. Use --step=N, one of {steps}.')
  return directory, None


def _read_file(source, trust, options, values, keep, notes):
  name = pathlib.PurePosixPath(source).with_suffix('.json').name
  is_torch = source.endswith(('.safetensors', '.json', '.onnx'))
  content = None if is_torch else _sibling(source, name)
  is_described = bool(content and 'model' in content)
  keep = None if is_described else keep
  local = array_files.fetch(source, keep=keep)
  arrays = array_files.read(local, values=values, keep=keep)
  is_npz = family.recognise(npz.FAMILIES, arrays)
  if is_described:
    weights = _described(content, trust, options)
    if is_npz:
      size = weights.image_shape[:2]
      arrays = npz.read(arrays, image_size=size, grid=weights.grid).params
    weights.params = _fitting(arrays, weights)
    return weights
  options.pop('prefix', None)
  config = None if is_npz else _sibling(source, 'config.json')
  first = {'hf': huggingface} if 'model_type' in (config or {}) else {}
  for name, reader in (first | _READERS).items():
    if name == 'original' and 'lm_head.weight' in arrays:
      continue  # timm's EVA has a mask vector, too
    if family.recognise(reader.FAMILIES, arrays):
      settings = config
      if name == 'original':
        settings = _sibling(source, 'open_clip_config.json')
      if name == 'hf' and settings is not None:
        new = _sibling(source, 'processor_config.json') or {}
        old = _sibling(source, 'preprocessor_config.json')
        settings['preprocessor_config'] = new.get('image_processor', old)
      return _interpret(reader, arrays, settings, options, notes)
  raise UserError(
    f'The file has the arrays {", ".join(sorted(arrays)[:8])}, .... This is '
    f'none of the known formats: {", ".join(FORMATS)}, big_vision.'
  )


def _unwrapped(arrays, prefix):
  """Return ({name: array}, notes) without the prefix of wrappers."""
  if lora := [name for name in arrays if '.lora_' in name]:
    raise UserError(
      f'It has an adapter that is not merged (LoRA), {lora[0]}. With peft, '
      'save the whole model: model.merge_and_unload().save_pretrained(FOLDER)'
    )
  names = {k: re.sub(_CHUNK, '', re.sub(_WRAPPER, '', k)) for k in arrays}
  families = [family for x in _READERS.values() for family in x.FAMILIES]
  known = sorted(family.prefixes(families, [*names.values()]))
  found = [x for x in known if x.startswith(prefix or '')]
  # Of a prefix and a longer one, the first has the whole model.
  found = [x for i, x in enumerate(found) if not x.startswith(tuple(found[:i]))]
  if len(found) > 1 or (prefix and not found):
    raise UserError(
      f'prefix={prefix!r}: the file has models below the names {known}. Choose '
      'by prefix=, --config.init_from.prefix=, or in a tool --set prefix='
    )
  start = ''.join(found)
  used = {k: x[len(start) :] for k, x in names.items() if x.startswith(start)}
  outer = start.removesuffix('encoder.')  # timm's, next to which is the head
  heads = [f'{outer}head.weight', f'{outer}head.bias'] if outer != start else []
  used |= {k: x[len(outer) :] for k, x in names.items() if x in heads}
  notes = [f'  {k}, ... read as {x}' for k, x in used.items() if k != x][:1]
  if spare := names.keys() - used.keys():
    notes.append(f'  {len(spare)} other arrays left out, such as {min(spare)}')
  return family.renamed(arrays, used), notes


def _interpret(reader, arrays, settings, options, notes):
  """Return Weights of a file; say what is unknown without config.json."""
  is_bare = settings is None and reader in (timm, huggingface)
  try:
    weights = reader.read(arrays, settings, **options)
  except Exception as e:  # values in config.json may have any type
    text = f'config.json, an array or an option is not as expected: {e!r:.200}.'
    text = str(e) if isinstance(e, UserError) else text
    hint = "\nPut the model's config.json next to the file." * is_bare
    raise UserError(f'{text}{hint}') from e
  weights.notes[:0] = notes
  bundle.assume(weights, {}, ['NAME.json'] * (reader is npz))
  if is_bare and (block := getattr(weights.model, 'block', None)):
    weights.notes.append(
      '  assumed without a config.json: norms before attention and MLP, '
      f'{block.mlp}, norm_eps={block.norm_eps}, '
      f'num_heads={weights.model.num_heads}, {weights.model.posemb}, '
      f'{weights.model.pooling}'
    )
  return weights


def _sibling(path, name):
  """Return the JSON in another file of the folder; None if there is none."""
  folder = path.rpartition('/')[0] or '.'
  file = array_files.fetch(f'{folder}/{name}', missing_ok=True)
  return None if file is None else read_json(file)


def _described(content, trust, options):
  """Return Weights without parameters from model.json or NAME.json."""
  hints = {'image_size', 'use_size', 'new_head'}
  given = {k: options[k] for k in options.keys() - hints}
  hints, found = hints_of(Weights), {}
  for name in _USE:
    value = content.get(name)
    if name in _OBJECTS:
      value = config.build(value, trust=trust)
    if value is not None or name in ('model', 'image_shape'):
      if reason := misfit(value, hints[name]):
        raise UserError(f'{name}={value!r:.100} is damaged: {reason}.')
      found[name] = value
  model, image_shape = found.pop('model'), tuple(found.pop('image_shape'))
  if isinstance(model, Classifier) and hasattr(model, 'scan'):
    given = {'scan': False} | given
  model = bundle.replace(model, **given)
  return Weights(
    model, {}, image_shape, origin='vit_jax', is_described=True, **found
  )


def _thresholds(directory):
  """Return the thresholds that an evaluator chose at a checkpoint, by label."""
  name, found = '/threshold/', {}
  for record in read_records(directory.parent.parent):
    if record['step'] == int(directory.name):
      chosen = {k: x for k, x in record.items() if name in k}
      found = found or {k.partition(name)[2]: x for k, x in chosen.items()}
  return found


def _fitting(params, weights):
  """Return the parameters that a described model uses, layers unrolled."""
  model = weights.model
  if isinstance(model, Classifier):
    params = tree.unstack_blocks(params)
  unused = ['objective/']
  if not getattr(getattr(model, 'embedding', None), 'mask_token', True):
    unused.append('mask')
  params = {k: v for k, v in params.items() if not k.startswith(tuple(unused))}
  if lines := tree.diff(params, bundle.shapes(model, weights.image_shape)):
    raise UserError(
      'The parameters are not those of the model that is described next to '
      f'them. Parameters (-), model (+):\n{lines}'
    )
  return params


def write(weights: Weights, path: PathLike, format: str) -> list[epath.Path]:
  """Write a file (vit_jax, npz) or a folder (timm, hf); return the paths.

  If readers of the format would not compute the same, raises UserError.
  """
  if format not in FORMATS:
    raise UserError(f'format={format!r} must be one of {", ".join(FORMATS)}.')
  arrays, texts = weights.params, {}
  if format != 'vit_jax':
    try:
      if format == 'npz' and type(weights.model) is VisionTransformer:
        weights = bundle.with_table(weights)  # which NAME.json describes
      head = getattr(weights.model, 'head', None)
      if isinstance(head, Head) and weights.model.num_classes:
        head, params = head.plain(weights.params)
        model = weights.model.clone(head=head)
        weights = dataclasses.replace(weights, model=model, params=params)
      arrays, texts = _WRITERS[format].write(weights)
    except UserError as e:
      raise UserError(
        f'{format} cannot hold this model. {e} Use --format=vit_jax instead.'
      ) from e
    arrays = {k: array_files.float32(v) for k, v in arrays.items()}
  path = epath.Path(path)
  if format in NPZ_FORMATS:
    folder, file = path.parent, path
    texts = {path.with_suffix('.json').name: describe_use(weights)}
  else:
    folder, file = path, path / _SAFETENSORS
  folder.mkdir(parents=True, exist_ok=True)
  array_files.write(file, arrays)
  for name, content in texts.items():
    write_json(folder / name, content)
  return [file, *(folder / name for name in texts)]


def describe_use(weights: Weights) -> dict[str, Any]:
  """Return the content of NAME.json."""
  return {x: config.describe(getattr(weights, x)) for x in _USE}
