"""Files from elsewhere (gs://, s3://, http(s)://, hf://), kept in a cache."""

import difflib
import hashlib
import json
import os
import pathlib
import sys
import time
import urllib.parse
import uuid
from collections.abc import Callable

import fsspec
import fsspec.callbacks

from vit_jax.weights.index import shards

PACKAGES = {  # what fsspec needs for a protocol
  'gs': 'gcsfs',
  'gcs': 'gcsfs',
  's3': 's3fs',
  'http': 'aiohttp',
  'https': 'aiohttp',
  'hf': 'huggingface_hub',
}
# What file systems call the version of a file: a change of it is another file.
_VERSION = (
  *('size', 'etag', 'md5hash', 'generation', 'blob_id', 'content-md5'),
  *('last-modified', 'lastmodified', 'mtime', 'updated', 'created'),
)
_INDEX = '.safetensors.index.json'


def fetch(
  path: str | os.PathLike,
  *,
  missing_ok: bool = False,
  cache_dir: str | os.PathLike | None = None,
  progress: Callable[[str, int, int | None], None] | None = None,
) -> pathlib.Path | None:
  """The local path of a file that may be remote.

  A remote file is downloaded once, and again when its size, time or version
  has changed. Without a connection what the cache has is taken. Files of one
  remote folder lie in one folder here. An index of sharded safetensors brings
  its shards.

  Args:
    path: a local path (given back as it is) or the URL of a file.
    missing_ok: whether to return None where there is no such file.
    cache_dir: $VIT_JAX_CACHE or ~/.cache/vit_jax if not given.
    progress: called with (URL, bytes so far, bytes in all or None); by default
      a line on stderr after two seconds.

  Raises:
    ValueError: not there; the download fails, of which nothing is left; the
      package for the protocol is not installed.
  """
  url = os.fspath(path)
  if '://' not in url:
    return _local(pathlib.Path(url).expanduser(), missing_ok)
  if url.startswith('file://'):
    local = pathlib.Path(urllib.parse.unquote(url[len('file://') :]))
    return _local(local, missing_ok)
  cache_dir = pathlib.Path(
    cache_dir or os.environ.get('VIT_JAX_CACHE') or '~/.cache/vit_jax'
  )
  base, mark, query = url.partition('?')
  folder, name = base.rsplit('/', 1)
  if name in ('', '.', '..'):
    raise ValueError(f'{url} does not end in the name of a file.')
  key = hashlib.sha256((folder + mark + query).encode()).hexdigest()[:16]
  local = cache_dir.expanduser() / key / name
  if not _refresh(url, local, progress or _Progress(), missing_ok):
    return None
  if name.endswith(_INDEX):
    for shard in shards(local):
      other = f'{folder}/{shard}{mark}{query}'
      fetch(other, cache_dir=cache_dir, progress=progress)
  return local


def _local(path, missing_ok):
  if path.exists():
    return path
  if missing_ok:
    return None
  folder = path.parent
  if not folder.is_dir():
    raise ValueError(f'{path} does not exist, and neither does {folder}.')
  names = sorted(p.name for p in folder.iterdir())
  near = difflib.get_close_matches(path.name, names, n=5, cutoff=0.4)
  shown = ', '.join(near or names[:8]) or 'nothing'
  raise ValueError(f'{path} does not exist. In {folder} there is: {shown}.')


