"""Weights files of every kind that is read or written, behind two functions.

  ours         a workdir, or WORKDIR/checkpoints/STEP
  npz          NAME.npz as the paper's authors publish them, and NAME.json
  big_vision   NAME.npz of big_vision, and NAME.json
  timm         a folder: config.json, model.safetensors
  hf           a folder: these and preprocessor_config.json (transformers)

NAME.json is ours, and need not be there: it holds what an npz cannot. Which
format a file has is seen in the names of its arrays. Nothing in any of them is
executed: no pickle, and no name in a file is imported but those in `bundle`.
"""

import dataclasses
import json

from etils import epath

from vit_jax import checkpoint
from vit_jax.models.names import MIXER, RESNET, SIZES, VIT
from vit_jax.weights import (
  arrays,
  big_vision,
  huggingface,
  original,
  ours,
  timm,
)
from vit_jax.weights.bundle import check_targets
from vit_jax.weights.grids import pair, stride

FORMATS = {
  'npz': original,
  'big_vision': big_vision,
  'timm': timm,
  'hf': huggingface,
}
_SAFETENSORS = 'model.safetensors'
_KNOWN_ELSEWHERE = {  # values of fields that others have, too
  'target': (VIT, RESNET, MIXER),
  'posemb': (None, 'learned', 'sincos2d', 'none'),
  'posemb_at': (None, 'stem'),
  'patch_stride': (None,),
  'mask_token': (None, False),
}
# Fields of models that their parameters do not tell.
_UNTOLD = ('gelu', 'norm_eps', 'norm_after_pooling', 'pooling', 'posemb')


def find(path, step=None):
  """Makes sure that there are weights, before any long work; see `read`.

  Remote files are fetched, and wait in the cache.

  Raises:
    ValueError: nothing there.
  """
  _, source = _locate(path, step)
  if source is not None:
    arrays.fetch(source)


def read(path, *, step=None, ema='auto', **options):
  """Reads weights of any format that the table above has.

  Args:
    path: file or folder; local, gs://, s3://, http(s):// or hf://USER/MODEL.
    step, ema: of a run of ours, see `checkpoint.load_params`.
    **options: for what a file does not tell: num_heads; grid=(rows, columns)
      of a position table that is no square; image_size; and fields of the
      model such as gelu, norm_eps, or dtype.

  Returns:
    Weights.

  Raises:
    ValueError: nothing there; no format that is read; a part missing, too
      many, or of another shape, all of it as a diff; a pickle.
  """
  options = {k: v for k, v in options.items() if v is not None}
  directory, source = _locate(path, step)
  if directory is not None:
    weights = ours.read(directory, ema, options)
  else:
    weights = _read_theirs(path, source, options)
  shape, asked = weights.image_shape, options.get('image_size')
  if asked is not None and pair(asked) != tuple(shape[:2]):
    raise ValueError(
      f'image_size={asked}, but {path} is for images of {shape[0]}x{shape[1]}. '
      'Leave it out; another size is for `pretrained.load` to make, or for '
      "evaluate's image_shape."
    )
  return weights


def _locate(path, step):
  """(directory of a checkpoint of ours, None), or (None, file of theirs)."""
  if path is None or _is_ours(path):
    return checkpoint.find(path, step), None
  if step is not None:
    raise ValueError(f'{path} is no run of ours; step={step} means nothing.')
  return None, _file(str(path))


def _read_theirs(path, source, options):
  file = arrays.fetch(source)
  is_npz = arrays.kind(file) == 'npz'
  found = arrays.read_npz(file) if is_npz else arrays.read_safetensors(file)
  name = next((n for n, m in FORMATS.items() if m.recognise(found.keys())), '')
  if not name:
    some = ', '.join(sorted(found)[:8]) + (', ...' if len(found) > 8 else '')
    raise ValueError(
      f'{path} holds the arrays {some}: no weights that are known here, which '
      f'are those of {", ".join(FORMATS)}.'
    )
  module = FORMATS[name]
  try:
    if is_npz:
      sidecar = _sibling(source, _stem(source) + '.json')
      weights = _read_npz(module, found, sidecar, options)
    else:
      weights = module.read(found, _config(name, source), **options)
  except ValueError as e:
    raise ValueError(f'{path}: {e}') from e
  weights.origin = f'{weights.origin or name}, {path}'
  weights.notes += _unusual(weights.settings)
  return weights


