"""The implementation of attention='auto', chosen by measurement.

    model = Autotuner().choose(model, images, ...).apply(model)

On an accelerator each candidate is compiled for the attention of the model as
one device computes it, with the dtype of the model: forward and backward in
training, and forward for evaluations and for the teacher of distillation. It is
compared with float32 einsum on random inputs, and timed. The fastest one that
is right is used. A candidate that does not compile, fails, or is wrong is
reported and left out. No model masks its attention. Dropout of attention
weights and relative positions leave no choice, see attention.py.

The choice of a run is kept in WORKDIR/attention.json, so that a resumed run
uses the same one and stays bit-identical. Measurements are kept in the user's
cache folder, by kind of device, shape and versions.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.models import attention
from vit_jax.models.attention import Implementation
from vit_jax.models.mesh import batch_axes, is_model_axis
from vit_jax.parallel import hosts as distributed
from vit_jax.runs import terminal, workdirs
from vit_jax.runs.files import PathLike, write_atomically
from vit_jax.types import Model

FILE = 'attention.json'

# Largest error that a candidate may have, see `_compile_comparison`. Measured
# on a CPU, of 'xla', 'einsum', 'pallas' and 'splash' for 50 to 785 tokens, head
# dimensions of 64 to 104: float32 6.1e-6, float16 0.0036, bfloat16 0.042, and
# 0.059 for float32 whose products are of bfloat16 numbers, as on accelerators
# by default. Attention to one token too many: 0.41 or more.
BOUNDS = {'float32': 1e-4, 'float16': 0.02, 'bfloat16': 0.1}

_PACKAGES = (
  *('jax', 'jaxlib', 'libtpu', 'tokamax', 'jax-cuda12-plugin'),
  *('jax-cuda13-plugin', 'nvidia-cudnn-cu12', 'nvidia-cudnn-cu13'),
)
_ROUNDS, _ROUND_S = 5, 0.02  # Rounds of timing; the least seconds of one.
_LATE = 'not ready within'


@dataclasses.dataclass(frozen=True)
class Case:
  """Attention that a model computes: Q queries, N tokens, h heads of size d."""

  queries: int
  tokens: int
  heads: int
  head_dim: int
  dtype: str

  @classmethod
  def of(cls, q: Any, k: Any) -> 'Case':
    """Return the case of q [B, Q, h, d] and k [B, N, h, d]."""
    _, queries, heads, head_dim = q.shape
    return cls(queries, k.shape[1], heads, head_dim, str(q.dtype))

  def __str__(self) -> str:
    return (
      f'{self.tokens} tokens, {self.heads} heads of {self.head_dim}, '
      f'{self.dtype}'
    )


@dataclasses.dataclass(frozen=True)
class Local:
  """The part of a case that one device computes: batch B, and heads.

  The batch is that of a micro-batch. `backward`: with the gradient.
  """

  case: Case
  batch: int
  heads: int
  device_kind: str
  backward: bool = True

  @classmethod
  def of(
    cls,
    case: Case,
    batch_size: int,
    mesh: jax.sharding.Mesh,
    backward: bool = True,
  ) -> 'Local':
    """Return the part of a case on a device of the mesh, see mesh.per_device.

    Args:
      case: of the model.
      batch_size: examples that all devices process at a time.
      mesh: of the devices.
      backward: whether the gradient is computed, too.
    """
    sizes = mesh.shape
    of_batch = math.prod(sizes[name] for name in batch_axes(mesh))
    of_heads = math.prod(
      size for name, size in sizes.items() if is_model_axis(name)
    )
    return cls(
      case,
      max(batch_size // of_batch, 1),
      case.heads if case.heads % of_heads else case.heads // of_heads,
      mesh.devices.flat[0].device_kind,
      backward,
    )

  @property
  def place(self) -> tuple[str, Case, bool]:
    """Key by which a resumed run finds its recorded choice, on any mesh."""
    return self.device_kind, self.case, self.backward

  @property
  def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of q, k, v and of the gradient of the output, [B, ., h, d]."""
    case = self.case
    return tuple(
      jax.ShapeDtypeStruct(
        (self.batch, n, self.heads, case.head_dim), case.dtype
      )
      for n in (case.queries, case.tokens, case.tokens, case.queries)
    )


