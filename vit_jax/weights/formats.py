"""Weights of all formats, behind two functions: `read` and `write`.

  a workdir, or WORKDIR/checkpoints/STEP, with model.json    (read only)
  vit_jax      NAME.npz and NAME.json: any model, also your own
  npz          NAME.npz as the paper's authors publish them, and NAME.json
  big_vision   NAME.npz of big_vision, and NAME.json
  timm         a folder: config.json, model.safetensors
  hf           a folder: these and preprocessor_config.json (transformers)

NAME.json is ours. With the format vit_jax it describes the model, as model.json
does; with npz and big_vision it holds what these cannot, and may be missing.
The format is recognised by the names of the arrays. Nothing in a file is
executed: pickles are refused, and a file may only name the classes that
`config.build` trusts.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax import config, tree
from vit_jax.models.layers import as_pair
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.names import SIZES
from vit_jax.models.pooling import DistillationToken, NoPooling
from vit_jax.models.posemb import Learned, SinCos2d
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import VisionTransformer
from vit_jax.runs import stored, workdirs
from vit_jax.runs.files import (
  PathLike,
  check_remote,
  is_local,
  write_atomically,
)
from vit_jax.weights import bundle, files, huggingface, image_configs, npz, timm
from vit_jax.weights.bundle import Weights
from vit_jax.weights.image_configs import item as _item

_READERS = {'npz': npz, 'timm': timm, 'hf': huggingface}
_WRITERS: dict[str, Any] = {
  'vit_jax': lambda weights: (weights.params, {}),
  'npz': npz.write,
  'big_vision': npz.write_big_vision,
  'timm': timm.write,
  'hf': huggingface.write,
}
FORMATS = tuple(_WRITERS)
NPZ_FORMATS = ('vit_jax', 'npz', 'big_vision')
_SAFETENSORS = 'model.safetensors'
_ENDINGS = ('.npz', '.safetensors', '.safetensors.index.json')
_WEB = ('http://', 'https://', 'hf://')
_LONGEST_SIDE = 1 << 14  # of an image; the largest number of a transform
# Short names (see `bundle.replace`) that NAME.json of an npz may have.
_SIDECAR_FIELDS = (
  'gelu',
  'norm_eps',
  'norm_after_pooling',
  'pooling',
  'posemb',
)


def find(path: PathLike | None, step: int | None = None) -> None:
  """Check that there are weights, before any long work; see `read`.

  Remote files are downloaded to the cache.

  Raises:
    ValueError: there are none.
  """
  _, source = _locate(path, step)
  if source is not None:
    files.fetch(source)


def read(
  path: PathLike | None,
  *,
  step: int | None = None,
  ema: bool | str = 'auto',
  trust: Sequence[str] = (),
  **options: Any,
) -> Weights:
  """Return Weights of any format in the table above.

  Args:
    path: file or folder; local, gs://, s3://, http(s):// or hf://USER/MODEL.
    step, ema: of a workdir, see `stored.load_params`.
    trust: packages whose classes the file may name, for models and transforms
      of your own: ('my_package',).
    **options: for what a file does not contain: grid=(rows, columns) of a
      position table that is not a square; image_size; and fields of the model
      as in `bundle.replace`, such as num_heads, gelu or dtype.

  Raises:
    ValueError: there is nothing; the format is unknown; the file is a pickle;
      arrays are missing, unexpected or of another shape (lists all).
  """
  if str(path).endswith('.stablehlo'):
    raise ValueError(
      f'{path} is an exported function, without parameters to read. Only '
      'predict takes it. Give the weights that it was made from.'
    )
  options = {k: v for k, v in options.items() if v is not None}
  with _one_message(path):
    directory, source = _locate(path, step)
    if directory is not None:
      weights = _read_checkpoint(directory, ema, trust, options)
    else:
      weights = _read_file(path, source, trust, options)
  shape, asked = weights.image_shape, options.get('image_size')
  if asked is not None and as_pair(asked) != tuple(shape[:2]):
    raise ValueError(
      f'image_size={asked}, but {path} is for images of {shape[0]}x{shape[1]}. '
      'Leave it out here; `pretrained.load` and image_shape of evaluate adapt '
      'weights to another size.'
    )
  return weights


def describe(
  path: PathLike | None,
  *,
  step: int | None = None,
  trust: Sequence[str] = (),
  **options: Any,
) -> tuple[Weights, bool]:
  """Return what `read` does, without the parameters.

  Of a workdir only model.json is read; of a file names, shapes and types, and
  only once if it is described several times.

  Args:
    path, step, trust, **options: see `read`.

  Returns:
    (Weights with params={}, whether a description of this project, such as
    model.json, says how the model was run: dtype, dropout, ...).

  Raises:
    ValueError: as `read`.
  """
  options = {k: v for k, v in options.items() if v is not None}
  with _one_message(path):
    directory, source = _locate(path, step)
    if directory is not None:
      content = workdirs.description(directory, missing_ok=True)
      if content is not None:
        model = _described_model(content, trust, options)
        weights = Weights(model, {}, **usage(content, trust))
        weights.origin = str(directory)
        return weights, True
      file = directory
    else:
      file = files.fetch(source)
    changed = epath.Path(file).stat().mtime
    described = json.dumps(options, default=repr)
    weights = _describe_file(str(path), step, tuple(trust), described, changed)
  return weights, weights.origin.startswith('vit_jax, ')


@contextlib.contextmanager
def _one_message(path):
  """Turn any error about a file into one ValueError that names it.

  A file of others may contain anything, so the libraries that read it may raise
  any error. Messages have 60 lines of 400 characters at most.
  """
  try:
    yield
  except ValueError as error:
    message = str(error)
    if path is not None and str(path).rstrip('/') not in message:
      message = f'{path}: {message}'
    lines = [
      x if len(x) <= 400 else f'{x[:400]} ...' for x in message.split('\n')
    ]
    if len(lines) > 60:
      lines[59:] = [f'and {len(lines) - 59} more lines']
    if lines == str(error).split('\n'):
      raise
    raise ValueError('\n'.join(lines)) from error
  except Exception as error:
    raise ValueError(
      f'{path} cannot be read ({type(error).__name__}: {error!s:.200}). It is '
      'damaged, or not a model that is supported.'
    ) from error


@functools.lru_cache(maxsize=8)
def _describe_file(path, step, trust, options, changed):
  """Return Weights without parameters; `changed` is the time of the file."""
  del changed
  options = json.loads(options)
  directory, source = _locate(path, step)
  if directory is not None:
    weights = _read_checkpoint(directory, 'auto', trust, options, values=False)
  else:
    weights = _read_file(path, source, trust, options, values=False)
  return dataclasses.replace(weights, params={})


def _locate(path, step):
  """Return (directory of a checkpoint, None), or (None, path of a file)."""
  if path is None or _is_workdir(path):
    return stored.find(path, step), None
  if step is not None:
    raise ValueError(f'{path} is not a workdir; leave out step={step}.')
  return None, _file(str(path))


def _is_workdir(path):
  """Return whether this is, or must be meant as, a workdir or a checkpoint."""
  if str(path).startswith(_WEB) or _is_remote_file(path):
    return False
  check_remote(path)
  path = epath.Path(path)
  if not path.is_dir():
    return not path.suffix and not path.exists()
  names = {child.name for child in path.iterdir()}
  return 'checkpoints' in names or any(
    workdirs.is_step(name) or name == 'params' for name in names
  )


def _is_remote_file(path):
  """Return whether a URL names a file, so that no folder has to be listed.

  Public files of gs:// are read without the package that lists folders.
  """
  return not is_local(str(path)) and str(path).endswith(_ENDINGS)


def _file(path):
  """Return the file with the arrays: the path itself, or one in the folder."""
  if path.startswith('hf://'):
    is_model = path.count('/') < 4  # hf://USER/MODEL
    return f'{path}/{_SAFETENSORS}' if is_model else path
  if path.startswith(_WEB) or _is_remote_file(path):
    return path
  if not epath.Path(path).is_dir():
    return path
  names = sorted(child.name for child in epath.Path(path).iterdir())
  for name in (f'{_SAFETENSORS}.index.json', _SAFETENSORS):
    if name in names:
      return f'{path}/{name}'
  known = [n for n in names if n.endswith(('.safetensors', '.npz'))]
  if len(known) != 1:
    raise ValueError(
      f'{path} is neither a workdir nor a folder with one weights file: it has '
      f'{", ".join(names) or "nothing"}. Expected {_SAFETENSORS}, or name the '
      'file.'
    )
  return f'{path}/{known[0]}'


def _read_checkpoint(directory, ema, trust, options, values=True):
  """Return Weights of WORKDIR/checkpoints/STEP; the workdir may be gone."""
  if 'grid' in options:
    raise ValueError(f'{directory} says its own grid; leave grid out.')
  content = workdirs.description(directory, missing_ok=True)

  def convert(params):
    if content is not None:
      return _described(content, params, trust, options)
    fields = {k: v for k, v in options.items() if k != 'image_size'}
    params = tree.unstack_blocks(params)
    model = bundle.infer(params, **fields)
    size = options.get('image_size')
    shape = bundle.infer_image_shape(model, params, image_size=size)
    return Weights(model, params, shape)

  saved = stored.saved_params(directory.absolute(), ema=ema)
  blanks = {k: files.blank(x.shape, x.dtype) for k, x in saved.shapes.items()}
  found = files.Stored(blanks, saved.size, lambda _: saved.read(), directory)
  weights = _converted(found, convert, values=values)
  weights.origin, weights.step = str(directory), int(directory.name)
  return weights


def _converted(found, convert, needed=None, values=True):
  """Return convert(arrays) for a `Stored`, of type Weights.

  It is called with blank arrays first. So names, shapes and types are those of
  a model before anything is unpacked.

  Args:
    found: Stored.
    convert: function ({name: array}) -> Weights.
    needed: names of the arrays whose values it needs; all if None.
    values: whether to return Weights with values, not blank.
  """

  found.check_size(needed)
  weights = convert(found.blanks)
  return convert(found.read(needed)) if values else weights


def _described_model(content, trust, options):
  """Return the model that model.json describes, with unrolled layers."""
  fields = {
    k: v for k, v in options.items() if k not in ('image_size', 'num_heads')
  }
  model = bundle.build_model(content.get('model'), trust)
  if isinstance(model, bundle.MODELS) and hasattr(model, 'scan'):
    fields = {'scan': False} | fields
  return bundle.replace(model, **fields)


def _described(content, params, trust, options):
  """Return Weights of parameters and the content of model.json."""
  model = _described_model(content, trust, options)
  if isinstance(model, bundle.MODELS):
    params = tree.unstack_blocks(params)
  if not getattr(getattr(model, 'embedding', None), 'mask_token', True):
    params = {k: v for k, v in params.items() if k != 'mask'}
  use = usage(content, trust)
  shapes = bundle.shapes(model, use['image_shape'])
  if lines := tree.diff(params, shapes):
    raise ValueError(
      'The parameters are not those of the model that is described next to '
      f'them. Parameters (-), model (+):\n{lines}'
    )
  for x, leaf in shapes.items():
    if files.is_float(params[x].dtype) != files.is_float(leaf.dtype):
      raise ValueError(
        f'{x} has the type {params[x].dtype}; expected {leaf.dtype}.'
      )
  return Weights(model, params, **use)


def usage(content: Mapping[str, Any], trust: Sequence[str]) -> dict[str, Any]:
  """Return arguments of Weights other than the model from our JSON.

  Args:
    content: has image_shape, and perhaps class_names, activation, preprocess
      and transforms.
    trust: packages whose classes it may name.
  """
  shape = content.get('image_shape')
  if not isinstance(shape, list | tuple) or len(shape) != 3:
    raise ValueError(f'image_shape={shape!r:.80}; expected [H, W, C].')
  found = {
    'image_shape': tuple(image_configs.size(n, 'image_shape') for n in shape),
    'class_names': image_configs.class_names(content.get('class_names')),
    'activation': image_configs.activation(content.get('activation')),
  }
  for name in ('preprocess', 'transforms'):
    if (settings := content.get(name)) is not None:
      parts = settings if name == 'transforms' else [settings]
      if not isinstance(parts, list | tuple):
        raise ValueError(f'{name}={settings!r:.80}; expected a list.')
      built = tuple(bundle.build(x, trust, most=_LONGEST_SIDE) for x in parts)
      if not all(map(callable, built)):
        raise ValueError(f'{name}={settings!r:.80} is not a function.')
      found[name] = built if name == 'transforms' else built[0]
  return found


def _read_file(path, source, trust, options, values=True):
  found = files.stored(files.fetch(source))
  found = dataclasses.replace(found, path=path)
  name = source.rsplit('/', 1)[-1].rsplit('.', 1)[0]
  sidecar = _sibling(source, f'{name}.json') if found.is_npz else None
  if sidecar is not None and 'image_shape' not in sidecar:
    sidecar = None  # it is not ours
  if (
    sidecar
    and isinstance(model := sidecar.get('model'), dict)
    and ('target' in model)
  ):

    def convert(arrays):
      return _described(sidecar, arrays, trust, options)

    weights = _converted(found, convert, values=values)
    weights.origin = 'vit_jax'
  else:
    weights = _read_others(found, source, sidecar, trust, options, values)
  weights.origin = f'{weights.origin}, {path}'
  weights.notes += _unusual(weights.model)
  return weights


def _read_others(found, source, sidecar, trust, options, values):
  names = found.blanks.keys()
  name = next((n for n, m in _READERS.items() if m.recognise(names)), None)
  if name is None:
    some = ', '.join(sorted(names)[:8]) + (', ...' if len(names) > 8 else '')
    raise ValueError(
      f'{found.path}: The file has the arrays {some:.500}. This is none of the '
      f'known formats: {", ".join(FORMATS)}.'
    )
  needed = _READERS[name].needed(names)
  settings = None
  if not sidecar and name != 'npz':
    settings = _sibling(source, 'config.json')
    if name == 'hf' and (more := _sibling(source, 'preprocessor_config.json')):
      settings = (settings or {}) | {'preprocessor_config': more}

  def convert(arrays):
    if not sidecar:
      weights = _READERS[name].read(arrays, settings, **options)
    else:
      written = _item(sidecar, 'model', dict) or {}
      known = {k: written[k] for k in _SIDECAR_FIELDS if k in written}
      known |= {'grid': sidecar.get('grid')} | options
      use = usage(sidecar, trust)
      weights = _READERS[name].read(arrays, **known)
      weights = dataclasses.replace(weights, **use)
    for x in needed:
      if arrays[x].size and not files.is_float(arrays[x].dtype):
        raise ValueError(
          f'{x} has the type {arrays[x].dtype}; expected floats.'
        )
    return weights

  return _converted(found, convert, needed, values)


def _sibling(path, name):
  """Return the JSON in another file of the folder; None if there is none."""
  folder = path.rsplit('/', 1)[0] if '/' in path else '.'
  file = files.fetch(f'{folder}/{name}', missing_ok=True)
  return None if file is None else files.read_json(file)


def _unusual(model):
  """Return a note if the last layers of a published size may be missing."""
  for name, (width, depth, mlp_dim, num_heads) in SIZES.items():
    keys = ('width', 'mlp_dim', 'num_heads')
    same = [getattr(model, k, None) for k in keys] == [
      width,
      mlp_dim,
      num_heads,
    ]
    if same and model.depth < depth:
      return [f'  the model has {model.depth} layers; ViT-{name} has {depth}']
  return []


def write(
  weights: Weights, path: PathLike, format: str, **options: Any
) -> list[epath.Path]:
  """Write weights; return the paths of the files.

  Args:
    weights: Weights.
    path: of the file (vit_jax, npz, big_vision) or the folder (timm, hf).
    format: one of FORMATS.
    **options: of the format's own writer.

  Raises:
    ValueError: the format cannot hold such a model.
  """
  if format not in FORMATS:
    raise ValueError(f'format={format!r} must be one of {", ".join(FORMATS)}.')
  if format != 'vit_jax':
    _check_portable(weights.model, format)
  check_remote(path)
  arrays, texts = _WRITERS[format](weights, **options)
  path = epath.Path(path)
  if format in NPZ_FORMATS:
    folder, file = path.parent, path
    folder.mkdir(parents=True, exist_ok=True)
    files.write_npz(file, arrays)
    texts = {path.with_suffix('.json').name: _sidecar(weights, format, arrays)}
  else:
    folder, file = path, path / _SAFETENSORS
    folder.mkdir(parents=True, exist_ok=True)
    files.write_safetensors(file, arrays, {'format': 'pt'})
  for name, content in texts.items():
    write_atomically(folder / name, json.dumps(content, indent=2) + '\n')
  return [file, *(folder / name for name in texts)]


def _check_portable(model, format):
  """Raise ValueError for what only models of this project have."""
  problems = []
  if type(model) not in (VisionTransformer, ResNet, MlpMixer):
    problems.append(f'the model {type(model).__name__}')
  posemb = getattr(model, 'posemb', None)
  if posemb is not None and (
    type(posemb) not in (Learned, SinCos2d) or posemb.in_layers
  ):
    problems.append(f'posemb={posemb}')
  embedding = getattr(model, 'embedding', None)
  if getattr(embedding, 'stride', None):
    problems.append(f'stride={embedding.stride}')
  pooling = getattr(model, 'pooling', None)
  if isinstance(pooling, DistillationToken) and format != 'timm':
    raise ValueError(
      f'{format} cannot hold a distillation token with its own head. Use '
      '--format=timm or --format=vit_jax instead.'
    )
  remedy = 'Use --format=vit_jax instead'
  if getattr(embedding, 'mask_token', False):
    problems.append('mask_token=True')
    remedy += (
      ', or read the weights without (convert: --set pooling=token --set '
      'mask_token=false --num_classes=0)'
    )
  if problems:
    raise ValueError(
      f'{format} cannot hold {", ".join(problems)}: only models of this '
      f'project have it. {remedy}.'
    )


def _sidecar(weights, format, arrays):
  """Return the content of NAME.json."""
  model = weights.model
  content = {
    'image_shape': list(weights.image_shape),
    'preprocess': config.describe(weights.preprocess),
    'transforms': config.describe(list(weights.transforms)),
    'class_names': weights.class_names,
    'activation': weights.activation,
  }
  if format == 'vit_jax':
    return {'model': config.describe(model)} | content
  grid = None
  if hasattr(model, 'embedding'):
    grid = list(model.embedding.grid(weights.image_shape))
  written = npz.read(arrays, grid=grid).model
  fields, gelu = {}, getattr(getattr(model, 'block', model), 'gelu', None)
  if gelu != getattr(getattr(written, 'block', written), 'gelu', None):
    fields['gelu'] = gelu
  pooling = getattr(model, 'pooling', None)
  if isinstance(pooling, NoPooling):
    fields['pooling'] = 'none'
  return {'model': fields, 'grid': grid} | content