def _refresh(url, local, progress, missing_ok):
  """Makes `local` what is at the URL now; False if that is nothing."""
  note = local.parent / f'.{local.name}.json'
  try:
    fs, remote = _file_system(url)
    info = fs.info(remote)
  except ValueError:
    raise
  except Exception as e:  # every file system has errors of its own
    if _is_missing(e) and missing_ok:
      return False
    if not _is_missing(e) and local.exists():
      print(f'{url}: {_say(e)}; what the cache has is taken.', file=sys.stderr)
      return True
    raise ValueError(f'{url} cannot be read: {_say(e)}.{_hint(url)}') from e
  if info.get('type') == 'directory':
    raise ValueError(f'{url} is a folder; name a file in it.')
  version = json.dumps(
    {k: str(v) for k, v in sorted(info.items()) if k.lower() in _VERSION}
  )
  if local.exists() and note.exists() and note.read_text() == version != '{}':
    return True
  part = local.parent / f'.{local.name}.{uuid.uuid4().hex}.part'
  try:
    local.parent.mkdir(parents=True, exist_ok=True)
    fs.get_file(remote, str(part), callback=_Callback(url, progress))
    size, have = info.get('size'), part.stat().st_size
    if size is not None and have != size:
      raise OSError(f'{have} of {size} bytes came')
    note.unlink(missing_ok=True)  # never beside a file that it is not about
    part.replace(local)
    note.write_text(version)
  except Exception as e:
    raise ValueError(f'{url} could not be downloaded: {_say(e)}.') from e
  finally:
    part.unlink(missing_ok=True)
    if isinstance(progress, _Progress):
      progress.close()
  return True


def _is_missing(error):
  """Whether the server was asked, and has no such file."""
  # fsspec says FileNotFoundError of a server that is not reached, too.
  reached = not isinstance(error.__cause__, OSError | TimeoutError)
  return isinstance(error, FileNotFoundError) and reached


def _file_system(url):
  protocol = url.partition('://')[0]
  options = {}
  try:
    if protocol in ('http', 'https'):
      import aiohttp

      # Its own limit of five minutes for all of a file is too short.
      timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
      options['client_kwargs'] = {'timeout': timeout, 'trust_env': True}
    return fsspec.core.url_to_fs(url, **options)
  except ImportError as e:
    if protocol in ('gs', 'gcs'):  # public buckets are on the web as well
      return _file_system(_web_address(url))
    package = PACKAGES.get(protocol, str(e))
    raise ValueError(
      f'{url}: {protocol}:// needs a package: pip install {package}'
    ) from e
  except ValueError as e:
    raise ValueError(
      f'{url}: {protocol}:// is not known; there are {", ".join(PACKAGES)}.'
    ) from e


def _web_address(url):
  path = urllib.parse.quote(url.partition('://')[2])
  return f'https://storage.googleapis.com/{path}'


def _hint(url):
  if not url.startswith(('gs://', 'gcs://')) or 'gcsfs' in sys.modules:
    return ''
  return ' If the bucket is not public: pip install gcsfs, and log in.'


def _say(error):
  return f'{type(error).__name__} {error}'.strip()


class _Callback(fsspec.callbacks.Callback):
  """Hands on how far a download is."""

  def __init__(self, url, progress):
    super().__init__()
    self._url, self._progress = url, progress

  def call(self, *args, **kwargs):
    self._progress(self._url, self.value, self.size)


class _Progress:
  """A line on stderr: rewritten for a person, every 10 s in a file."""

  def __init__(self):
    self._start = time.monotonic()
    self._terminal = sys.stderr.isatty()
    self._next = self._start + 2
    self._shown = False

  def __call__(self, url, done, total):
    now = time.monotonic()
    if now < self._next or not done:
      return
    self._next = now + (0.5 if self._terminal else 10)
    self._shown = True
    text = line(url, done, total, now - self._start)
    end = '\r' if self._terminal else '\n'
    print(text, end=end, file=sys.stderr, flush=True)

  def close(self):
    if self._shown and self._terminal:
      print(file=sys.stderr)


def line(url, done, total, seconds):
  """'NAME: 12 of 340 MB, 5.6 MB/s, eta 0:58'."""
  name = url.rsplit('/', 1)[-1]
  speed = done / seconds
  text = f'{name}: {done / 1e6:,.0f}'
  if total:
    text += f' of {total / 1e6:,.0f}'
  text += f' MB, {speed / 1e6:.1f} MB/s'
  if total:
    minutes, rest = divmod(round((total - done) / speed), 60)
    text += f', eta {minutes}:{rest:02}'
  return text