@dataclasses.dataclass(frozen=True)
class Trial:
  """Time and error of a candidate, or why it is left out.

  Attributes:
    name: of the candidate.
    seconds: time of a pass, or None.
    error: largest relative error, or None; see BOUNDS.
    problem: why it is left out, or None.
  """

  name: str
  seconds: float | None = None
  error: float | None = None
  problem: str | None = None

  def __str__(self) -> str:
    if self.seconds is None:
      return f'{self.name}: left out, {self.problem}'
    return f'{self.name}: {1e3 * self.seconds:.3g} ms, error {self.error:.2g}'


@dataclasses.dataclass(frozen=True)
class Measurement:
  """The choice for a case, and how it was made.

  Attributes:
    local: what was measured.
    chosen: name of the implementation; None: no candidate is right.
    trials: of all candidates.
    versions: see `versions`.
  """

  local: Local
  chosen: str | None
  trials: tuple[Trial, ...]
  versions: Mapping[str, str]

  @classmethod
  def from_json(cls, row: Mapping[str, Any]) -> 'Measurement':
    """Return what `dataclasses.asdict` has made of a Measurement."""
    local = dict(row['local'])
    return cls(
      Local(Case(**local.pop('case')), **local),
      row['chosen'],
      tuple(Trial(**trial) for trial in row['trials']),
      row['versions'],
    )

  def describe(self) -> str:
    """Return lines for the log: the choice, then each candidate."""
    local = self.local
    chosen = self.chosen or 'the default, because no candidate is right'
    passes = 'forward and backward' if local.backward else 'forward'
    title = (
      f'attention: {chosen}, measured on {local.device_kind}, {passes}, '
      f'{local.batch} x {local.case}'
    )
    if local.heads != local.case.heads:
      title += f' ({local.heads} heads on each device)'
    return '\n'.join([title, *(f'  {trial}' for trial in self.trials)])


@dataclasses.dataclass(frozen=True)
class Choice:
  """The implementations that were chosen, as a Chooser of attention.py.

  Attributes:
    by_case: (Case, Implementation) pairs. Other cases get the table's.
    rows: what is recorded.
    seconds: time that was spent on measurements.
  """

  by_case: tuple[tuple[Case, Implementation], ...] = ()
  rows: tuple[Measurement, ...] = dataclasses.field(default=(), compare=False)
  seconds: float = dataclasses.field(default=0.0, compare=False)

  def __call__(self, q: Any, k: Any, v: Any) -> Implementation:
    found = dict(self.by_case).get(Case.of(q, k))
    return found or attention.KERNELS[attention.fastest(q)]

  def apply(self, model: Model) -> Model:
    """Return the model with these choices; the same one if there are none."""
    return model.clone(attention=self) if self.by_case else model

  def record(self, workdir: PathLike) -> None:
    """Write the choices to the workdir, on the first host."""
    if jax.process_index() or not self.rows:
      return
    file = epath.Path(workdir) / FILE
    rows = {row.local.place: row for row in (*_read(file), *self.rows)}
    text = json.dumps([_plain(row) for row in rows.values()], indent=2)
    write_atomically(file, text + '\n')


