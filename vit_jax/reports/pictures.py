"""What all pictures of the reports share."""

import io

import jax

from vit_jax import terminal


def figure(num_panels):
  """(figure, its axes side by side)."""
  # The object interface: pyplot would look for a display.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  made = Figure(figsize=(5.2 * num_panels, 3.8), layout='constrained')
  FigureCanvasAgg(made)
  all_axes = made.subplots(1, num_panels, squeeze=False)[0]
  for axes in all_axes:
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
  return made, all_axes


def save(made, path):
  """Writes the figure as a PNG, on the first host."""
  png = io.BytesIO()
  made.savefig(png, dpi=130, format='png')
  if jax.process_index() == 0:
    path.write_bytes(png.getvalue())


def tell(what, path):
  """Says where a picture is."""
  terminal.console().print(f'{what}: {path}', soft_wrap=True)
