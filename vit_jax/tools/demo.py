r"""Web page on this machine: drop an image, see predictions and attention.

  python -m vit_jax.tools.demo --weights=WEIGHTS

WEIGHTS is as for predict. The page shows the most likely classes or labels, or
the numbers, the input of the model, and what it attends to there.

The server listens on this machine only (GRADIO_SERVER_NAME=0.0.0.0: on all its
addresses), and the page loads nothing from elsewhere. --share makes a public
link with gradio's service, which then transmits your images. Images are deleted
when the server ends (Ctrl-C or SIGTERM). Needs pip install -e '.[demo]'.
"""

import argparse
import importlib.resources
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import pretrained
from vit_jax.io import terminal
from vit_jax.reports import confusion
from vit_jax.reports.attention_figures import STYLES, overlay
from vit_jax.reports.pictures import rgb
from vit_jax.tools import arguments, parsers, predict
from vit_jax.tools.look import arrays, figures
from vit_jax.types import UserError
from vit_jax.weights import bundle
from vit_jax.weights.bundle import Weights

SHOWN = {'rollout': 'heads', 'attention': 'maps'}  # key in an Explainer's dict
ALL = 'all'
_SHOWN_PX = 448  # smaller side of what attention is drawn over, at least
_EXPLAINED = (
  '*Rollout* is what reaches the output from each patch through the layers up '
  'to the chosen one (figures 6 and 14 of the paper); *attention* is that of '
  'the chosen layer alone. A *mask* darkens what the model does not attend to; '
  '*heat* colours what it attends to.'
)
_EXAMPLE = importlib.resources.files('sklearn.datasets') / 'images/flower.jpg'


class Explainer:
  """Predictions and attention of one image at a time, by one program.

  `options` are more arguments of `predict.in_batches`.

  Attributes:
    has_classes: whether there are probabilities or numbers for the image.
    no_attention: reason why the model has no attention to show, or None.
    layers, heads: how many there are; 0 without attention.
  """

  def __init__(self, weights: Weights, **options: Any) -> None:
    self.weights = weights = bundle.squeeze(weights)
    self._options = options
    self.no_attention = arrays.obstacles(weights).get('rollout')
    model, self._params = pretrained.build(weights)
    steps: list[Any] = [predict.forward_fn(weights, model)]
    if not self.no_attention:
      steps.append(arrays.forward_fn(weights, model, [*SHOWN.values()]))

    def forward(params, images):
      return {k: x for step in steps for k, x in step(params, images).items()}

    self._forward = jax.jit(forward)
    dtype = weights.decode.dtype
    images = jax.ShapeDtypeStruct((1, *weights.image_shape), dtype)
    out = jax.eval_shape(forward, self._params, images)
    self.has_classes = np.ndim(out.get(weights.targets.outputs)) == 2
    shape: tuple[int, ...] = out['maps'].shape[1:3] if 'maps' in out else (0, 0)
    self.layers, self.heads = shape

  def __call__(self, path: str) -> dict[str, Any]:
    """Return a dict of what there is to show of an image file.

    These are 'input' uint8 [H, W, C], what the model sees; 'picture', the same,
    but finer; 'probabilities' or 'numbers' [K]; 'maps' and 'heads' float32 [L,
    h, gh, gw]. Only 'error' if the file is not an image.
    """
    (found,) = predict.in_batches(
      self._forward, self._params, self.weights, [path], **self._options
    )
    if 'error' not in found:
      for name, px in (('input', 1), ('picture', _SHOWN_PX)):
        (found[name],) = figures.finer_images(self.weights, [path], px)
    return found

  def top(self, found: Mapping[str, Any], count: int) -> Any:
    """Return `Targets.shown` of what is predicted."""
    kind, names = self.weights.targets, predict.names_of(self.weights)
    names = confusion.label(range(len(names)), names)
    return kind.shown(found[kind.outputs], names, count)

  def draw(
    self,
    found: Mapping[str, Any],
    shown: str = 'rollout',
    layer: int | None = None,
    head: Any = ALL,
    style: str = 'mask',
  ) -> np.ndarray:
    """Return the picture with attention drawn over it: uint8 [H, W, 3].

    Layers and heads count from 1, by default the last layer; ALL is the mean.
    """
    of_heads = found[SHOWN[shown]][(layer or self.layers) - 1]
    values = of_heads.mean(axis=0) if head == ALL else of_heads[int(head) - 1]
    return overlay(found['picture'], values, style=style)