@dataclasses.dataclass(frozen=True)
class Autotuner:
  """Chooses implementations of attention by measurement.

  Attributes:
    candidates: what is compared. None: all that the platform has.
    platforms: on others nothing is measured, and the table in attention.py
      stays.
    max_seconds: time for all of it. Candidates for which none is left are left
      out, and the result is not kept in the cache.
    timer: function (fn, *arrays) -> seconds of a call.
    cache: folder; None: in the cache folder of the user.
  """

  candidates: tuple[Implementation, ...] | None = None
  platforms: tuple[str, ...] = ('gpu', 'tpu')
  max_seconds: float = 20.0
  timer: Callable[..., float] | None = None
  cache: PathLike | None = None

  def choose(
    self,
    model: Model,
    images: jax.ShapeDtypeStruct,
    *,
    batch_size: int,
    mesh: jax.sharding.Mesh,
    workdir: PathLike | None = None,
    backward: bool = True,
    spent: float = 0.0,
  ) -> Choice:
    """Return the choice for a model, on all hosts that of the first one.

    It comes from the workdir if that has a checkpoint, else from the cache,
    else from measurements. What was found out is printed.

    Args:
      model: Flax module. One without 'auto' as `attention` has no choice.
      images: ShapeDtypeStruct of a batch of images.
      batch_size: examples that all devices process at a time.
      mesh: of the devices.
      workdir: of the run, if there is one.
      backward: whether the model is trained, or only computes its outputs.
      spent: seconds of `max_seconds` that other choices of the run have taken.
    """
    first = mesh.devices.flat[0]
    if first.platform not in self.platforms:
      return Choice()
    wanted = [
      Local.of(case, batch_size, mesh, backward)
      for case in cases(model, images, train=backward)
    ]
    candidates = self.candidates or candidates_of(first.platform)
    known = _of_first_host(self._known(wanted, candidates, workdir))
    if known is None or not wanted:
      return Choice()
    names = {each.name: each for each in candidates}
    rows, begin = [], time.monotonic()
    for local, source in zip(wanted, known):
      if source:
        origin, row = source[0], Measurement.from_json(source[1])
        chosen = row.chosen or 'the default'
        terminal.say(f'attention: {chosen} for {local.case}, from {origin}')
      else:
        with terminal.waiting('measuring implementations of attention ...'):
          trials = measure(
            local,
            candidates,
            device=mesh.local_devices[0],
            max_seconds=self.max_seconds - spent - (time.monotonic() - begin),
            timer=self.timer,
          )
        row = Measurement(local, fastest(trials), trials, versions())
        row = Measurement.from_json(_of_first_host(_plain(row)))
        self._keep(row, candidates)
        terminal.say(row.describe())
      rows.append(row)
    by_case = [
      (row.local.case, names[row.chosen]) for row in rows if row.chosen
    ]
    return Choice(tuple(by_case), tuple(rows), time.monotonic() - begin)

  def _known(self, wanted, candidates, workdir):
    """Return [origin, JSON value] or None of each case; None for the table."""
    file = epath.Path(workdir or '') / FILE
    resumes = workdir is not None and workdirs.newest_step(workdir) is not None
    if resumes and not file.exists():
      return None  # The run has started without a choice.
    recorded = {x.local.place: x for x in _read(file)} if resumes else {}
    names = {None, *(each.name for each in candidates)}
    found = []
    for local in wanted:
      places = {
        str(file): recorded.get(local.place),
        'the cache': next(iter(_read(self._file(local, candidates))), None),
      }
      found.append(
        next(
          (
            [origin, _plain(row)]
            for origin, row in places.items()
            if row and row.chosen in names
          ),
          None,
        )
      )
    return found

  def _file(self, local, candidates):
    """Return the file of the cache for these shapes and versions."""
    facts = [_plain(local), versions(), [each.name for each in candidates]]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]
    folder = self.cache
    if folder is None:
      home = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
      folder = epath.Path(home).expanduser() / 'vit_jax' / 'attention'
    return epath.Path(folder) / f'{key}.json'

  def _keep(self, row, candidates):
    """Write a measurement to the cache, if it is complete and a file can be."""
    late = any(_LATE in (trial.problem or '') for trial in row.trials)
    if jax.process_index() or not row.chosen or late:
      return
    file = self._file(row.local, candidates)
    with contextlib.suppress(OSError):  # The next start measures again.
      file.parent.mkdir(parents=True, exist_ok=True)
      write_atomically(file, json.dumps([_plain(row)], indent=2) + '\n')


def find(setting: bool | Autotuner) -> Autotuner:
  """Return the Autotuner of a setting: True, False for none, or an object."""
  if isinstance(setting, Autotuner):
    return setting
  return Autotuner() if setting else Autotuner(platforms=())


def candidates_of(platform: str) -> tuple[Implementation, ...]:
  """Return the implementations that are meant for a platform."""
  return tuple(
    each for each in attention.KERNELS.values() if platform in each.platforms
  )


def cases(
  model: Model, images: jax.ShapeDtypeStruct, *, train: bool = True
) -> list[Case]:
  """Return the cases for which a model leaves a choice.

  Args:
    model: Flax module. One without 'auto' as `attention` leaves none.
    images: ShapeDtypeStruct of a batch of images.
    train: whether it is in training, with dropout.
  """
  if getattr(model, 'attention', None) != 'auto':
    return []
  found: dict[Case, None] = {}

  def note(q, k, v):
    if q.shape[1] > 1:  # With one query, a kernel saves nothing.
      found[Case.of(q, k)] = None
    return attention.KERNELS['einsum']

  noting = model.clone(attention=note)
  rngs = {name: jax.random.key(0) for name in ('params', 'dropout')}
  jax.eval_shape(functools.partial(noting.init, train=train), rngs, images)
  return list(found)


