"""Teachers of distillation: a model and its parameters, from a weights file."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import numpy as np

from vit_jax import pretrained, tree
from vit_jax.config.domains import Count, Dtype, Natural, OneOf, Size, checked
from vit_jax.models import resample
from vit_jax.models.common import as_pair
from vit_jax.objectives.frozen import Frozen, digest
from vit_jax.runs.files import PathLike
from vit_jax.types import Array, FlatParams, Params
from vit_jax.weights import bundle, formats
from vit_jax.weights.bundle import Weights


@checked
@dataclasses.dataclass  # not frozen: runs never share what an old file said
class Teacher:
  """Weights whose predictions a student learns, and how they are used.

  The images are converted as the file says (mean and deviation), whatever the
  student's preprocessing is. Dropout and stochastic depth are off.

  Attributes:
    path: a workdir, a checkpoint, or weights of any format of formats.py.
    step, ema: which checkpoint of a workdir, and whether its EMA; see
      `stored.load_params`.
    grid: (rows, columns) of a position table that is not square.
    options: more of what a file does not say, and how the model is run
      ({'scan': True}), see `formats.read`.
    trust: packages that the file may name classes of.
    image_size: image size that the teacher is adapted to, by resizing its
      position embeddings. None: the size of the file. Images of the student
      that have another size are resized on the device, with antialiasing.
    posemb_resize: method that resizes position embeddings, see `posemb.resize`.
    dtype: dtype of the teacher's computation. None: that of the student.
    same_classes: whether its classes are those of the data, in the same order,
      even if they have other names. False: names that both have must be equal.
  """

  path: PathLike
  step: Natural | None = None
  ema: bool | Annotated[str, OneOf('auto')] = 'auto'
  grid: tuple[Count, Count] | None = None
  options: Mapping[str, Any] | None = None
  trust: tuple[str, ...] = ()
  image_size: Size | None = None
  posemb_resize: Annotated[str, OneOf(*resample.METHODS)] = 'paper'
  dtype: Dtype | None = None
  same_classes: bool = False

  def __post_init__(self) -> None:
    self._weights: Weights | None = None  # as read for the fingerprint

  def open(self, student: Any) -> 'Predictor':
    """Return the function from images to the teacher's logits.

    Only names and shapes are read yet.

    Args:
      student: the model; a dtype of None is set to its dtype.

    Raises:
      ValueError: there are no such weights; they have no head, or other classes
        than the student; or images of the size do not fit the model.
    """
    weights, _ = formats.describe(self.path, step=self.step, **self._options())
    model = weights.model
    classes = getattr(student, 'num_classes', None)
    if not model.num_classes or classes not in (None, 0, model.num_classes):
      raise ValueError(
        f'The teacher {self.path} has {model.num_classes or "no"} classes, the '
        f'student {classes}. Expected the same classes in the same order. Use '
        'a teacher that was fine-tuned on the data of the student.'
      )
    dtype = self.dtype or getattr(student, 'dtype', None)
    if dtype is not None and hasattr(model, 'dtype'):
      model = model.clone(dtype=dtype)
    shape = weights.image_shape
    if self.image_size is not None:
      shape = (*as_pair(self.image_size), shape[2])
    images = jax.ShapeDtypeStruct((1, *shape), np.float32)
    frozen = Frozen(model, images, _shapes(model, images), self._load)
    return Predictor(str(self.path), weights, frozen)

  def fingerprint(self) -> dict[str, Any]:
    """Return a hash of the parameters, which a resumed run compares."""
    self._weights = self._read()
    return {'weights': digest(self._weights.params)}

  def _options(self) -> dict[str, Any]:
    given = {'trust': self.trust, 'grid': self.grid}
    return given | dict(self.options or {})

  def _read(self) -> Weights:
    options = self._options()
    return formats.read(self.path, step=self.step, ema=self.ema, **options)

  def _load(self) -> Params:
    """Return the parameters, nested; what the fingerprint has read is freed."""
    weights, self._weights = self._weights or self._read(), None
    if self.image_size is not None:
      weights, _ = pretrained.fit(
        weights, image_size=self.image_size, posemb_resize=self.posemb_resize
      )
    params: FlatParams = weights.params
    if _is_scanned(weights.model):
      params = tree.stack_blocks(params)
    return tree.unflatten(params)


@dataclasses.dataclass(frozen=True)
class Predictor:
  """Function from images of a batch to the logits of a teacher.

  Attributes:
    name: for messages.
    weights: description of the file.
    frozen: its model and parameters.
  """

  name: str
  weights: Weights
  frozen: Frozen

  @property
  def model(self) -> Any:
    """Flax module of the teacher."""
    return self.frozen.model

  @property
  def image_shape(self) -> tuple[int, ...]:
    """(H, W, C) that the model takes."""
    return self.frozen.images.shape[1:]

  def __call__(self, images: Array) -> jax.Array:
    """Return float32 logits [B, K] of images [B, H, W, C] in 0..255.

    Raises:
      ValueError: the images have another number of channels.
    """
    height, width, channels = self.image_shape
    if images.shape[3] != channels:
      raise ValueError(
        f'The teacher {self.name} takes images of {channels} channels, those '
        f'of the student have {images.shape[3]}. Use a teacher for the same '
        'images.'
      )
    x = self.weights.preprocess(images)
    if x.shape[1:3] != (height, width):
      shape = (len(x), height, width, channels)
      x = jax.image.resize(x, shape, 'bilinear')
    return jax.lax.stop_gradient(self.frozen.apply(x))


def _is_scanned(model: Any) -> bool:
  return getattr(model, 'scan', False) and isinstance(model, bundle.MODELS)


def _shapes(model: Any, images: jax.ShapeDtypeStruct) -> Params:
  """Return the ShapeDtypeStructs of a model's parameters, nested."""
  if not _is_scanned(model):
    return tree.unflatten(bundle.shapes(model, images.shape[1:]))
  return jax.eval_shape(model.init, jax.random.key(0), images)['params']
