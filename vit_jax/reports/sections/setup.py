"""Config and environment of a run."""

import json
import shlex

from vit_jax.reports.markup import Html, fold, section, table, tag
from vit_jax.reports.workdir import Workdir


def config(run: Workdir) -> Html | None:
  """Return the config, and how it differs from its preset."""
  if not run.config:
    return None
  parts = []
  preset = run.preset
  if preset is None or 'changed' not in preset:
    text = 'This run did not record the preset that its config is from.'
    parts.append(tag('p', text, class_='muted'))
  else:
    parts.append(tag('p', 'Preset: ', tag('code', preset.get('config'))))
    rows = [
      [key, _code(before), _code(after)]
      for key, (before, after) in sorted(preset['changed'].items())
    ]
    if rows:
      parts.append(table(['changed', 'preset', 'this run'], rows))
    else:
      parts.append(tag('p', 'Nothing differs from the preset.'))
  flat = sorted(_flat(run.config).items())
  rows = [[key, _code(value)] for key, value in flat]
  parts.append(fold(f'Resolved config ({len(rows)} keys)', table(None, rows)))
  if defaults := (preset or {}).get('defaults'):
    rows = [
      [key.removeprefix('config.'), tag('code', text)]
      for key, text in defaults.items()
    ]
    title = f'Defaults that the config does not set ({len(rows)})'
    parts.append(fold(title, table(None, rows)))
  return section('Config', *parts)


def _code(value):
  if value is None:
    return tag('span', '–', class_='muted')
  return tag('code', json.dumps(value, ensure_ascii=False))


def _flat(value, where=''):
  """Return {dotted key: value} of nested dicts, and of lists with dicts."""
  if isinstance(value, list) and any(isinstance(x, dict) for x in value):
    value = {str(i): x for i, x in enumerate(value)}
  if not isinstance(value, dict) or not value:
    return {where: value}
  found = {}
  for key, inner in value.items():
    found |= _flat(inner, f'{where}.{key}' if where else key)
  return found


def environment(run: Workdir) -> Html | None:
  """Return the command line, versions and devices."""
  found = dict(run.environment)
  if not found:
    return None
  argv = [str(x) for x in found.pop('argv', [])]
  packages = found.pop('packages', {})
  if devices := found.pop('devices', None):
    kind = found.pop('device_kind', '')
    shown = ', '.join(map(str, devices[:8])) + (', …' if devices[8:] else '')
    found['devices'] = f'{len(devices)} × {kind}: {shown}'
  found |= {k: v for k, v in packages.items() if v}
  rows = [
    [key.replace('_', ' '), tag('code', 'not known' if v is None else v)]
    for key, v in found.items()
  ]
  if argv and argv[0].endswith('vit_jax/main.py'):
    argv[:1] = ['python', '-m', 'vit_jax.main']
  command = tag('pre', shlex.join(argv)) if argv else None
  return section(
    'Environment',
    command,
    table(None, rows),
    tag('p', 'Directory: ', tag('code', run.path)),
  )