def measure(
  local: Local,
  candidates: Sequence[Implementation],
  *,
  device: Any,
  max_seconds: float,
  timer: Callable[..., float] | None = None,
) -> tuple[Trial, ...]:
  """Compile, check and time the candidates on a device.

  All are compiled at the same time. Three quarters of the time are for that.

  Args:
    local: the case, as one device computes it.
    candidates: what is compared.
    device: where it runs.
    max_seconds: time for all of it.
    timer: see Autotuner; None: `seconds_per_call`.
  """
  begin = time.monotonic()
  pool = concurrent.futures.ThreadPoolExecutor(len(candidates) + 1)
  reference = pool.submit(_compile_comparison, local, device)
  compiling = [pool.submit(compile_pass, x, local, device) for x in candidates]
  everything = [reference, *compiling]
  concurrent.futures.wait(everything, timeout=0.75 * max_seconds)
  pool.shutdown(wait=False, cancel_futures=True)
  arrays = _random_inputs(local, device)
  found = []
  for candidate, future in zip(candidates, compiling):
    late = time.monotonic() - begin > max_seconds
    if late or not future.done() or not reference.done():
      problem = f'{_LATE} {max_seconds:.3g} s'
      found.append(Trial(candidate.name, problem=problem))
      continue
    try:
      step = future.result()
      error = max(map(float, reference.result()(step(*arrays), *arrays)))
      if not error <= (bound := _bound(local.case.dtype, device)):
        problem = f'wrong: error {error:.3g}, where {bound:g} is allowed'
        found.append(Trial(candidate.name, error=error, problem=problem))
        continue
      seconds = (timer or seconds_per_call)(step, *arrays)
      found.append(Trial(candidate.name, seconds, error))
    except Exception as exception:  # Each compiler has its own errors.
      found.append(Trial(candidate.name, problem=first_line(exception)))
  return tuple(found)


