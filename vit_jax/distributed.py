"""Several hosts as one run: started, stopped and failed together.

Beside its collectives jax keeps a small store of texts on the first host; what
the hosts have to tell one another out of turn goes through that.
"""

import contextlib
import itertools
import os
import re
import secrets
import sys
import threading
import time
import traceback

import jax
from etils import epath
from jax._src import distributed as jax_distributed  # the store's client

START_S = 300  # within which all hosts must have come
SILENT_S = 30  # a host that is not heard of for so long is taken for dead
_POLL_S = 2.0
_STOP, _FAILED, _ALIVE = 'vit_jax/stop', 'vit_jax/failed', 'vit_jax/alive/'
_LEFT = 'left'
_checks = itertools.count()  # as many on each host


def initialize(coordinator_address=None, num_processes=None, process_id=None):
  """Joins the other hosts, which jax finds by itself on known clusters.

  Elsewhere the arguments tell, or else JAX_COORDINATOR_ADDRESS (HOST:PORT of
  process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

  Raises ValueError where that is too little, or makes no sense.
  """
  given = {
    'coordinator_address': coordinator_address,
    'num_processes': num_processes,
    'process_id': process_id,
  }
  for name, value in given.items():
    if value is None:
      given[name] = os.environ.get(f'JAX_{name.upper()}')
  _check(given)
  try:
    with _impatience(given):
      jax.distributed.initialize(
        **given,
        # jax's own watches end a process without a message for people.
        initialization_timeout=2 * START_S,
        heartbeat_timeout_seconds=2 * SILENT_S,
      )
  except ValueError as error:  # what is not given was not found
    missing = ', '.join(f'--{k}' for k, v in given.items() if v is None)
    raise ValueError(
      '--distributed, but this is no cluster that jax knows (TPU pod, GKE, '
      f'Slurm, Open MPI), and not given: {missing}. Give every host '
      '--coordinator_address=HOST:PORT (of process 0), --num_processes=N and '
      '--process_id=0 to N-1; a single host needs no --distributed. '
      f'(jax: {error})'
    ) from error


@contextlib.contextmanager
def _impatience(given):
  """Says that this host waits for others, and ends it after START_S."""
  joined = threading.Event()

  def watch():
    if joined.wait(SILENT_S):
      return
    state = jax_distributed.global_state
    number, count, address = (
      found if value is None else value
      for value, found in (
        (given['process_id'], state.process_id),
        (given['num_processes'], state.num_processes),
        (given['coordinator_address'], state.coordinator_address),
      )
    )
    who = f'Host {number} of {count}'
    where = f'{address}, where host 0 is to be'
    print(f'{who} waits for the others at {where}.', file=sys.stderr)
    if not joined.wait(START_S - SILENT_S):
      print(
        f'\n{who} has waited {START_S} s for the others at {where}, and ends. '
        'Has every host been started, with numbers of its own, and can all '
        'reach that address?',
        file=sys.stderr,
        flush=True,
      )
      os._exit(1)

  threading.Thread(target=watch, daemon=True).start()
  try:
    yield
  finally:
    joined.set()


def _check(given):
  """Makes numbers of texts; ValueError where they cannot be right."""
  for name in ('num_processes', 'process_id'):
    try:
      given[name] = None if given[name] is None else int(given[name])
    except ValueError as error:
      raise ValueError(f'{name}={given[name]!r} is no number.') from error
  address, count, number = given.values()
  if address is not None and not re.fullmatch(r'.+:\d+', address):
    raise ValueError(
      f'coordinator_address={address!r} must be HOST:PORT, a free port of '
      'process 0.'
    )
  if None not in (count, number) and not 0 <= number < count:
    raise ValueError(
      f'process_id={number} must be one of 0 to {count - 1}, as '
      f'num_processes={count}.'
    )


def check_shared(folder):
  """Raises ValueError unless all hosts see the same files in the folder.

  Without that a checkpoint, of which each host writes its part, is never
  whole. To be called by all hosts.
  """
  client = jax_distributed.global_state.client
  if client is None or jax.process_count() == 1:
    return
  mark = epath.Path(folder) / '.first_host'
  number = next(_checks)
  key = f'vit_jax/shared/{number}'
  if jax.process_index() == 0:
    token = secrets.token_hex()
    mark.write_text(token)
    client.key_value_set(key, token)
  else:
    token = client.blocking_key_value_get(key, 1000 * START_S)
    if not _appears(mark, token):
      raise ValueError(
        f'--workdir={folder} is not one folder for all hosts: host '
        f'{jax.process_index()} does not see what host 0 writes there. Choose '
        'one that they share: gs://..., or on a network file system.'
      )
  client.wait_at_barrier(f'{key}/seen', 1000 * START_S)
  if jax.process_index() == 0:
    mark.unlink(missing_ok=True)