def write(weights, path, format, **options):
  """Writes weights; returns the paths of the files written.

  Args:
    weights: Weights.
    path: of the file (npz, big_vision) or the folder (timm, hf).
    format: a key of FORMATS.
    **options: of the format's own `write`.

  Raises:
    ValueError: the format cannot hold such a model.
  """
  if format not in FORMATS:
    raise ValueError(f'format={format!r}; there are {", ".join(FORMATS)}.')
  _check_known_elsewhere(weights.settings, format)
  path = epath.Path(path)
  out, files = FORMATS[format].write(weights, **options)
  if format in ('npz', 'big_vision'):
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays.write_npz(path, out)
    files = {
      path.with_suffix('.json').name: _rest(weights, FORMATS[format], out)
    }
    folder, written = path.parent, [path]
  else:
    path.mkdir(parents=True, exist_ok=True)
    folder, written = path, [path / _SAFETENSORS]
    arrays.write_safetensors(written[0], out, {'format': 'pt'})
  for name, content in files.items():
    (folder / name).write_text(json.dumps(content, indent=2) + '\n')
    written.append(folder / name)
  return written


def _check_known_elsewhere(settings, format):
  """Raises ValueError for what models here alone have."""
  for name, known in _KNOWN_ELSEWHERE.items():
    if settings.get(name) not in known:
      remedy = 'Use the checkpoint of the run as it is.'
      if name == 'mask_token':
        remedy = 'Read it without (convert: --set pooling=token --set '
        remedy += 'mask_token=false --num_classes=0).'
      raise ValueError(
        f'{name} is {settings[name]!r}, which nothing but models here has: '
        f'{format} cannot hold it. {remedy}'
      )


def _unusual(settings):
  """A note where the last layers of a published size may be missing."""
  keys = ('width', 'mlp_dim', 'num_heads')
  for name, (width, depth, mlp_dim, num_heads) in SIZES.items():
    same = [settings.get(key) for key in keys] == [width, mlp_dim, num_heads]
    if same and settings['depth'] < depth:
      have = settings['depth']
      return [f'  {have} layers are all there are; ViT-{name} has {depth}']
  return []


def _is_ours(path):
  """Whether this is to be taken for a workdir, or a checkpoint in one."""
  if str(path).startswith(('http://', 'https://', 'hf://')):
    return False
  path = epath.Path(path)
  if not path.is_dir():
    return not path.suffix and not path.exists()
  names = {child.name for child in path.iterdir()}
  return 'checkpoints' in names or any(
    name.isdigit() or name == 'params' for name in names
  )


def _file(path):
  """The file with the arrays: the path itself, or one in the folder."""
  if path.startswith('hf://'):
    folder = path.count('/') < 4  # hf://USER/MODEL
    return f'{path}/{_SAFETENSORS}' if folder else path
  if path.startswith(('http://', 'https://')) or not epath.Path(path).is_dir():
    return path
  names = sorted(child.name for child in epath.Path(path).iterdir())
  for name in (f'{_SAFETENSORS}.index.json', _SAFETENSORS):
    if name in names:
      return f'{path}/{name}'
  known = [n for n in names if n.endswith(('.safetensors', '.npz'))]
  if len(known) != 1:
    raise ValueError(
      f'{path} is no run of ours, and no folder with one weights file: it has '
      f'{", ".join(names) or "nothing"}. Expected {_SAFETENSORS}, or name the '
      'file.'
    )
  return f'{path}/{known[0]}'


def _config(format, source):
  """config.json, and in it HF's preprocessor_config.json; None without it."""
  config = _sibling(source, 'config.json')
  if format == 'hf' and (more := _sibling(source, 'preprocessor_config.json')):
    config = (config or {}) | {'preprocessor_config': more}
  return config


def _sibling(path, name):
  """The JSON in the file of that name beside another; None if there is none."""
  folder = path.rsplit('/', 1)[0] if '/' in path else '.'
  file = arrays.fetch(f'{folder}/{name}', missing_ok=True)
  return None if file is None else arrays.read_json(file)


def _stem(path):
  return path.rsplit('/', 1)[-1].rsplit('.', 1)[0]


def _read_npz(module, found, sidecar, options):
  """Reads an npz; what the user says counts before what NAME.json says."""
  if not isinstance(sidecar, dict) or 'image_shape' not in sidecar:
    return module.read(found, None, **options)  # not one of ours
  told = sidecar.get('model', {})
  known = {name: told[name] for name in _UNTOLD if name in told}
  known['grid'] = sidecar.get('grid')
  check_targets([sidecar.get('preprocess'), sidecar.get('transforms')])
  weights = module.read(found, None, **known | options)
  return dataclasses.replace(weights, **ours.besides_model(sidecar))


def _rest(weights, module, written):
  """The content of NAME.json: what the arrays do not tell."""
  shape, grid = weights.image_shape, None
  if 'patch_size' in weights.settings:
    grid = [s // n for s, n in zip(shape, stride(weights.settings))]
  told = module.read(written, None, grid=grid).settings
  settings = weights.settings
  return {
    'model': {
      name: settings[name]
      for name in _UNTOLD
      if name in settings and settings[name] != told.get(name)
    },
    'grid': grid,
    'image_shape': list(shape),
    'preprocess': weights.preprocess,
    'transforms': weights.transforms,
    'class_names': weights.class_names,
    'activation': weights.activation,
  }