def compile_pass(
  candidate: Implementation, local: Local, device: Any
) -> jax.stages.Compiled:
  """Return the compiled pass of a candidate.

  It maps q, k, v and the gradient of the output, [B, N, h * d] as projections
  write and read them, to the output. With a backward pass it also returns the
  gradients of q, k and v, and [h * d] of the biases of their projections.

  Args:
    candidate: an implementation.
    local: the case, as one device computes it.
    device: to compile for; present, or described.

  Raises:
    ValueError: the candidate does not support the case.
  """

  def step(*flat):
    given = (x.reshape(like.shape) for x, like in zip(flat, local.shapes))
    found = _pass(candidate, local, *given)
    return tuple(x.reshape(*x.shape[:-2], -1) for x in found)

  mesh = jax.sharding.Mesh(
    [device], ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  with jax.set_mesh(mesh):
    if obstacle := candidate.obstacle(*local.shapes[:3]):
      raise ValueError(f'it needs {obstacle}')
    return jax.jit(step).lower(*_flat(local, device)).compile()


def _pass(candidate, local, q, k, v, gradient):
  """Return the output, and with a backward pass the gradients.

  They are those of q, k, v, and of their projections' biases, which are 0 here.
  """
  if not local.backward:
    return (candidate.attend(q, k, v),)

  def biased(xs, biases):
    if candidate.attend_biased:
      return candidate.attend_biased(*zip(xs, biases))
    pairs = zip(xs, biases)
    return candidate.attend(
      *(
        (x.astype(jnp.float32) + bias[None, None]).astype(x.dtype)
        for x, bias in pairs
      )
    )

  zeros = (jnp.zeros(q.shape[-2:]),) * 3
  out, pull = jax.vjp(biased, (q, k, v), zeros)
  of_xs, of_biases = pull(gradient)
  return out, *of_xs, *of_biases


def _compile_comparison(local, device):
  """Return a compiled function of results and inputs -> error of each result.

  The error is the largest difference from float32 einsum over all elements,
  relative to the element's size plus the root mean square of the array in that
  example. One example is computed at a time, because the scores of all would
  take much memory. For the gradients of biases, sums over all examples, it is
  the root mean square of that of q: that of k is 0 but for rounding.
  """
  einsum = attention.KERNELS['einsum']

  def error(x, y, size):
    return jnp.max(jnp.abs(x - y) / (jnp.abs(y) + size))

  def one(example):
    found, inputs = example
    found, inputs = (
      [
        x.astype(jnp.float32).reshape(1, *like.shape[1:])
        for x, like in zip(each, local.shapes)
      ]
      for each in (found, inputs)
    )
    expected = _pass(einsum, local, *inputs)
    pairs = zip(found, expected)
    errors = [error(x, y, _size(y)) for x, y in pairs]
    return jnp.stack(errors), [y.reshape(-1) for y in expected[4:]]

  def compare(found, *inputs):
    errors, sums = jax.lax.map(one, (found[:4], inputs))
    sums = [jnp.sum(y, axis=0) for y in sums]
    of_biases = [error(x, y, _size(sums[0])) for x, y in zip(found[4:], sums)]
    return jnp.stack([*jnp.max(errors, axis=0), *of_biases])

  flat = _flat(local, device)
  found = flat[:1]  # the output is like the queries
  if local.backward:
    lanes = jax.ShapeDtypeStruct(
      flat[0].shape[-1:], jnp.float32, sharding=flat[0].sharding
    )
    found += [*flat[:3], *(lanes,) * 3]
  with jax.default_matmul_precision('highest'):
    return jax.jit(compare).lower(tuple(found), *flat).compile()


def _size(x):
  """Return the root mean square."""
  return jnp.sqrt(jnp.mean(x**2))


def _bound(dtype, device):
  exact = dtype != 'float32' or device.platform == 'cpu'
  return BOUNDS[dtype if exact else 'bfloat16']


def _flat(local, device):
  """Return the shapes of the arrays as projections write them, [B, N, h * d].

  With heads apart, a TPU would pad them, and copies would take most of the
  time.
  """
  sharding = jax.sharding.SingleDeviceSharding(device)
  return [
    jax.ShapeDtypeStruct(
      (*x.shape[:2], math.prod(x.shape[2:])), x.dtype, sharding=sharding
    )
    for x in local.shapes
  ]


def _random_inputs(local, device):
  """Return q, k, v and the gradient of the output.

  Scores are about -4, so that keys of padding, with a score of 0, would show.
  """
  rng = np.random.default_rng(0)
  shift = 2 * local.case.head_dim**-0.25
  return [
    jax.device_put(
      (rng.standard_normal(x.shape, np.float32) + mean).astype(x.dtype), device
    )
    for x, mean in zip(_flat(local, device), (shift, -shift, 0, 0))
  ]


def seconds_per_call(fn: Callable[..., Any], *arrays: Any) -> float:
  """Return the seconds of a call of a compiled function, the least of 5 rounds.

  Calls are queued, so that a device waits for none of them.
  """

  def seconds(calls):
    begin = time.perf_counter()
    for _ in range(calls):
      last = fn(*arrays)
    jax.block_until_ready(last)
    return (time.perf_counter() - begin) / calls

  calls = math.ceil(_ROUND_S / max(seconds(1), _ROUND_S / 50))
  return min(seconds(calls) for _ in range(_ROUNDS))


def fastest(trials: Sequence[Trial]) -> str | None:
  """Return the name of the fastest candidate that is right, or None."""
  right = [trial for trial in trials if trial.problem is None]
  best = min(right, key=lambda trial: trial.seconds or 0.0, default=None)
  return best.name if best else None


@functools.cache
def versions() -> dict[str, str]:
  """Return what else times and errors depend on: packages, driver, our code."""
  found = {}
  for name in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  found['runtime'] = jax.local_devices()[0].client.platform_version
  files = [pathlib.Path(__file__)]
  files += sorted(pathlib.Path(attention.__file__).parent.glob('*attention.py'))
  code = b''.join(file.read_bytes() for file in files)
  found['code'] = hashlib.sha256(code).hexdigest()[:12]
  return found


def _of_first_host(value):
  """Return the JSON value that the first host passes."""
  return json.loads(distributed.of_first_host(json.dumps(value)))


def _plain(value):
  return json.loads(json.dumps(dataclasses.asdict(value)))


def _read(file):
  """Return the Measurements in a file; none if it is absent or damaged."""
  try:
    rows = json.loads(file.read_text())
    return [Measurement.from_json(row) for row in rows]
  except (OSError, ValueError, TypeError, KeyError):
    return []


def first_line(exception: BaseException) -> str:
  """Return the kind and the first line of an exception, shortened."""
  text = next(iter(str(exception).splitlines()), '')
  text = f'{type(exception).__name__}: {text}'
  return text if len(text) <= 200 else f'{text[:200]} ...'
