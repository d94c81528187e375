"""A frozen teacher, read from a file."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax import tree, types
from vit_jax.data import transforms
from vit_jax.models.vit import as_pair
from vit_jax.parallel.sharding import Rules, annotate, infer
from vit_jax.weights import formats, surgery
from vit_jax.weights.bundle import Weights
from vit_jax.weights.surgery import InitFrom


class FrozenModel:
  """A model whose parameters are an argument of the train step.

  They are sharded by the rules of the model. No checkpoint contains them, and
  no optimizer sees them. A resumed run compares them. A subclass has copies
  with `model` and `images`, a ShapeDtypeStruct of its batches.
  """

  model: Any
  images: Any
  init_from: InitFrom  # how the parameters are fitted to the model
  class_names: Any = None  # must equal those of the data, if both are known

  def opened(self, **attributes: Any) -> Any:
    """Return a copy with these attributes."""
    made = copy.copy(self)
    vars(made).update(attributes)
    return made

  def read(self) -> types.FlatParams:
    """Return the parameters of the weights, {path: array}."""
    return surgery.read(self.init_from).params

  def fingerprint(self) -> dict[str, Any]:
    """Return a hash of the parameters, which a resumed run compares."""
    return {'weights': tree.fingerprint(self.read())}

  def abstract_params(self, mesh: Mesh, rules: Rules | None = None) -> Any:
    """Return ShapeDtypeStructs of the parameters, with shardings.

    `rules` are for paths that begin with 'teacher/', see `sharding.infer`.
    """
    params = jax.eval_shape(self.model.init, jax.random.key(0), self.images)
    shapes = {'teacher': params['params']}
    return annotate(shapes, infer(shapes, rules, mesh))['teacher']

  def load(self, mesh: Mesh, rules: Rules | None = None) -> types.Params:
    """Return the parameters, sharded like `abstract_params`."""
    shapes, model = self.abstract_params(mesh, rules), self.model
    flat = tree.flatten(shapes)
    found, _ = surgery.adapt(self.read(), flat, model, self.init_from)
    # A new mask vector or head has no part in features.
    arrays = {
      k: x if isinstance(x, np.ndarray) else np.zeros(x.shape, x.dtype)
      for k, x in found.items()
    }
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.device_put(tree.unflatten(arrays), shardings)


@dataclasses.dataclass(eq=False)  # runs never share what an old file said
class FrozenTeacher(FrozenModel):
  """A model and its parameters, from a weights file.

  Dropout and stochastic depth are off.

  Attributes:
    path: a workdir, a checkpoint, or weights of any format of formats.py.
    options: more arguments of `formats.read`: step and ema of a workdir, trust,
      what a file does not say, and fields of the model ({'scan': True}).
    image_size: pixels of the images that it sees, to which its positions are
      resized; None: those of the weights, such as 518 for DINOv2.
  """

  path: Annotated[types.PathLike, types.MACHINE]  # the parameters are compared
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  image_size: types.Size | None = None

  weights: ClassVar[Weights]  # without parameters

  def open(self, student: Any, choose: Any = None) -> Any:
    """Return the teacher with its model, in the dtype of the student."""
    weights = formats.read(self.path, **self.options, values=False)
    model, dtype = weights.model, getattr(student, 'dtype', None)
    if dtype is not None and hasattr(model, 'dtype'):
      model = model.clone(dtype=dtype)
    size = as_pair(self.image_size or weights.image_shape[:2])
    shape = (1, *size, weights.image_shape[2])
    images = jax.ShapeDtypeStruct(shape, np.float32)
    model = choose(model, images, backward=False) if choose else model
    return self.opened(model=model, images=images, weights=weights)

  @property
  def init_from(self) -> InitFrom:  # type: ignore[override]
    return InitFrom(self.path, head='keep')

  def read(self) -> types.FlatParams:
    return formats.read(self.path, **self.options).params

  def convert(self, images: types.Array, resize: bool = True) -> jax.Array:
    """Return the images that the teacher gets, from [B, H, W, C] in 0..255.

    The file says how they are normalised, and the interpolation that resizes
    them, on the device and with antialiasing.
    """
    x = self.weights.preprocess(images)
    shape = (len(x), *self.images.shape[1:])
    if x.shape[-1] != shape[-1]:
      raise types.UserError(
        f'The teacher {self.path} takes images of {shape[-1]} channels, and '
        f'these have {x.shape[-1]}. Set --config.data.source.channels, or use '
        'another teacher.'
      )
    if resize and x.shape != shape:
      method = transforms.antialiased(self.weights.transforms)
      x = jax.image.resize(x, shape, method.replace('lanczos', 'lanczos3'))
    return x
