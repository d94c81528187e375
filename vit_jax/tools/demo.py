r"""Web page on this machine: drop an image, see its classes and the attention.

  python -m vit_jax.tools.demo --weights=WEIGHTS

WEIGHTS is as for predict, and images are read and preprocessed as predict does.
The page shows the most likely classes, what the model sees of the image, and
what it attends to there:

  rollout    over all layers up to the chosen one (paper, Figs. 6 and 14). All
             heads: as in the paper. One head: what that head of the chosen
             layer attends to, through all heads of the layers before
  attention  of the chosen layer alone; all heads: their mean

Attention is that of the class token. Models without one use the mean over
patches, or the MAP head's probe.

The server listens on this machine only (GRADIO_SERVER_NAME=0.0.0.0: on all its
addresses), and the page loads nothing from elsewhere. --share makes a public
link with gradio's service, which then transmits your images. Images are deleted
when the server ends (Ctrl-C or SIGTERM).
Needs pip install -e '.[demo]'.
"""

import argparse
import collections
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import pretrained
from vit_jax.reports.attention import STYLES, overlay
from vit_jax.runs import terminal
from vit_jax.tools import arguments, parsers, predict
from vit_jax.tools.look import arrays, figures
from vit_jax.types import UserError
from vit_jax.weights.bundle import Weights

SHOWN = {'rollout': 'heads', 'attention': 'maps'}  # key in an Explainer's dict
ALL = 'all'
_SHOWN_PX = 448  # smaller side of the images on the page, at least
_MAX_UPLOAD = '50mb'


class Explainer:
  """Classes and attention of one image at a time, computed by one program.

  Args:
    weights: Weights.

  Attributes:
    weights: these weights.
    has_classes: whether there are probabilities for the image.
    no_attention: why there is no attention to show, or None.
    layers, heads: how many there are; 0 without attention.
  """

  def __init__(self, weights: Weights) -> None:
    self.weights = weights
    self.no_attention = arrays.obstacles(weights).get('rollout')
    self._shape = (1, *weights.image_shape)
    model, self._params = pretrained.build(weights)
    classify = predict.forward_fn(weights, model)
    look = None
    if not self.no_attention:
      look = arrays.forward_fn(weights, model, [*SHOWN.values()])

    def forward(params, images):
      return classify(params, images) | (look(params, images) if look else {})

    self._forward = jax.jit(forward)
    images = jax.ShapeDtypeStruct(self._shape, jnp.uint8)
    out = jax.eval_shape(forward, self._params, images)
    self.has_classes = 'probabilities' in out and out['probabilities'].ndim == 2
    shape: tuple[int, ...] = out['maps'].shape[1:3] if look else (0, 0)
    self.layers, self.heads = shape

  def __call__(self, path: str) -> dict[str, Any]:
    """Return a dict of what there is to show of an image file.

    Returns:
      'picture' uint8 [H, W, C], what the model sees, finer; 'probabilities'
      [K]; 'maps' and 'heads' float32 [L, h, gh, gw].

    Raises:
      ValueError: the file is not an image.
    """
    loaded, _ = predict.load(self.weights, [path], 1)
    (found,) = predict.in_batches(
      self._forward, self._params, loaded, self._shape
    )
    (picture,) = figures.finer_images(self.weights, [path], _SHOWN_PX)
    return found | {'picture': picture}

  def top(self, found: Mapping[str, Any], count: int) -> dict[str, float]:
    """Return {name: probability} of the most likely classes, in order."""
    names, p = self.weights.class_names, found['probabilities']
    uses = collections.Counter(names)

    def label(i):
      name = names[i] if names else f'class {i}'
      return f'{name} ({i})' if uses[name] > 1 else name

    return {label(i): float(p[i]) for i in predict.top(p, count)}

  def draw(
    self,
    found: Mapping[str, Any],
    shown: str = 'rollout',
    layer: int | None = None,
    head: Any = ALL,
    style: str = 'mask',
  ) -> np.ndarray:
    """Return the picture with attention drawn over it: uint8 [H, W, 3].

    Args:
      found: dict that a call returned.
      shown: a name in SHOWN.
      layer: from 1; the last by default.
      head: from 1, as a number or text; or ALL for the mean.
      style: of `overlay`.
    """
    of_heads = found[SHOWN[shown]][(layer or self.layers) - 1]
    values = of_heads.mean(axis=0) if head == ALL else of_heads[int(head) - 1]
    return overlay(found['picture'], values, style=style)


