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
from vit_jax.data.images import MAX_IMAGE_BYTES
from vit_jax.reports.attention import STYLES, overlay
from vit_jax.runs import terminal
from vit_jax.tools import arguments, outputs, predict
from vit_jax.tools.look import arrays, figures
from vit_jax.weights.bundle import Weights

SHOWN = {'rollout': 'heads', 'attention': 'maps'}  # key in an Explainer's dict
ALL = 'all'
_SHOWN_PX = 448  # smaller side of the images on the page, at least
_PORT = 7860  # gradio's


class Explainer:
  """Classes and attention of one image at a time, computed by one program.

  Args:
    weights: Weights.
    max_image_bytes: of `images.decode`.

  Attributes:
    weights: these weights.
    has_classes: whether there are probabilities for the image.
    no_attention: why there is no attention to show, or None.
    layers, heads: how many there are; 0 without attention.

  Raises:
    ValueError: there is nothing to show, or the model does not take images.
  """

  def __init__(
    self, weights: Weights, max_image_bytes: int = MAX_IMAGE_BYTES
  ) -> None:
    self.weights = weights
    self._max_image_bytes = max_image_bytes
    self.no_attention = arrays.obstacles(weights).get('rollout')
    _, self._shape = predict.load(weights, [], 1)
    model, self._params = pretrained.build(weights)
    classify = predict.forward_fn(model, weights.preprocess, weights.activation)
    look = None
    if not self.no_attention:
      look = arrays.forward_fn(weights, model, [*SHOWN.values()])

    def forward(params, images):
      return classify(params, images) | (look(params, images) if look else {})

    self._forward = forward
    images = jax.ShapeDtypeStruct(self._shape, jnp.uint8)
    out = jax.eval_shape(forward, self._params, images)
    self.has_classes = 'probabilities' in out and out['probabilities'].ndim == 2
    shape = out['maps'].shape if look else (0, 0, 0)
    self.layers, self.heads = shape[1], shape[2]
    if not self.has_classes and not look:
      raise ValueError(
        f'{weights.origin}: there is nothing to show. The weights have no head '
        f'for classes of images, and {self.no_attention}.'
      )

  def compile(self) -> None:
    """Compile the program, so that the first image takes no longer."""
    blank = np.zeros(self._shape[1:], np.uint8)
    self._run([('blank', blank)])

  def __call__(self, path: str) -> dict[str, Any]:
    """Return a dict of what there is to show of an image file.

    Returns:
      'picture' uint8 [H, W, C], what the model sees, finer; 'classes' {name:
      probability} of all classes, most likely first; 'maps' and 'heads'
      float32 [L, h, gh, gw].

    Raises:
      ValueError: the file is not an image.
    """
    weights, limit = self.weights, self._max_image_bytes
    loaded, _ = predict.load(weights, [path], 1, max_image_bytes=limit)
    found = self._run(loaded)
    (picture,) = figures.finer_images(weights, [path], _SHOWN_PX, limit)
    return found | {'picture': picture}

  def _run(self, loaded):
    images = predict.images_of(loaded)
    loaded = (('image', image) for image in images)
    (found,) = predict.in_batches(
      self._forward, self._params, loaded, self._shape, 'raise'
    )
    return found

  def top(self, found: Mapping[str, Any], count: int) -> dict[str, float]:
    """Return {name: probability} of the most likely classes, in order."""
    names, classes = self.weights.class_names, {}
    probabilities = found['probabilities']
    uses = collections.Counter(names)
    for i in outputs.top(probabilities, count).tolist():
      name = names[i] if names else f'class {i}'
      name = f'{name} ({i})' if uses[name] > 1 else name
      classes[name] = float(probabilities[i])
    return classes

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
    mean = head == ALL
    values = of_heads.mean(axis=0) if mean else of_heads[int(head) - 1]
    return overlay(found['picture'], values, style=style)


