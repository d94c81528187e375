"""Wall time of a run by phase."""

from vit_jax.reports import texts
from vit_jax.reports.markup import Html, join, section, table, tag
from vit_jax.reports.workdir import Workdir

_PHASES = {  # of metrics.Monitor
  'steps': ('training steps', 2),
  'setup': ('setup', 9),
  'restoring': ('restoring a checkpoint', 8),
  'compile': ('first step, including compilation', 4),
  'data': ('waiting for data', 1),
  'evals': ('evaluation', 0),
  'saving': ('saving', 5),
  'profile': ('profile', 7),
  'lost': ('lost: steps done again after a kill', 3),
}


def account(run: Workdir) -> Html | None:
  """Return the phases as a bar and a table, longest first."""
  phases = {k: v for k, v in run.phases.items() if v > 0}
  total = sum(phases.values())
  if not total:
    return None
  order = sorted(phases, key=lambda x: -phases[x])
  bars, rows = [], []
  for phase in order:
    label, color = _PHASES.get(phase, (phase, 6))
    color, share = f'background:var(--c{color})', phases[phase] / total
    title = f'{label}: {texts.duration(phases[phase])}, {share:.1%}'
    bars.append(tag('i', style=f'{color};flex:{share:.4f}', title=title))
    swatch = tag('i', class_='swatch bar-swatch', style=color)
    name = join(swatch, ' ', label)
    rows.append([name, texts.duration(phases[phase]), f'{share:.1%}'])
  text = f'{texts.duration(total)} of wall time.'
  if run.goodput is not None:
    text += f' Goodput, the fraction in training steps: {run.goodput:.1%}.'
  return section(
    'Time',
    tag('p', text),
    tag('div', *bars, class_='time', role='img', aria_label=text),
    table(None, rows, numbers=(1, 2)),
  )
