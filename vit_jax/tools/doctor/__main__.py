"""Report versions, devices and memory, and check what the compiler computes.

  python -m vit_jax.tools.doctor [--as_is] [--quick]

Each kind of operation that models are trained with is computed on the local
devices, in real sizes, and compared with numpy in float64: matrix products and
their gradients, reductions, softmax, LayerNorm, convolutions, attention,
collectives between devices, and a whole training step in float32 and bfloat16.

The exit status is 0; 1 if a result is wrong; 2 for wrong arguments.
"""

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence

import jax
import rich.filesize

from vit_jax.models import attention
from vit_jax.runs import canary, environment
from vit_jax.tools import parsers
from vit_jax.tools.doctor import checks

_PACKAGES = (
  *('jax', 'jaxlib', 'libtpu', 'jax-cuda12-plugin', 'jax-cuda13-plugin'),
  *('flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy'),
)
_ATTENTION = {  # name: [B, tokens, heads, head dimension] of queries
  'S/16 at 224 px': (8, 197, 6, 64),
  'B/16 at 224 px': (8, 197, 12, 64),
  'L/16 at 384 px': (8, 577, 16, 64),
  'H/14 at 224 px': (8, 257, 16, 80),
}
_COLUMNS = '{:<44} {:<9} {:>8} {:>8}  '


def main(argv: Sequence[str] | None = None) -> None:
  parser = parsers.parser(__doc__, 'tools.doctor [--as_is] [--quick]')
  parser.add_argument(
    '--as_is',
    action='store_true',
    help='check without what this package appends to XLA_FLAGS',
  )
  parser.add_argument(
    '--quick', action='store_true', help='only the checks of each training run'
  )
  args = parser.parse_args(argv)
  if args.as_is:
    os.environ |= environment.users_own()
  _report()
  chosen = canary.QUICK if args.quick else checks.all_checks()
  wrong = [check.name for check in chosen if not _passes(check)]
  if wrong:
    print(f'\nWRONG on {canary.device_name()}:', *wrong, sep='\n  ')
    sys.stdout.flush()
    sys.exit(canary.remedy())
  print(f'\nAll results are right on {canary.device_name()}.')


def _report():
  """Print a table of what this installation consists of."""
  versions = {name: _version(name) for name in _PACKAGES}
  devices = jax.devices()
  rows = {
    'system': f'{platform.platform()}, {os.cpu_count()} CPU threads',
    'vit_jax': _version('vit_jax') or 'not installed',
    'python': platform.python_version(),
    **{name: version for name, version in versions.items() if version},
    'devices': f'{len(devices)} x {devices[0].device_kind} '
    f'({devices[0].platform}), {jax.process_count()} process(es)',
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', '') or 'not set',
  }
  if environment.users_own() and environment.OPTION in rows['XLA_FLAGS']:
    rows['XLA_FLAGS'] += f'\n(appended for jaxlib {versions["jaxlib"]})'
  for name, shape in _ATTENTION.items():
    chosen = (
      f'{dtype}: {attention.fastest(jax.ShapeDtypeStruct(shape, dtype))}'
      for dtype in checks.DTYPES
    )
    rows[f'attention, {name}'] = ', '.join(chosen)
  rows |= {'memory': _memory(), **_device_memory(), 'disk': _disk()}
  for name, value in rows.items():
    print(f'{name:<26}', value.replace('\n', f'\n{"":<27}'))
  print('\n' + _COLUMNS.format('check', 'dtype', 'error', 'bound').rstrip())


def _passes(check):
  """Run a check, print its row, and return whether the result is right."""
  print(
    _COLUMNS.format(check.name, check.dtype, '', '').rstrip().ljust(54),
    end=' ',
    flush=True,
  )
  try:
    error, bound = canary.run(check), check.bound
  except Exception as e:  # A compiler can fail in any way.
    print(f'{"":>17}  FAILED\n  {str(e).strip().splitlines()[0]}')
    return False
  passed = error <= bound
  result = 'ok' if passed else 'WRONG'
  print(f'{error:>8.1e} {bound:>8.1e}  {result}', flush=True)
  return passed


def _version(package):
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _memory():
  """Return free and total memory of the host, as text."""
  try:
    page = os.sysconf('SC_PAGE_SIZE')
    sizes = (os.sysconf(f'SC_{x}_PAGES') * page for x in ('AVPHYS', 'PHYS'))
    free, total = sizes
    with open('/proc/meminfo') as file:  # Linux: counts what it can drop, too
      lines = dict(line.split(':') for line in file)
    free = int(lines['MemAvailable'].split()[0]) * 1024
  except FileNotFoundError:
    pass
  except (OSError, ValueError):
    return 'not known'
  return f'{_size(free)} free of {_size(total)}'


def _device_memory():
  stats = jax.local_devices()[0].memory_stats() or {}
  if 'bytes_limit' not in stats:
    return {}
  free = stats['bytes_limit'] - stats.get('bytes_in_use', 0)
  text = f'{_size(free)} free of {_size(stats["bytes_limit"])} for JAX'
  return {'memory of each device': text}


def _disk():
  """Return the free space of the folders that runs write to, as text."""
  cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~')
  folders = dict.fromkeys((os.getcwd(), tempfile.gettempdir(), cache))
  return '\n'.join(
    f'{_size(shutil.disk_usage(folder).free)} free in {folder}'
    for folder in folders
    if os.path.isdir(folder)
  )


def _size(number):
  return rich.filesize.decimal(number)


if __name__ == '__main__':
  main()
