"""DINOv2 (arXiv 2304.07193): DINO, iBOT on hidden patches, and KoLeo.

    loss = DINO + patch_weight * iBOT + koleo_weight * KoLeo

The student sees half of the large views with blocks of patches hidden; the
teacher, its EMA, sees all. DINO compares class tokens. iBOT compares the tokens
of hidden patches, through a head of their own. KoLeo moves the class tokens of
different images apart. Targets are balanced over the global batch.

B images, G large views, n patches, M hidden ones in the batch, widths D and K.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vit_jax.durations import Timeline
from vit_jax.meshes import batch_axes
from vit_jax.models.pooling import NoPooling
from vit_jax.models.vit import VisionTransformer
from vit_jax.objectives.block_masks import BlockMasks
from vit_jax.objectives.dino import Centre, Dino, DinoHead, SinkhornKnopp
from vit_jax.objectives.terms import koleo
from vit_jax.step import Seen
from vit_jax.types import Batch, NonNegative, Outputs, Params, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DinoV2(Dino):
  """The loss of a ViT with embedding.mask_token, see above, and its terms.

  Attributes:
    centre: converts teacher outputs to targets. With `Centre`, class tokens and
      patches have one each. Published: Centre for ViT-L on ImageNet, which has
      one head, and SinkhornKnopp for the large data set, which has two.
    patch_head: head of the patches; None: that of the class tokens.
  """

  head: DinoHead = DinoHead(last_layer='lengths')
  centre: Centre | SinkhornKnopp = SinkhornKnopp()
  masks: BlockMasks = BlockMasks()
  patch_head: DinoHead | None = DinoHead(last_layer='lengths')
  patch_weight: NonNegative = 1.0
  koleo_weight: NonNegative = 0.1
  whole_batch = True

  def __post_init__(self) -> None:
    model = self.model
    embedding: Any = getattr(model, 'embedding', None)
    pooling = getattr(model, 'pooling', None)
    fits = isinstance(model, VisionTransformer) and embedding.reduction == 1
    if not fits or isinstance(pooling, NoPooling) or not embedding.mask_token:
      raise UserError(
        f'DinoV2: the model is a {type(model).__name__} with pooling={pooling} '
        f'and embedding={embedding}. It needs a VisionTransformer with a '
        'pooling, patches of pixels and embedding.mask_token=True.'
      )

  def of_run(
    self, timeline: Timeline, images: jax.ShapeDtypeStruct, choose: Any = None
  ) -> 'DinoV2':
    if timeline.batch_size == 1 and self.koleo_weight:
      raise UserError(
        'KoLeo compares the images of a batch, and batch_size=1. Use a larger '
        'batch, or --config.objective.koleo_weight=0.'
      )
    return dataclasses.replace(self, timeline=timeline)

  def init(self, rng: jax.Array, images: jax.ShapeDtypeStruct) -> Params:
    params = super().init(rng, images)
    if self.patch_head is None:
      return params
    rng = jax.random.fold_in(rng, 1)
    return {**params, 'patches': self.patch_head.init(rng, self.model.width)}

  def carried(self) -> Any:
    """Return the first centres of class tokens and of patches, if any."""
    if isinstance(self.centre, SinkhornKnopp):
      return None
    heads = {'class': self.head, 'patches': self.patch_head or self.head}
    return {k: self.centre.carried(x.outputs or 0) for k, x in heads.items()}

  def prepare(self, batch: Batch, rng: jax.Array) -> dict[str, Any]:
    """Change colours, and add 'hidden', bool [B, G, n]."""
    views = batch['image'].shape[:2]
    grid = self.model.embedding.grid(batch['image'].shape[2:])
    hidden = self.masks(jax.random.fold_in(rng, 2), views[0] * views[1], grid)
    batch = super().prepare(batch, rng)
    return batch | {'hidden': hidden.reshape(*views, -1)}

  def large(self, batch: Batch) -> dict[str, Any]:
    hidden = batch['hidden'].reshape(-1, batch['hidden'].shape[-1])
    places = jnp.arange(hidden.shape[1])[None]
    return {'patch_sources': jnp.where(hidden, -1, places)}

  def loss(self, seen: Seen) -> Outputs:
    centres = seen.context.carried or {}
    context = seen.context._replace(carried=centres.get('class'))
    dino, metrics, *centre = super().loss(seen._replace(context=context))
    patches, patch_centre = self.patch_loss(seen, centres.get('patches'))
    carried = {'class': centre[0], 'patches': patch_centre} if centres else None
    spread = koleo(seen.features['image']['pre_logits'])
    loss = dino + self.patch_weight * patches + self.koleo_weight * spread
    metrics |= {'class_loss': dino, 'patch_loss': patches, 'koleo': spread}
    return loss, metrics | {'loss': loss}, carried

  def patch_loss(self, seen: Seen, centre: Any) -> tuple[jax.Array, Any]:
    """Return the loss of hidden patches, and their next centre.

    The loss is the mean cross-entropy of hidden patches of a view, over views.
    Views without a mask count as 0, as in the released code.
    """
    context, hidden = seen.context, seen.batch['hidden']
    n, flat = hidden.shape[-1], hidden.reshape(-1)
    counts = self.masks.counts(len(flat) // n, n)
    (index,) = jnp.nonzero(flat, size=int(counts.sum()))
    head = self.patch_head or self.head

    def outputs(params, name):
      tokens = seen.features[name]['tokens'][:, :, -n:]
      rows = _split(tokens.reshape(-1, tokens.shape[-1])[index])
      return head(params.get('patches', params), rows[None])

    teacher = outputs(context.ema['objective'], 'teacher')
    temperature = self.temperature(context.step)
    targets, centre = self.centre(teacher, temperature, centre)
    student = outputs(seen.params['objective'], 'image')
    logs = jax.nn.log_softmax(student / self.student_temperature)
    losses = -jnp.sum(targets * logs, axis=-1)[0]
    weights = hidden / jnp.maximum(1, jnp.sum(hidden, axis=-1, keepdims=True))
    loss = jnp.sum(losses * weights.reshape(-1)[index]) / len(counts)
    return loss, centre

  def pictures(self, params: Params, batch: Batch, rng: jax.Array) -> Any:
    """Return the views of 8 images, with the hidden patches in grey."""
    ((title, views),) = super().pictures(params, batch, rng).items()
    batch = self.prepare({k: x[:8] for k, x in batch.items()}, rng)
    shape = batch['image'].shape[:4]
    grid = self.model.embedding.grid(shape[2:])
    hidden = batch['hidden'].astype(jnp.uint8).reshape(*shape[:2], *grid)
    hidden = jax.image.resize(hidden, shape, 'nearest')[..., None]
    grey = 128 if views.dtype == jnp.uint8 else jnp.nan  # as in `Mae`
    large = jnp.where(hidden, grey, views[:, : shape[1]])
    return {title: views.at[:, : shape[1]].set(large.astype(views.dtype))}


def _split(rows):
  """Return rows [M, D], split over the devices, which would all have all."""
  axes = batch_axes(jax.sharding.get_abstract_mesh())
  if not axes:
    return rows
  return jax.lax.with_sharding_constraint(rows, PartitionSpec(axes))