def page(explainer: Explainer, top_k: int) -> Any:
  """Return the page as gradio Blocks."""
  gr = _gradio()

  def explain(path, *choices):
    if path is None:
      return '', None, None, None, None
    try:
      found = explainer(path)
    except ValueError as error:
      reason = str(error).removeprefix(f'{path}: ')
      return f'**{os.path.basename(path)}**: {reason}', None, None, None, None
    classes = explainer.top(found, top_k) if explainer.has_classes else None
    return '', found, classes, found['picture'], draw(found, *choices)

  def draw(found, *choices):
    if found is None or explainer.no_attention:
      return None
    return explainer.draw(found, *choices)

  with gr.Blocks(
    title='vit_jax demo', analytics_enabled=False, delete_cache=(3600, 3600)
  ) as blocks:
    found = gr.State()
    gr.Markdown(_describe(explainer))
    look = {'format': 'png', 'interactive': False}
    look['buttons'] = ['fullscreen', 'download']
    with gr.Row():
      image = gr.Image(
        label='Your image', sources=['upload', 'clipboard'], elem_id='image'
      )
      # The file as it is: our decoder reads it, and reports errors.
      image.preprocess = lambda payload: payload.path if payload else None
      picture = gr.Image(label='What the model sees', **look)
      attention = gr.Image(
        label='What it attends to',
        visible=not explainer.no_attention,
        elem_id='attention',
        **look,
      )
    message = gr.Markdown(elem_id='message')
    choices = () if explainer.no_attention else _choices(gr, explainer)
    classes = gr.Label(
      label='Probabilities',
      visible=explainer.has_classes,
      elem_id='probabilities',
    )
    image.change(
      explain, [image, *choices], [message, found, classes, picture, attention]
    )
    for choice in choices:
      choice.change(
        draw,
        [found, *choices],
        attention,
        trigger_mode='always_last',
        show_progress='hidden',
      )
  return blocks


def _choices(gr, explainer):
  """Return the components that set the arguments of `Explainer.draw`."""
  heads = [ALL, *map(str, range(1, explainer.heads + 1))]
  with gr.Row():
    kind = gr.Radio([*SHOWN], value='rollout', label='Show')
    style = gr.Radio(STYLES, value='mask', label='Style')
    layer = gr.Slider(
      1,
      max(explainer.layers, 2),
      value=explainer.layers,
      step=1,
      label=f'Layer (1 to {explainer.layers})',
      visible=explainer.layers > 1,
    )
    head = gr.Radio(heads, value=ALL, label='Head', elem_id='head')
  return kind, layer, head, style


def _describe(explainer):
  """Return the text at the top of the page, as Markdown."""
  height, width, _ = explainer.weights.image_shape
  lines = [f'**{explainer.weights.origin}**, {height} x {width} px']
  if explainer.no_attention:
    lines.append(f'No attention to show: {explainer.no_attention}.')
  if not explainer.has_classes:
    lines.append('No probabilities: the weights have no head for images.')
  return '\n\n'.join(lines)


def _gradio():
  # Without these, gradio reports its use and asks for its newest version.
  os.environ['GRADIO_ANALYTICS_ENABLED'] = 'False'
  os.environ['HF_HUB_DISABLE_TELEMETRY'] = '1'
  try:
    import gradio
  except ImportError as error:
    raise UserError(
      f"The demo needs gradio: pip install -e '.[demo]' ({error})"
    ) from error
  return gradio


def launch(
  blocks: Any, *, port: int | None = None, share: bool = False
) -> None:
  """Start the server, print its address, and wait for Ctrl-C or SIGTERM.

  Args:
    blocks: of `page`.
    port: None for the first free one from 7860 on.
    share: whether to make a public link, too.
  """
  gr = _gradio()
  fonts = {'font': ['system-ui', 'sans-serif'], 'font_mono': ['monospace']}
  _, address, public = blocks.launch(
    server_name=os.environ.get('GRADIO_SERVER_NAME', '127.0.0.1'),
    server_port=port,
    share=share,
    max_file_size=_MAX_UPLOAD,
    quiet=True,
    prevent_thread_lock=True,
    ssr_mode=False,
    footer_links=[],
    theme=gr.themes.Default(**fonts),
  )
  print(f'The demo runs at {address} (Ctrl-C ends it).', flush=True)
  if public:
    print(f'Public link: {public}', flush=True)
  # As Ctrl-C: the server ends in order, and deletes the images.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  blocks.block_thread()


def parser() -> argparse.ArgumentParser:
  """Return the ArgumentParser."""
  made = parsers.parser(__doc__, 'tools.demo --weights=WEIGHTS')
  arguments.add_weights(made)
  add = made.add_argument
  add('--class_names', metavar='FILE', help='one name per line, or a JSON list')
  arguments.add_counts(
    made,
    top_k=(5, 'classes of each image'),
    port=(None, 'of the server (the first free one from 7860 on)'),
  )
  add('--share', action='store_true', help='make a public link, too')
  return made


def main(argv: Sequence[str] | None = None) -> None:
  """Run the command."""
  args = parser().parse_args(argv)
  with terminal.one_message():
    _gradio()  # its absence should not be reported after a download
    weights = arguments.read(args)
    if args.class_names:
      weights.class_names = arguments.class_names(args.class_names, weights)
    explainer = Explainer(weights)
    launch(page(explainer, args.top_k), port=args.port, share=args.share)


if __name__ == '__main__':
  main()