def page(explainer: Explainer, top_k: int) -> Any:
  """Return the page as gradio Blocks."""
  gr = _gradio()

  def explain(path, *choices):
    nothing = None, None, None, None
    if path is None:
      return '', *nothing
    try:
      found = explainer(path)
    except ValueError as error:
      reason = str(error).removeprefix(f'{path}: ')
      return f'**{os.path.basename(path)}**: {reason}', *nothing
    classes = None
    if explainer.has_classes:
      classes = explainer.top(found, top_k)
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
    with gr.Row():
      with gr.Column(scale=1, min_width=260):
        image = gr.Image(
          label='Your image',
          sources=['upload', 'clipboard'],
          height=260,
          elem_id='image',
        )
        # The file as it is: our decoder reads it, and reports errors.
        image.preprocess = lambda payload: payload.path if payload else None
        message = gr.Markdown(elem_id='message')
        classes = gr.Label(
          label='Probabilities',
          visible=explainer.has_classes,
          elem_id='probabilities',
        )
      with gr.Column(scale=2, min_width=420):
        with gr.Row():
          look = {'format': 'png', 'interactive': False, 'min_width': 200}
          look['buttons'] = ['fullscreen', 'download']
          picture = gr.Image(
            label='What the model sees', elem_id='picture', **look
          )
          attention = gr.Image(
            label='What it attends to',
            visible=not explainer.no_attention,
            elem_id='attention',
            **look,
          )
        choices = ()
        if not explainer.no_attention:
          with gr.Group():
            choices = _choices(gr, explainer)
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
  shown, styles = list(SHOWN), list(STYLES)
  heads = [ALL, *map(str, range(1, explainer.heads + 1))]
  with gr.Row():
    kind = gr.Radio(shown, value=shown[0], label='Show', elem_id='show')
    style = gr.Radio(styles, value=styles[0], label='Style', elem_id='style')
  layer = gr.Slider(
    1,
    max(explainer.layers, 2),
    value=explainer.layers,
    step=1,
    label=f'Layer (1 to {explainer.layers})',
    visible=explainer.layers > 1,
    elem_id='layer',
  )
  head = gr.Radio(heads, value=ALL, label='Head', elem_id='head')
  return kind, layer, head, style


def _describe(explainer):
  """Return the text at the top of the page, as Markdown."""
  weights = explainer.weights
  height, width, _ = weights.image_shape
  parts = [f'**{weights.origin}**', f'{height} x {width} px']
  if explainer.has_classes:
    parts.append(f'{weights.model.num_classes:,} classes')
  if not explainer.no_attention:
    parts.append(f'{explainer.layers} layers of {explainer.heads} heads')
  lines = [', '.join(parts)]
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
    raise ValueError(
      f"The demo needs gradio: pip install -e '.[demo]' ({error})"
    ) from error
  return gradio


def launch(
  blocks: Any, *, port: int | None = None, share: bool = False
) -> None:
  """Start the server, print its address, and wait for Ctrl-C.

  Args:
    blocks: of `page`.
    port: None for the first free one from 7860 on.
    share: whether to make a public link, too.

  Raises:
    ValueError: the port is in use.
  """
  gr = _gradio()
  fonts = {'font': ['system-ui', 'sans-serif'], 'font_mono': ['monospace']}
  try:
    _, address, public = blocks.launch(
      server_name=os.environ.get('GRADIO_SERVER_NAME', '127.0.0.1'),
      server_port=port,
      share=share,
      quiet=True,
      prevent_thread_lock=True,
      ssr_mode=False,
      footer_links=[],
      theme=gr.themes.Default(**fonts),
    )
  except OSError as error:
    which = f'Port {port} is' if port else f'All ports from {_PORT} on are'
    raise ValueError(
      f'{which} in use. Choose another one with --port.'
    ) from error
  print(f'The demo runs at {address} (Ctrl-C ends it).', flush=True)
  if public:
    print(f'Public link: {public}', flush=True)
  # As Ctrl-C: the server ends in order, and deletes the images.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  blocks.block_thread()


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  with terminal.one_message():
    _run(args)


def parser() -> argparse.ArgumentParser:
  parser = arguments.parser(__doc__, 'demo --weights=WEIGHTS')
  add = parser.add_argument
  add('--weights', required=True, help='workdir, file or folder')
  add('--class_names', metavar='FILE', help='one name per line, or a JSON list')
  arguments.add_counts(
    parser,
    top_k=(5, 'classes of each image'),
    port=(None, f'of the server (the first free one from {_PORT} on)'),
    **arguments.MAX_IMAGE_BYTES,
  )
  add('--share', action='store_true', help='make a public link, too')
  return parser


def _run(args):
  _gradio()  # its absence should not be reported after a download
  weights = arguments.read_to_predict(args)
  if args.class_names:
    weights.class_names = arguments.names(args.class_names, weights)
  explainer = Explainer(weights, args.max_image_bytes)
  explainer.compile()
  launch(page(explainer, args.top_k), port=args.port, share=args.share)


if __name__ == '__main__':
  main()