def _appears(path, text):
  """Whether the file has that text, soon: network file systems take a while."""
  for _ in range(10):
    with contextlib.suppress(OSError):
      if path.read_text() == text:
        return True
    time.sleep(1)
  return False


def agree_to_stop(step, wanted):
  """Whether every host stops after this step, because one of them wants to.

  To be called after each step by all hosts. The one that wants to stop names a
  step that no host can have reached: none is more than one step ahead of
  another, as each fetches the metrics of the step before, to which all
  contribute. The first to name one is heard.
  """
  client = jax_distributed.global_state.client
  if wanted:
    # It is taken if another host was faster.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      client.key_value_set(_STOP, str(step + 4))
  named = _read(client, _STOP)
  return named is not None and step >= int(named)


@contextlib.contextmanager
def failing_together():
  """Within it, the end of one host ends the others: they would wait for ever.

  They tell the first line of its error, or that it is silent for SILENT_S,
  and exit with status 1.
  """
  client = jax_distributed.global_state.client
  if client is None:
    yield
    return
  over = threading.Event()
  watch = threading.Thread(target=_watch, args=(client, over), daemon=True)
  watch.start()
  try:
    yield
  except BaseException as error:
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
      raise  # a stop that all have agreed on
    text = _tell(error)
    if isinstance(error, jax.errors.JaxRuntimeError):
      # Perhaps that of a collective with a host that is gone: the watch is to
      # say which.
      time.sleep(SILENT_S + 3 * _POLL_S)
    over.set()
    _fail(client, text)
  finally:
    over.set()
    watch.join()


def _tell(error):
  """Prints the error, and returns it in short."""
  if isinstance(error, SystemExit):  # a message made for people
    text = error.code.strip()
    print(f'\n{text}', file=sys.stderr)
  else:
    text = f'{type(error).__name__}: {error}'
    traceback.print_exception(error)
  sys.stdout.flush()
  sys.stderr.flush()
  return text


def _fail(client, text):
  """Tells the error to the others, and ends the process.

  An ordinary exit would wait for the others, which wait for this one.
  """
  process = jax_distributed.global_state.process_id
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    client.key_value_set(_FAILED, f'{process} {text}')
  if process == 0:
    time.sleep(3 * _POLL_S)  # the store ends with this host
  os._exit(1)


def _watch(client, over):
  """Gives signs of life, and ends the process where another host fails."""
  key, count, heard = (
    f'{_ALIVE}{jax_distributed.global_state.process_id}',
    0,
    {},
  )
  while not over.wait(_POLL_S):
    try:
      client.key_value_set(key, str(count := count + 1), allow_overwrite=True)
      if (failed := _read(client, _FAILED)) is not None:
        process, _, text = failed.partition(' ')
        if int(process) != jax_distributed.global_state.process_id:
          _end(f'Host {process} has failed: {text.splitlines()[0]}')
      signs = client.key_value_dir_get(_ALIVE)
    except jax.errors.JaxRuntimeError:
      _end('The first host, where the others meet, is gone.')
    for name, sign in signs:
      if heard.get(name, ('', 0))[0] != sign:
        heard[name] = (sign, time.monotonic())
      elif sign != _LEFT and time.monotonic() - heard[name][1] > SILENT_S:
        process = name.removeprefix(_ALIVE)
        _end(
          f'Host {process} is silent since {SILENT_S} s: killed, or cut off.'
        )
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    client.key_value_set(key, _LEFT, allow_overwrite=True)


def _end(message):
  """At once, as the main thread waits in a collective."""
  print(
    f'\n{message} This host ends too; once all do, the same command resumes.',
    file=sys.stderr,
    flush=True,
  )
  os._exit(1)


def _read(client, key):
  """The text stored under key, or None."""
  try:
    return client.key_value_try_get(key)
  except jax.errors.JaxRuntimeError as error:
    if 'NOT_FOUND' not in str(error):
      raise
    return None
