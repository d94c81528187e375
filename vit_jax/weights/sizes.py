"""The transforms of a model's pictures, for pictures of another size."""

from vit_jax.weights.grids import pair


def scale(transforms, old, new):
  """Transform settings whose sizes change in the proportion of new to old.

  What leads to the old size leads to the new one: 'resize to 256, cut out 224'
  becomes 'resize to 439, cut out 384', and the same part of the picture is
  seen. A smaller side (`ResizeSmall`) grows as the larger side of the size
  does, so that whatever was cut out of the picture still can be.

  Args:
    transforms: settings with a target, and a `size` of pixels where there is.
    old, new: (H, W).

  Returns:
    list of settings.
  """
  old, new = tuple(old[:2]), tuple(new[:2])

  def scaled(settings):
    if old == new or settings.get('size') is None:
      return dict(settings)
    if settings['target'].endswith('.ResizeSmall'):
      size = round(settings['size'] * max(new) / max(old))
    else:
      sides = pair(settings['size'])
      size = [round(s * n / o) for s, n, o in zip(sides, new, old)]
    return settings | {'size': size}

  return [scaled(settings) for settings in transforms]
