"""Faults of hosts, found before JAX opens chips and then hangs or aborts."""

import contextlib
import glob
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import socket
import time

from jax._src import clusters

from vit_jax.io import files
from vit_jax.runs import workdirs
from vit_jax.types import UserError

TPUS = ('/dev/accel[0-9]*', '/dev/vfio/[0-9]*')  # by the version of the TPU
WAIT_S = 30


def check() -> tuple[dict[str, str], list[str]]:
  """Return {name: text} of this host, and its faults with their remedies."""
  versions = {k: v or '-' for k, v in workdirs.versions().items()}
  chips = [path for pattern in TPUS for path in glob.glob(pattern)]
  held = set()
  for link in glob.iglob('/proc/[0-9]*/fd/*'):
    with contextlib.suppress(OSError):  # closed since, or of another user
      pid, file = link.split('/')[2], os.readlink(link)
      if file in chips and pid != str(os.getpid()):
        name = pathlib.Path(f'/proc/{pid}/comm').read_text().strip()
        held.add(f'{file} is in use by {name}. Run: kill {pid}')
  faults = sorted(held)
  needs = ' '.join(importlib.metadata.requires('jax') or ())
  for pin in re.findall(r'libtpu==([\d.]+)\*', needs):
    if chips and not versions['libtpu'].startswith(pin):
      faults.append(f"libtpu is not {pin}*. Run: pip install 'jax[tpu]'")
  stale = [x for x in os.environ if re.match('MEGASCALE_|TPU_WORKER_', x)]
  # Elsewhere than on a TPU VM, JAX has these instead of the VM's metadata.
  elsewhere = {'KUBERNETES_SERVICE_HOST', 'TPU_SKIP_MDS_QUERY'} & {*os.environ}
  if stale and not elsewhere:
    faults.append(f'Left by an earlier job, run: unset {" ".join(stale)}')
  return {
    'host': socket.gethostname(),
    'TPU chips': str(len(chips)),
    'slices': os.environ.get('MEGASCALE_NUM_SLICES', '-'),
    **{x: versions[x] for x in ('Python', 'jax', 'jaxlib', 'libtpu')},
    'commit': (workdirs.git_commit() or '-')[:7],
    'free disk': f'{shutil.disk_usage(".").free / 1e9:.0f} GB',
    'Cloud Storage': files.unreachable('gs://') or 'answers',
  }, faults


def call_hosts() -> str:
  """Print a table of all hosts on process 0; return the faults, or ''.

  Process 0 listens at the port of JAX's coordinator, and the others send their
  facts there. JAX would wait five minutes, and name nobody.
  """
  names = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
  address, *numbers = map(os.environ.get, names)
  count, number = (int(x) if x else None for x in numbers)
  detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
  address, count, number, _ = detect(address, count, number, None, None, WAIT_S)
  if address is None or count is None or number is None:
    raise UserError(f'JAX knows no cluster here. Set {", ".join(names)}.')
  own, (name, _, port) = check(), address.rpartition(':')
  if number:
    _send((name, int(port)), json.dumps([number, *own]))
    return '\n'.join(own[1])
  found = {0: own}
  with socket.create_server(('', int(port))) as server:
    server.settimeout(WAIT_S)
    with contextlib.suppress(TimeoutError):
      while len(found) < count:
        with server.accept()[0] as peer, peer.makefile() as file:
          i, *found[i] = json.loads(file.readline())
  rows = [(i, *found[i][0].values()) for i in sorted(found)]
  for row in [('process', *own[0]), *rows]:
    print(*(f'{x:<12}' for x in row))
  faults = [f'Process {i}: {x}' for i in sorted(found) for x in found[i][1]]
  if missing := sorted({*range(count)} - {*found}):
    faults.append(f'Missing at {address} after {WAIT_S} s: {missing}.')
  return '\n'.join(faults)


def _send(address, text):
  end = time.monotonic() + WAIT_S
  while True:
    try:
      with socket.create_connection(address, timeout=5) as peer:
        return peer.sendall(f'{text}\n'.encode())
    except OSError as error:
      if time.monotonic() > end:
        raise UserError(
          f'{address}: {error}. Start this on process 0, too, or open the port.'
        ) from error
      time.sleep(0.2)
