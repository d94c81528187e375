"""WORKDIR/report.html: a run or a study as one page that needs no network.

The page has what the workdir has: a summary, curves, evaluations, confusion
matrices and misclassified images, where the time went, the config and what
differs from its preset, and the environment. All of it is read from files, so a
page can be made of any run, also of one that is running, or was stopped.
"""

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from vit_jax.reports import markup, series, texts, thumbnails
from vit_jax.reports.markup import Html, join, tag
from vit_jax.reports.sections import (
  metrics,
  mistakes,
  setup,
  studies,
  summary,
  times,
)
from vit_jax.reports.workdir import NAME, Workdir
from vit_jax.runs.files import PathLike, write_atomically

_FOLDER = pathlib.Path(__file__).parent


def write_at_end(
  workdir: PathLike, evaluators: Mapping[str, Any] | None = None
) -> None:
  """Write the page of a run that has ended; an error is only printed.

  Only the first host writes.

  Args:
    workdir: of a run or a study.
    evaluators: of the run; the images that they got wrong are saved for pages.
  """
  if jax.process_index():
    return
  try:
    for name, evaluator in (evaluators or {}).items():
      if getattr(evaluator, 'predictions', None):
        thumbnails.write(workdir, name, evaluator.data.source)
    write(workdir)
  except Exception as error:  # the run must not fail because of its page
    print(
      f'{NAME} was not written: {type(error).__name__}: {error}. The results '
      f'are complete. Try python -m vit_jax.tools.report {workdir}',
      file=sys.stderr,
    )


def write(workdir: PathLike, output: PathLike | None = None) -> epath.Path:
  """Write the page of a run or a study; return its path.

  Args:
    workdir: of a run or a study; local, or gs://...
    output: path of the page; None: report.html in the workdir.

  Raises:
    ValueError: the directory is not a workdir.
  """
  run = Workdir(workdir)
  if run.config is None and not run.records:
    raise ValueError(
      f'{workdir} has neither config.json nor metrics.jsonl. Expected the '
      'workdir of a run or a study.'
    )
  path = epath.Path(output) if output else run.path / NAME
  make = study_page if run.is_study else run_page
  write_atomically(path, make(run).encode('utf-8', 'backslashreplace'))
  return path


def run_page(run: Workdir) -> str:
  """Return the page of a run as text."""
  charts = series.of_run(run.records)
  kinds = {'train': 'Training run', 'evaluate': 'Evaluation'}
  study = None
  if (parent := run.path.parent / 'config.json').exists():
    runs = json.loads(parent.read_text()).get('runs')
    if isinstance(runs, dict) and run.name in runs:
      study = run.path.parent.name
  what = [kinds.get(run.kind, 'Run')]
  if study:
    link = tag('a', study, href=f'../{NAME}')
    what.append(join(' of the study ', link))
  return _page(
    run,
    what,
    tiles=summary.tiles(run),
    charts=charts,
    sections=[
      metrics.curves(charts),
      metrics.evaluations(run),
      *mistakes.of_run(run),
      times.account(run),
      setup.config(run),
      setup.environment(run),
    ],
  )


def study_page(study: Workdir) -> str:
  """Return the page of a study as text."""
  runs = study.runs()
  charts = series.of_study({run.name: run.records for run in runs})
  done = [run for run in runs if run.done]
  bad = [run for run in runs if run.status[1] == 'bad']
  note = f'{len(bad)} diverged' if bad else None
  seconds = [run.seconds for run in runs if run.seconds]
  tiles = [('Runs done', f'{len(done)} of {len(runs)}', note)]
  if seconds:
    tiles.append(
      ('Time of all runs', texts.duration(sum(seconds)), _in_steps(runs))
    )
  state = ('finished', 'good')
  if len(done) < len(runs):
    state = (f'{len(done)} of {len(runs)} runs are done', 'warn')
  return _page(
    study,
    ['Study'],
    status=state,
    tiles=tiles,
    charts=charts,
    sections=[
      studies.reports(study),
      studies.table_of(runs),
      metrics.curves(charts, shared=True),
      setup.config(study),
      setup.environment(study),
    ],
  )


def _in_steps(runs):
  """Return the goodput of several runs as a note, or None."""
  phases = [run.phases for run in runs if run.goodput is not None]
  total = sum(sum(x.values()) for x in phases)
  return (
    f'{sum(x["steps"] for x in phases) / total:.0%} in steps' if total else None
  )


def _page(run, what, *, tiles, charts, sections, status=None):
  """Return the whole document."""
  status, color = status or run.status
  times = [r['time'] for r in run.records if 'time' in r]
  when = None
  if times:
    when = f' · last record {times[-1].replace("T", " ")[:16]} UTC'
  steps = [x for chart in charts for s in chart['series'] for x in s['x']]
  data = {
    'charts': charts,
    'steps': [min(steps, default=0), max(steps, default=1)],
    'shared': run.is_study,
  }
  shown = [
    tag(
      'div',
      tag('dt', name),
      tag('dd', value, tag('small', note) if note else None),
    )
    for name, value, note in tiles
  ]
  diverged = (run.done or {}).get('diverged')
  body = [
    tag('h1', run.name),
    tag('p', *what, ' · ', tag('span', status, class_=color), when),
    tag('p', diverged, class_='bad') if diverged else None,
    tag('dl', *shown, class_='tiles') if shown else None,
    *sections,
    tag('div', class_='hidden', id='live', aria_live='polite'),
    markup.script(data),
    Html(f'<script>{(_FOLDER / "page.js").read_text()}</script>'),
  ]
  # The policy forbids every connection; all the page needs is in it.
  head = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<link rel="icon" href="data:,">{tag('title', f'{run.name} · vit_jax')}
<style>{(_FOLDER / 'page.css').read_text()}</style></head>"""
  return f'{head}<body>{join(*body)}</body></html>\n'
