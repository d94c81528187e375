"""Masked patch prediction: the paper's self-supervision (4.6, B.1.2).

Half of the patch embeddings of an image are corrupted: 80% of these become a
learned mask vector, 10% the embedding of another patch, 10% stay. What each
corrupted patch looked like is predicted from its own representation.

Shapes: B images, n patches of ph x pw pixels, C channels, K outputs a patch.
What a target is, what is predicted of it and what that looks like as a picture
is in patch_targets.py.

Not in the paper: whether exactly half of an image's patches are corrupted or
each with probability 1/2 (here the former: every image then weighs the same,
on any number of devices and micro-batches); whether the other patch is of the
same image (here it is); how the mask vector is initialised (layers.py).
"""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.objectives import patch_targets


@dataclasses.dataclass(frozen=True)
class Corruption:
  """What becomes of an image's patches.

  Attributes:
    ratio: of n patches, round(ratio * n) are corrupted, at least 1.
    mask_share: share of these that the mask vector replaces.
    swap_share: share that another patch of the image replaces; the rest stay.

  Raises:
    ValueError: shares that make no sense.
  """

  ratio: float = 0.5
  mask_share: float = 0.8
  swap_share: float = 0.1

  def __post_init__(self):
    if not 0 < self.ratio <= 1:
      raise ValueError(
        f'ratio={self.ratio} of the patches cannot be corrupted; give more '
        'than 0 and at most 1 (the paper: 0.5, BERT: 0.15).'
      )
    shares = self.mask_share, self.swap_share
    if min(shares) < 0 or sum(shares) > 1 + 1e-6:
      raise ValueError(
        f'mask_share={shares[0]} and swap_share={shares[1]} must be 0 or more, '
        'and 1 or less together; the patches that remain are kept.'
      )

  def draw(self, rng, num_patches):
    """Draws for one image.

    Args:
      rng: key.
      num_patches: n.

    Returns:
      (corrupted bool [n], sources int32 [n]): which patches take part in the
      loss, and the number of the patch whose embedding stands in each one's
      place, -1 for the mask vector.
    """
    if num_patches < 2:
      raise ValueError(
        f'The images have {num_patches} patch; masked patch prediction needs '
        '2 or more. Make images larger or patches smaller.'
      )
    which, how, other = jax.random.split(rng, 3)
    count = max(1, round(self.ratio * num_patches))
    place = jnp.arange(num_patches)
    corrupted = jax.random.permutation(which, place) < count
    draw = jax.random.uniform(how, (num_patches,))
    masked = corrupted & (draw < self.mask_share)
    swapped = corrupted & ~masked & (draw < self.mask_share + self.swap_share)
    # 1 to n - 1 places on: never the patch itself.
    step = jax.random.randint(other, (num_patches,), 1, num_patches)
    sources = jnp.where(swapped, (place + step) % num_patches, place)
    return corrupted, jnp.where(masked, -1, sources)


def masked_patches(
  model,
  *,
  preprocess,
  predict='mean_colour',
  downsampled_to=4,
  ratio=0.5,
  mask_share=0.8,
  swap_share=0.1,
):
  """LossFn of masked patch prediction; labels in the batch are not looked at.

  The loss is the mean over the corrupted patches, of which every image has as
  many; those that were kept are among them.

  Args:
    model: VisionTransformer with pooling 'none', mask_token and as many
      num_classes as the target needs; class_token for what is fine-tuned by it.
    preprocess: uint8 images -> float images.
    predict: 'mean_colour', 3 bits a channel as one of 512 classes (the paper's
      choice); 'downsampled', those of each cell of the patch reduced to 4 x 4;
      'pixels', the preprocessed patch itself, in squared error.
    downsampled_to: cells on a side of a 'downsampled' patch.
    ratio, mask_share, swap_share: see Corruption.

  Raises:
    ValueError: an argument that makes no sense; when first called, a model or
      images that do not suit.
  """
  prediction = Prediction(
    model,
    preprocess=preprocess,
    target=patch_targets.make(predict, preprocess, downsampled_to),
    corruption=Corruption(ratio, mask_share, swap_share),
  )

  def loss_fn(params, batch, rng):
    draw_rng, dropout_rng = jax.random.split(rng)
    keys = jax.random.split(draw_rng, len(batch['image']))
    found = prediction(params, batch['image'], keys, dropout_rng=dropout_rng)
    # Each image has as many corrupted patches, so the mean of means is exact.
    metrics = {name: jnp.mean(x) for name, x in found['metrics'].items()}
    return metrics['loss'], metrics

  return loss_fn


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Corrupts images and predicts their patches: what training, evaluation and
  pictures share.

  Attributes:
    model, preprocess: see masked_patches.
    target: of patch_targets.
    corruption: what is drawn.

  Raises:
    ValueError: the model cannot do it.
  """

  model: object
  preprocess: object
  target: object
  corruption: Corruption

  def __post_init__(self):
    model = self.model
    wanted = {'pooling': 'none', 'mask_token': True, 'resnet_stages': None}
    why = {
      'pooling': 'every patch is predicted from its own representation',
      'mask_token': 'masked patches are replaced by a learned vector',
      'resnet_stages': 'the cells of a feature map have seen their neighbours, '
      'so that nothing would be hidden',
    }
    for field, value in wanted.items():
      found = getattr(model, field, None)
      if found != value:
        raise ValueError(
          f'masked_patches: the model has {field}={found!r}, expected '
          f'{value!r}: {why[field]}.'
        )

  def __call__(self, params, images, keys, *, dropout_rng=None):
    """Corrupts, predicts and compares.

    Args:
      params: of the model.
      images: uint8 [B, H, W, C].
      keys: [B], one for each image.
      dropout_rng: key, in training; None otherwise.

    Returns:
      metrics: {'loss', and of classes 'accuracy'}: [B], means over the
        corrupted patches of each image.
      corrupted: bool [B, n]; sources: int32 [B, n], see Corruption.draw.
      outputs: float32 [B, n, K].
    """
    patches = patch_targets.cut(images, self.model.patch_size)
    num_patches = patches.shape[1]
    self._check_outputs(patches)
    corrupted, sources = jax.vmap(self.corruption.draw, in_axes=(0, None))(
      keys, num_patches
    )
    outputs = self.model.apply(
      {'params': params},
      self.preprocess(images),
      train=dropout_rng is not None,
      patch_sources=sources,
      rngs=None if dropout_rng is None else {'dropout': dropout_rng},
    )
    compared = self.target.compare(outputs, patches)
    weights = corrupted / jnp.sum(corrupted, axis=1, keepdims=True)
    return {
      'metrics': {k: jnp.sum(weights * x, 1) for k, x in compared.items()},
      'corrupted': corrupted,
      'sources': sources,
      'outputs': outputs,
    }

  def _check_outputs(self, patches):
    needed = self.target.num_outputs(patches.shape[2:])
    if self.model.num_classes != needed:
      raise ValueError(
        f'The model has num_classes={self.model.num_classes}; to predict '
        f'{self.target} of patches {patches.shape[2:]} (height, width, '
        f'channels) it needs {needed}.'
      )
