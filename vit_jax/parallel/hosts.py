"""Several hosts as one run: they start, stop and fail together.

`StopSignal` also serves a run on a single host. Messages between hosts go
through the key-value store that jax keeps on host 0. Where jax's client would
abort the process because a host is lost, the process ends with a message.
"""

import base64
import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.parallel import signals
from vit_jax.runs.files import PathLike

START_S = 300  # Time for all hosts to join.
WAITING_S = 10  # A host that waits for longer to join the others says so.
SILENT_S = 30  # A host without a sign of life for this long counts as dead.
POLL_S = 2.0  # Time between two looks into the store.

# Folders of the store.
_STOP, _FAILED, _ALIVE = (f'vit_jax/{x}' for x in ('stop', 'failed', 'alive'))
_MARKS, _FACTS = (f'vit_jax/{x}' for x in ('marks', 'facts'))
_LEFT = 'left'  # The last sign of life of a host that ends normally.
_lost = threading.Event()  # jax's client reports that a host is lost.
_ending = threading.Lock()  # Held by the thread that ends the process.
_steps = itertools.count()  # Steps of all runs; equal on all hosts.


def initialize(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Join the other hosts of this run.

  On TPU pods, GKE, Slurm and Open MPI, jax finds them by itself. Elsewhere,
  pass all arguments or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
  JAX_PROCESS_ID. The process ends if a host is missing after START_S.

  Args:
    coordinator_address: HOST:PORT, where PORT is free on the host of process 0.
    num_processes: number of processes.
    process_id: number of this process, from 0.

  Raises:
    ValueError: an argument is missing or invalid; this host was started again
      after all hosts had joined.
  """
  given: dict[str, Any] = {
    'coordinator_address': coordinator_address,
    'num_processes': num_processes,
    'process_id': process_id,
  }
  for name in given:
    if given[name] is None:
      given[name] = os.environ.get(f'JAX_{name.upper()}')
  _check(given)
  # This service would catch SIGTERM, which ends a run through `StopSignal`.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    with _start_deadline(given), _client_does_not_abort():
      jax.distributed.initialize(
        **given,
        # Later than our own deadlines, which say what happened. jax sends a
        # heartbeat in each half of its timeout, so the last one may have come
        # that long before the silence.
        initialization_timeout=2 * START_S,
        heartbeat_timeout_seconds=2 * (SILENT_S + 5 * math.ceil(POLL_S)),
      )
  except ValueError as error:
    missing = ', '.join(f'--{k}' for k, v in given.items() if v is None)
    raise ValueError(
      '--distributed was given, but jax recognises no cluster here (TPU pod, '
      f'GKE, Slurm, Open MPI), and these flags are missing: {missing}. Pass '
      '--coordinator_address=HOST:PORT (of process 0), --num_processes=N and '
      '--process_id=0 to N-1 to every process, or leave out --distributed for '
      f'a single process. (jax: {error})'
    ) from error
  except jax.errors.JaxRuntimeError as error:
    if 'different incarnation' not in str(error):
      raise
    raise ValueError(
      f'Host {_job().process_id} was started again after all hosts had joined. '
      'The others end, too, because it was lost. Run the same command on all '
      'hosts.'
    ) from error


def _check(given):
  """Convert numbers in `given` to int. Raise ValueError for invalid values."""
  for name in ('num_processes', 'process_id'):
    try:
      given[name] = None if given[name] is None else int(given[name])
    except ValueError as error:
      raise ValueError(f'{name}={given[name]!r} must be an integer.') from error
  address, count, number = given.values()
  if address is not None and not re.fullmatch(r'.+:\d+', address):
    raise ValueError(
      f'coordinator_address={address!r} must be HOST:PORT, with a free port of '
      'process 0.'
    )
  if None not in (count, number) and not 0 <= number < count:
    raise ValueError(
      f'process_id={number} must be one of 0 to {count - 1}, because '
      f'num_processes={count}.'
    )


@contextlib.contextmanager
def _start_deadline(given):
  """Report that this host waits for others, and end it after START_S."""
  joined = threading.Event()

  def watch():
    begin, said = time.monotonic(), False
    while not joined.wait(min(POLL_S, SILENT_S)):
      waited = time.monotonic() - begin
      job = _job()  # has what jax found by itself
      me = {k: getattr(job, k) if v is None else v for k, v in given.items()}
      who = 'Host {process_id} of {num_processes}'.format(**me)
      where = f'the coordinator address {me["coordinator_address"]}'
      if waited > START_S:
        _end(
          f'\n{who} has waited {START_S} s for the others at {where}. Check '
          'that every host was started, each with its own process_id, and that '
          'all can reach that address.\n'
        )
      if waited > min(WAITING_S, SILENT_S) and not said:
        said = True
        print(f'{who} is waiting for the others at {where}.', file=sys.stderr)

  threading.Thread(target=watch, daemon=True).start()
  try:
    yield
  finally:
    joined.set()


@contextlib.contextmanager
def _client_does_not_abort():
  """Have the client that jax makes set `_lost` where it would abort.

  It notices before anyone else that the process of host 0 is gone, and then
  aborts with a C++ stack trace, which says nothing about hosts. jax's public
  functions cannot change that. The client takes a callback, but jaxlib 0.10 to
  0.12 cannot convert its argument for Python, so C++ terminates instead. This
  function therefore also keeps the client's thread from terminating the
  process. On systems without libstdc++ the client aborts as before.
  """
  from jax._src.lib import _jax

  original = _jax.get_distributed_runtime_client
  _jax.get_distributed_runtime_client = functools.partial(
    original, missed_heartbeat_callback=lambda *_: _lost.set()
  )
  try:
    set_terminate = ctypes.CDLL('libstdc++.so.6')._ZSt13set_terminatePFvvE
    set_terminate(_on_terminate)
  except (OSError, AttributeError):
    _jax.get_distributed_runtime_client = original
  try:
    yield
  finally:
    _jax.get_distributed_runtime_client = original


@ctypes.CFUNCTYPE(None)
def _on_terminate():
  _lost.set()
  while True:  # The process would abort at the end of this function.
    time.sleep(START_S)


def refuse_differences(
  facts: Mapping[str, str], notes: Mapping[str, str] | None = None
) -> None:
  """Raise ValueError unless all hosts pass the same facts; with a diff.

  All hosts must call this function, once. It uses no device: hosts with
  different programs could wait for each other there.

  Args:
    facts: {name: text}, such as the config and the versions of packages.
    notes: more of these, which may differ; they are shown with a difference.
  """
  job = _job()
  mark = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
  packed = zlib.compress(json.dumps({**facts, **(notes or {})}).encode())
  # One entry for all hosts that agree: a thousand hosts must not read a
  # thousand configs.
  job.client.key_value_set(
    f'{_FACTS}/{mark}', base64.b64encode(packed).decode(), allow_overwrite=True
  )
  job.client.key_value_set(f'{_MARKS}/{job.process_id}', mark)
  hosts: dict[str, list[int]] = {}
  for host, found in sorted(_marks_of_all(job).items()):
    hosts.setdefault(found, []).append(host)
  if len(hosts) == 1:
    return
  told = {}
  for found in hosts:
    text = job.client.blocking_key_value_get(f'{_FACTS}/{found}', 30_000)
    told[_named(hosts[found])] = json.loads(
      zlib.decompress(base64.b64decode(text))
    )
  lines = _differences(told)
  names = [name for name in lines if name not in (notes or {})]
  more = f' and {len(names) - 3} more' if len(names) > 3 else ''
  diff = '\n'.join(f'  {name}: {line}' for name, line in lines.items())
  raise ValueError(
    f'The hosts differ in {", ".join(names[:3])}{more}:\n{diff}\n'
    'Start the same command with the same code and packages on all hosts.'
  )


def _marks_of_all(job):
  """Return {number of each host: its mark}, waiting for the last one."""
  end = time.monotonic() + START_S
  while True:
    found = {int(k): v for k, v in _by_host(job.client, _MARKS).items()}
    if len(found) == job.num_processes:
      return found
    if time.monotonic() > end:
      late = sorted({*range(job.num_processes)} - {*found})
      raise ValueError(
        f'{_named(late)} did not report config and versions within {START_S} '
        's. Check that all hosts run the same version of this code.'
      )
    time.sleep(0.1)


def _differences(told):
  """Return {name: '1 on host 0; 2 on host 1'} of the facts that differ."""
  lines = {}
  for name in dict.fromkeys(name for facts in told.values() for name in facts):
    who: dict[str, list[str]] = {}
    for hosts, facts in told.items():
      who.setdefault(facts.get(name, 'not set'), []).append(hosts)
    if len(who) > 1:
      parts = (f'{text} on {" and ".join(x)}' for text, x in who.items())
      lines[name] = '; '.join(parts)
  return lines


def _named(hosts):
  """Return 'host 0' or 'hosts 0, 1, 2', shortened."""
  shown = ', '.join(map(str, hosts[:8]))
  more = f' and {len(hosts) - 8} more' if len(hosts) > 8 else ''
  return f'host{"s" * (len(hosts) > 1)} {shown}{more}'


def of_first_host(text: str) -> str:
  """Return the text that the first host passes. All hosts must call this."""
  if jax.process_count() == 1:
    return text
  data = np.frombuffer(text.encode(), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.array(len(data))))
  if jax.process_index():
    data = np.zeros(size, np.uint8)
  data = np.asarray(multihost_utils.broadcast_one_to_all(data), np.uint8)
  return data.tobytes().decode()


def check_shared(folder: PathLike) -> None:
  """Raise ValueError unless all hosts see the same files in the folder.

  Each host writes its part of a checkpoint, so in separate folders no
  checkpoint would be complete. All hosts must call this function.
  """
  if jax.process_count() == 1:
    return
  mark = epath.Path(folder) / '.first_host'
  token = secrets.token_hex()
  if jax.process_index() == 0:
    mark.write_text(token)
  token = multihost_utils.broadcast_one_to_all(np.array([*token.encode()]))
  token = bytes(token.tolist()).decode()
  seen = multihost_utils.process_allgather(np.array(_appears(mark, token)))
  if jax.process_index() == 0:
    mark.unlink(missing_ok=True)
  if not seen.all():
    raise ValueError(
      f'--workdir={folder} is not the same folder on all hosts: hosts '
      f'{np.flatnonzero(~seen).tolist()} do not see what host 0 writes there. '
      'Choose a folder that all hosts share: gs://... or a network file system.'
    )


def _appears(path, text):
  """Return whether the file gets this text. Network file systems may lag."""
  for _ in range(6):
    with contextlib.suppress(OSError):
      if path.read_text() == text:
        return True
    time.sleep(POLL_S)
  return False


class Stopped(SystemExit):
  """Exit of a run that a signal stopped, after saving. Status: 128 + signal."""

  def __init__(self, stop: 'StopSignal') -> None:
    super().__init__(128 + (stop.number or 0))


class StopSignal:
  """Context manager that turns SIGTERM and SIGINT into a request to stop.

  The first signal is acknowledged at once. A second one ends the process of a
  command at once; in a library, it acts as without this class. On several
  hosts, a signal to any of them stops all of them after the same step.

  jax's preemption point, which Orbax uses, would do this for SIGTERM only, and
  would ignore a second signal.
  """

  def __init__(self) -> None:
    self._number: int | None = None
    self._previous: dict[int, Any] = {}

  @property
  def number(self) -> int | None:
    """Number of the signal, or None."""
    return self._number or signals.asked()

  def __enter__(self) -> 'StopSignal':
    if signals.defer(True):
      return self
    for number in signals.NUMBERS:
      with contextlib.suppress(ValueError):  # not in the main thread
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_: Any) -> None:
    signals.defer(False)
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number, _):
    self._number = number
    signal.signal(number, self._previous[number])
    signals.acknowledge(number)

  def requested(self) -> bool:
    """Return whether to stop now. All hosts must ask once after each step."""
    if jax.process_count() > 1:
      if not _agree_to_stop(self.number is not None):
        return False
      self._number = self.number or signal.SIGTERM  # that of another host
    return self.number is not None

  def message(self, step: int, total_steps: int, workdir: PathLike) -> str:
    return (
      f'{signal.Signals(self.number or 0).name}: saved step {step} of '
      f'{total_steps} in {workdir}. Run the same command to resume.'
    )


def _agree_to_stop(wanted):
  """Return whether all hosts stop after this step, because one wants to.

  The first host that wants to stop names a step that no host can have reached:
  no host is more than one step ahead of another, because each one fetches the
  metrics of the step before, to which all hosts contribute. Steps are counted
  over all runs of this process.

  An all-reduce per step would do without the store, but took 5 ms on loopback
  where reading the store took 0.5 ms.
  """
  store, step = _job().client, next(_steps)
  if wanted:
    # Fails if another host was first.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      store.key_value_set(f'{_STOP}/step', str(step + 4))
  named = [int(text) for _, text in store.key_value_dir_get(_STOP)]
  return bool(named) and step >= named[0]


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
  """Context manager that ends all hosts when one fails or is killed.

  The others would wait for it in a collective forever. Instead they print its
  error, or that it is silent, and exit with status 1.
  """
  if not jax.distributed.is_initialized():
    yield
    return
  job, over, contact = _job(), threading.Event(), _Contact()
  watch = threading.Thread(
    target=_watch, args=(job, over, contact), daemon=True
  )
  guard = threading.Thread(
    target=_guard, args=(job, watch, contact), daemon=True
  )
  watch.start()
  guard.start()
  try:
    yield
  except BaseException as error:
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
      raise  # All hosts have agreed to stop.
    _fail(job, error)
  finally:
    over.set()
    guard.join()


def _fail(job, error):
  """Print the error, send its text to the other hosts, and exit."""
  if _is_from_runtime(error):
    # Perhaps of a collective with a dead host. Then another thread names that
    # host and ends the process.
    time.sleep(SILENT_S + 3 * POLL_S)
  _ending.acquire()
  if isinstance(error, SystemExit):  # a message for users
    text = error.code.strip()
    print(f'\n{text}', file=sys.stderr, flush=True)
  else:
    text = f'{type(error).__name__}: {error}'
    traceback.print_exception(error)
    sys.stderr.flush()
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    key = f'{_FAILED}/{job.process_id}'
    job.client.key_value_set(key, text[:4000])
  if job.process_id == 0:
    time.sleep(3 * POLL_S)  # The store ends with this host.
  sys.stdout.flush()
  os._exit(1)


def _is_from_runtime(error):
  """Return whether XLA has raised the error, or what led to it.

  Depending on where a collective fails, it raises a JaxRuntimeError or a
  ValueError; the text of both begins with the name of a status.
  """
  while error is not None:
    if isinstance(error, jax.errors.JaxRuntimeError) or _STATUS.match(
      str(error)
    ):
      return True
    error = error.__cause__ or error.__context__
  return False


_STATUS = re.compile(
  'UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|'
  'FAILED_PRECONDITION'
)


class _Contact:
  """Time of the last answer from the store."""

  def __init__(self) -> None:
    self.time = time.monotonic()


def _watch(job, over, contact):
  """Send signs of life, and end this process when another host is lost."""
  store, me = job.client, str(job.process_id)
  heard = {}  # host: (its last sign of life, when it was new)
  for count in itertools.count():
    if over.wait(POLL_S):
      break
    try:
      store.key_value_set(f'{_ALIVE}/{me}', str(count), allow_overwrite=True)
      failed = _by_host(store, _FAILED)
      alive = _by_host(store, _ALIVE)
    except jax.errors.JaxRuntimeError:
      continue  # `_guard` decides when that has lasted too long.
    now = contact.time = time.monotonic()
    for host, text in failed.items():
      if host != me:
        _end_too(f'Host {host} has failed: {text}')
    for host in map(str, range(job.num_processes)):
      sign = alive.get(host)
      if heard.setdefault(host, (sign, now))[0] != sign:
        heard[host] = sign, now
      elif sign != _LEFT and now - heard[host][1] > SILENT_S and host != me:
        _end_too(_silent(host))
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    store.key_value_set(f'{_ALIVE}/{me}', _LEFT, allow_overwrite=True)


def _guard(job, watch, contact):
  """End this process if it was stopped, or if host 0 does not answer.

  Calls of the store wait for host 0 without a deadline, so `_watch` cannot.
  """
  while watch.is_alive():
    begin = time.monotonic()
    watch.join(POLL_S)
    now = time.monotonic()
    if now - begin > SILENT_S:
      _end(
        f'\nHost {job.process_id} was stopped for {now - begin:.0f} s, so the '
        'other hosts have ended. This host ends too, and writes nothing more. '
        'Run the same command on all hosts to resume.\n'
      )
    if _lost.is_set() and now - contact.time > 2 * POLL_S and job.process_id:
      _end_too(
        'Host 0, which connects the hosts, is gone. It was killed or has lost '
        'its network.'
      )
    if now - contact.time > SILENT_S + 2 * POLL_S:
      # The store of host 0 also refuses all calls when a host comes back.
      _end_too(
        _silent('0')
        if job.process_id
        else 'Another host was lost and has been started again by itself.'
      )


def _silent(host):
  return (
    f'Host {host} has been silent for {SILENT_S} s. It was killed or stopped, '
    'or has lost its network.'
  )


def _by_host(store, folder):
  """Return {number of a host: its text} of a folder of the store."""
  entries = store.key_value_dir_get(folder)
  return {key.rpartition('/')[-1]: text for key, text in entries}


def _end_too(message):
  """End this process because another host is lost."""
  after = '\n' if '\n' in message else ' '
  _end(
    f'\n{message}{after}This host ends too. Run the same command on all hosts '
    'to resume.\n',
    # The store ends with host 0. The others shall read there what it has read.
    after_s=3 * POLL_S if _job().process_id == 0 else 0,
  )


def _end(message, after_s=0.0):
  """Print the message and exit with status 1, without waiting for any host."""
  _ending.acquire()
  try:
    sys.stderr.write(message)
    sys.stderr.flush()
    sys.stdout.flush()
    time.sleep(after_s)
  finally:
    os._exit(1)


def _job():
  """Return jax's private state of the job: `client`, `process_id`, ...

  This is the only private name of jax in vit_jax, used on several hosts only.
  `client` is the key-value store, the one way to send text to a host whose
  main thread waits in a collective. jax 0.10 has no public access to it; Orbax
  reads the same name.
  """
  from jax._src import distributed

  return distributed.global_state