def page(explainer: Explainer, top_k: int) -> Any:
  """Return the page as gradio Blocks."""
  gr = _gradio()

  def explain(path, *choices):
    found = explainer(path) if path else {'error': ''}
    if 'error' in found:
      reason = found['error'].removeprefix(f'{path}: ')
      message = f'**{os.path.basename(path)}**: {reason}' if path else ''
      return message, None, None, None, None
    classes = explainer.top(found, top_k) if explainer.has_classes else None
    return '', found, classes, rgb(found['input']), draw(found, *choices)

  def draw(found, *choices):
    return explainer.draw(found, *choices) if 'maps' in (found or {}) else None

  height, width, _ = explainer.weights.image_shape
  with gr.Blocks(
    title='vit_jax demo', analytics_enabled=False, delete_cache=(3600, 3600)
  ) as blocks:
    found = gr.State()
    gr.Markdown(_describe(explainer))
    buttons = ['fullscreen', 'download']
    look = {'format': 'png', 'interactive': False, 'buttons': buttons}
    with gr.Row():
      with gr.Column():
        image = gr.Image(
          label='Your image', sources=['upload', 'clipboard'], elem_id='image'
        )
        # The file as it is: our decoder reads it, and reports errors.
        image.preprocess = lambda payload: payload.path if payload else None
        example = gr.Button('Example', size='sm', elem_id='example')
        example.click(
          lambda: str(_EXAMPLE), None, image, api_visibility='private'
        )
        message = gr.Markdown(elem_id='message')
        shown = explainer.has_classes
        title = explainer.weights.targets.outputs.capitalize()
        classes = gr.Label(label=title, visible=shown, elem_id='probabilities')
        seen = gr.Image(
          label=f'Input of the model, {width} x {height} px',
          height=height + 72,  # its real size, below the label
          **look,
        )
      with gr.Column(visible=not explainer.no_attention):
        attention = gr.Image(
          label='What it attends to', elem_id='attention', **look
        )
        last = max(explainer.layers, 1)
        heads = [ALL, *map(str, range(1, explainer.heads + 1))]
        with gr.Row():
          kind = gr.Radio([*SHOWN], value='rollout', label='Show')
          style = gr.Radio(STYLES, value='mask', label='Style')
          layer = gr.Slider(
            1, max(last, 2), value=last, step=1, label='Layer', visible=last > 1
          )
          head = gr.Radio(heads, value=ALL, label='Head', elem_id='head')
        choices = [kind, layer, head, style]
    image.change(
      explain,
      [image, *choices],
      [message, found, classes, seen, attention],
      api_name='explain',
    )
    gr.on(
      [choice.change for choice in choices],
      draw,
      [found, *choices],
      attention,
      trigger_mode='always_last',
      show_progress='hidden',
      api_name='draw',
    )
  return blocks


def _describe(explainer):
  """Return the text at the top of the page, as Markdown."""
  reason, origin = explainer.no_attention, explainer.weights.origin
  lines = ['# What a Vision Transformer sees', f'**{origin}**']
  lines += explainer.weights.notes
  lines.append(f'No attention to show: {reason}.' if reason else _EXPLAINED)
  if not explainer.has_classes:
    lines.append('No predictions: the weights have no head for images.')
  return '\n\n'.join(lines)


def _gradio():
  # Without these, gradio reports its use and asks for its newest version.
  os.environ['GRADIO_ANALYTICS_ENABLED'] = 'False'
  os.environ['HF_HUB_DISABLE_TELEMETRY'] = '1'
  try:
    import gradio
  except ImportError as error:
    text = f"The demo needs gradio: pip install -e '.[demo]' ({error})"
    raise UserError(text) from error
  return gradio


def parser() -> argparse.ArgumentParser:
  made = parsers.parser(__doc__, 'tools.demo --weights=WEIGHTS')
  arguments.add_weights(made)
  parsers.add_counts(
    made,
    top_k=(5, 'classes of each image'),
    port=(None, 'of the server (the first free one from 7860 on)'),
    max_image_bytes=arguments.IMAGE_BYTES,
  )
  made.add_argument('--share', action='store_true', help='make a public link')
  return made


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  gr = _gradio()  # its absence should not be reported after a download
  limit = {'max_image_bytes': args.max_image_bytes}
  blocks = page(Explainer(arguments.read(args), **limit), args.top_k)
  fonts = {'font': ['system-ui', 'sans-serif'], 'font_mono': ['monospace']}
  _, address, public = blocks.launch(
    server_name=os.environ.get('GRADIO_SERVER_NAME', '127.0.0.1'),
    server_port=args.port,
    share=args.share,
    max_file_size='50mb',
    allowed_paths=[str(_EXAMPLE)],
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


if __name__ == '__main__':
  main()
