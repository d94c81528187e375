"""Several hosts as one run: started, stopped and failed together.

Beside its collectives jax keeps a small store of texts on the first host; what
the hosts have to tell one another out of turn goes through that.
"""

import contextlib
import os
import sys
import threading
import time
import traceback

import jax
from jax._src import distributed  # where jax keeps the client of that store

SILENT_S = 30  # a host that is not heard of for so long is taken for dead
_POLL_S = 2.0
_STOP, _FAILED, _ALIVE = 'vit_jax/stop', 'vit_jax/failed', 'vit_jax/alive/'
_LEFT = 'left'


def initialize():
  """Joins the other hosts, which jax finds by itself on known clusters.

  Elsewhere JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID tell.
  """
  numbers = ('JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
  num_processes, process_id = (os.environ.get(name) for name in numbers)
  jax.distributed.initialize(
    num_processes=None if num_processes is None else int(num_processes),
    process_id=None if process_id is None else int(process_id),
    # jax's own watch ends a process without a message for people.
    heartbeat_timeout_seconds=2 * SILENT_S,
  )


def agree_to_stop(step, wanted):
  """Whether every host stops after this step, because one of them wants to.

  To be called after each step by all hosts. The one that wants to stop names a
  step that no host can have reached: none is more than one step ahead of
  another, as each fetches the metrics of the step before, to which all
  contribute. The first to name one is heard.
  """
  client = distributed.global_state.client
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
  client = distributed.global_state.client
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
  process = distributed.global_state.process_id
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    client.key_value_set(_FAILED, f'{process} {text}')
  if process == 0:
    time.sleep(3 * _POLL_S)  # the store ends with this host
  os._exit(1)


def _watch(client, over):
  """Gives signs of life, and ends the process where another host fails."""
  key, count, heard = f'{_ALIVE}{distributed.global_state.process_id}', 0, {}
  while not over.wait(_POLL_S):
    try:
      client.key_value_set(key, str(count := count + 1), allow_overwrite=True)
      if (failed := _read(client, _FAILED)) is not None:
        process, _, text = failed.partition(' ')
        if int(process) != distributed.global_state.process_id:
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
