"""Teachers of distillation: a model and its parameters, from a weights file.

The parameters are an argument of the train step, sharded by the rules of the
model. They are not part of the TrainState: no checkpoint contains them, and no
optimizer sees them.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax import pretrained, tree
from vit_jax.models.layers import as_pair
from vit_jax.parallel.sharding import Rules, annotate, infer, rules_for
from vit_jax.runs.files import PathLike
from vit_jax.types import MACHINE, Array, Dtype, Params, PyTree, Size, UserError
from vit_jax.weights import formats
from vit_jax.weights.bundle import Weights


@dataclasses.dataclass  # not frozen: runs never share what an old file said
class Teacher:
  """Weights whose predictions a student learns, and how they are used.

  The images are converted as the file says (mean and deviation), whatever the
  student's preprocessing is. Dropout and stochastic depth are off.

  Attributes:
    path: a workdir, a checkpoint, or weights of any format of formats.py.
    options: more arguments of `formats.read`: step and ema of a workdir, trust,
      what a file does not say, and fields of the model ({'scan': True}).
    image_size: image size that the teacher is adapted to, by resizing its
      position embeddings. None: the size of the file. Images of the student
      that have another size are resized on the device, with antialiasing.
    dtype: dtype of the teacher's computation. None: that of the student.
    same_classes: whether its classes are those of the data, in the same order,
      even if they have other names. False: names that both have must be equal.
  """

  path: Annotated[PathLike, MACHINE]  # the parameters are compared
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  image_size: Size | None = None
  dtype: Dtype | None = None
  same_classes: bool = False

  def __post_init__(self) -> None:
    self._weights: Weights | None = None  # as read for the fingerprint

  def open(self, student: Any) -> 'Predictor':
    """Return the Predictor for a student; only names and shapes are read."""
    weights = formats.read(self.path, **self.options, values=False)
    model = weights.model
    if not model.num_classes or model.num_classes != student.num_classes:
      raise UserError(
        f'The teacher {self.path} has {model.num_classes or "no"} classes, the '
        f'student {student.num_classes}. Expected the same classes in the same '
        'order. Use a teacher that was fine-tuned on the data of the student.'
      )
    dtype = self.dtype or getattr(student, 'dtype', None)
    if dtype is not None and hasattr(model, 'dtype'):
      model = model.clone(dtype=dtype)
    shape = weights.image_shape
    if self.image_size is not None:
      shape = (*as_pair(self.image_size), shape[2])
    images = jax.ShapeDtypeStruct((1, *shape), np.float32)
    return Predictor(self, model, images, weights)

  def read(self) -> Params:
    """Return the parameters, nested; what the fingerprint has read is freed."""
    weights = self._weights or formats.read(self.path, **self.options)
    self._weights = None
    if self.image_size is not None:
      weights, _ = pretrained.fit(weights, image_size=self.image_size)
    params = weights.params
    if getattr(weights.model, 'scan', False):
      params = tree.stack_blocks(params)
    return tree.unflatten(params)

  def fingerprint(self) -> dict[str, Any]:
    """Return a hash of the parameters, which a resumed run compares."""
    self._weights = formats.read(self.path, **self.options)
    found = hashlib.sha256()
    for path, array in sorted(tree.flatten(self._weights.params).items()):
      found.update(f'{path} {array.dtype} {array.shape}\n'.encode())
      found.update(np.ascontiguousarray(array).tobytes())
    return {'weights': found.hexdigest()[:16]}


@dataclasses.dataclass
class Predictor:
  """Function (parameters, images of a batch) -> logits of a teacher.

  Attributes:
    teacher: the Teacher.
    model: its Flax module. `train` replaces it by the one with the attention
      that it has chosen.
    images: ShapeDtypeStruct of a batch of the images that the model takes.
    weights: description of the file.
  """

  teacher: Teacher
  model: Any
  images: jax.ShapeDtypeStruct
  weights: Weights

  @property
  def class_names(self) -> Sequence[str] | None:
    """Names that must be those of the data; None: they are not compared."""
    return None if self.teacher.same_classes else self.weights.class_names

  def abstract_params(self, mesh: Mesh, rules: Rules | None = None) -> PyTree:
    """Return ShapeDtypeStructs of the parameters, with shardings.

    `rules` are for paths that begin with 'teacher/'; None: `rules_for(mesh)`.
    """
    params = jax.eval_shape(self.model.init, jax.random.key(0), self.images)
    shapes = {'teacher': params['params']}
    rules = rules_for(mesh) if rules is None else rules
    return annotate(shapes, infer(shapes, rules, mesh))['teacher']

  def load(self, abstract_params: PyTree) -> Params:
    """Return the parameters, sharded like `abstract_params`."""

    def place(array, like):
      return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: np.asarray(array)[index]
      )

    with jax.transfer_guard('allow'):
      return jax.tree.map(place, self.teacher.read(), abstract_params)

  def __call__(self, params: Params, images: Array) -> jax.Array:
    """Return float32 logits [B, K] of images [B, H, W, C] in 0..255."""
    height, width, channels = self.images.shape[1:]
    if images.shape[3] != channels:
      raise UserError(
        f'The teacher {self.teacher.path} takes images of {channels} channels, '
        f'those of the student have {images.shape[3]}. Use a teacher for the '
        'same images.'
      )
    x = self.weights.preprocess(images)
    if x.shape[1:3] != (height, width):
      shape = (len(x), height, width, channels)
      x = jax.image.resize(x, shape, 'bilinear')
    return jax.lax.stop_gradient(self.model.apply({'params': params}, x))
