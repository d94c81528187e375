"""Hooks of MkDocs: pages written from the code, and links into the repository.

- index.md, contributing.md, changelog.md: the files at the root.
- configs/: a page for each file in configs/, with its docstring and all keys
  that the command line takes; and one with the functions and classes that they
  name.
- commands.md: the help of each command.
- api/: a page for each module, by mkdocstrings. `Blocks` adapts docstrings.

The site has no address of the repository. So a link to a file of the code leads
to its page, and a link to any other file becomes text.
"""

import ast
import importlib
import inspect
import io
import pathlib
import posixpath
import re
import sys
import textwrap

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
COPIED = {
  'README.md': 'index.md',
  'CONTRIBUTING.md': 'contributing.md',
  'CHANGELOG.md': 'changelog.md',
}
# Code, which has no links, or a link, whose text may have code.
_LINK = re.compile(
  r'```.*?```'
  r'|(?P<image>!?)\[(?P<text>(?:`[^`\n]*`|[^\[\]`])*)\]\((?P<link>[^()\s]+)\)'
  r'|`[^`\n]*`',
  re.S,
)


class Blocks(griffe.Extension):
  """Shows docstrings as they are: they are plain text, not Markdown."""

  def on_object(self, *, obj, **kwargs):
    del kwargs
    if obj.docstring:
      obj.docstring.value = escape(fence_blocks(obj.docstring.value))


def escape(text):
  """Return text with Markdown's characters escaped, except in code.

  Stars at the beginning of a line are those of arguments (*args) or lists.
  """
  code = r'```.*?```|`[^`\n]*`|^ *\*+'
  return re.sub(
    rf'(?ms:{code})|[*<\[]',
    lambda found: found[0] if len(found[0]) > 1 else f'\\{found[0]}',
    text,
  )


def fence_blocks(text):
  """Return a docstring with fences around indented lines before `Args:`.

  Continued lines of list items stay as they are.
  """
  sections = re.search(
    r'^(Args|Attributes|Returns|Yields|Raises):$', text, re.M
  )
  end = sections.start() if sections else len(text)
  out, block, in_list = [], [], False

  def close():
    while block and not block[-1]:
      block.pop()
    if block:
      shown = textwrap.dedent('\n'.join(block))
      out.extend(['', '```text', shown, '```', ''])
      block.clear()

  for line in text[:end].splitlines():
    if (line.startswith('  ') and not in_list) or (block and not line):
      block.append(line)
    else:
      close()
      in_list = bool(re.match(r'[-*] |\d+\. ', line)) or (
        in_list and line.startswith('  ')
      )
      out.append(line)
  close()
  return '\n'.join(out) + '\n' + text[end:]


def on_config(config):
  sys.path[:0] = [str(ROOT)]
  pages = {'Configs': config_pages(), 'API': api_pages()}
  config.generated = {'commands.md': _commands()}
  listed = {page for entry in config.nav for page in _pages_of(entry)}
  for entry in config.nav:
    (title,) = entry
    if title == 'Guide':
      names = {path.name for path in (ROOT / 'docs').glob('*.md')}
      entry[title] += sorted(names - listed)
    if title in pages:
      config.generated |= pages[title]
      entry[title] = list(pages[title])
  return config


def _pages_of(entry):
  (pages,) = entry.values()
  return [pages] if isinstance(pages, str) else pages


def on_files(files, config):
  for name, page in COPIED.items():
    text = (ROOT / name).read_text()
    files.append(File.generated(config, page, content=text))
  for page, text in config.generated.items():
    files.append(File.generated(config, page, content=text))
  return files


def on_page_markdown(markdown, page, **kwargs):
  """Lead links into the repository to pages of the site, and fill in tables.

  `<!-- configs.NAME.FUNCTION -->` stands for the text that it returns.
  """
  markdown = re.sub(r'<!-- (configs\.\w+)\.(\w+) -->', _call, markdown)
  generated = kwargs['config'].generated
  here = page.file.src_uri
  origin = {new: old for old, new in COPIED.items()}.get(here, f'docs/{here}')

  def lead(found):
    image, text, link = found.group('image', 'text', 'link')
    if link is None:
      return '\n'.join(map(_broken, _joined(found[0]).split('\n')))
    if re.match(r'[a-z]+:|#', link) or here in generated:
      return found[0]
    path, hash_, anchor = link.partition('#')
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    target = page_of(path)
    if target is None:
      return text
    target = posixpath.relpath(target, posixpath.dirname(here) or '.')
    return f'{image}[{text}]({target}{hash_}{anchor})'

  return _LINK.sub(lead, markdown)


def _call(found):
  module, name = found.groups()
  return getattr(importlib.import_module(module), name)()


def _joined(text):
  """Return text in which each command `python -m` is one line."""
  return re.sub(
    r'(?m)^python -m (?:.*\\\n)*.*$',
    lambda found: re.sub(r' *\\\n *', ' ', found[0]),
    text,
  )


def _broken(line, width=68):
  """Return a command with line breaks before flags, which pages have room for.

  The copy button of a page covers the end of a line.
  """
  if not line.startswith('python -m ') or len(line) <= width:
    return line
  rows = ['']
  for word in re.split(r' (?=--)', line):
    if rows[-1] and len(rows[-1]) + len(word) > width:
      rows.append('   ')
    rows[-1] += f' {word}' if rows[-1] else word
  return ' \\\n'.join(rows)


def page_of(path):
  """Return the site's page for a file of the repository, or None."""
  if path in COPIED:
    return COPIED[path]
  if path.startswith('docs/') and (ROOT / path).is_file():
    return path.removeprefix('docs/')
  if path.startswith('configs/') and path.endswith('.py'):
    return f'{path.removesuffix(".py")}.md'
  if path == 'configs':
    return 'configs/index.md'
  if path.startswith('vit_jax'):
    return f'api/{path.removesuffix(".py").replace("/", ".")}.md'
  return None


def on_post_build(config):
  """Raise if a page loads something from elsewhere: the site works offline."""
  loads = re.compile(
    r'<(?:script|img|iframe|source)[^>]*\ssrc="?(?:https?:)?//[^">\s]*'
    r'|<link[^>]*rel="?(?:stylesheet|preconnect|icon)[^>]*href="?(?:https?:)?//'
    r'|@import[^;]*//'
  )
  for path in pathlib.Path(config.site_dir).rglob('*.html'):
    if found := loads.search(path.read_text()):
      raise PluginError(f'{path.name} loads from elsewhere: {found[0]}')


def config_pages():
  """Return {page: Markdown} of the config reference."""
  from vit_jax import config

  pages, targets, rows = {}, {}, []
  for path in sorted((ROOT / 'configs').rglob('*.py')):
    if 'def get_config' not in path.read_text():
      continue
    name = path.relative_to(ROOT).with_suffix('')
    doc = inspect.getdoc(importlib.import_module('.'.join(name.parts)))
    loaded = config.load(path)
    for target in _targets(loaded):
      targets.setdefault(target, []).append(f'{name}'[8:])
    link = f'[{path.stem}]({f"{name}"[8:]}.md)'
    rows.append(f'| {link} | {_first_line(doc)} |')
    title = f'# {name}.py\n\n'
    pages[f'{name}.md'] = f'{title}{_fenced(doc)}\n{_keys(config, loaded)}'
  index = _INDEX.format(rows='\n'.join(rows))
  return {
    'configs/index.md': index,
    'configs/targets.md': _target_page(targets),
    **pages,
  }


_INDEX = """# Configs

A config is plain data that names functions and classes, and their arguments:
[how it is read](../training.md#configs). These files come with the code:

| file | what it is |
|---|---|
{rows}

[Functions and classes that they name](targets.md) are the schema: their
arguments are the keys. `--print_config` prints the keys of any command with
their values.
"""


def _keys(config, loaded):
  """Return the keys of a config with its default argument, as Markdown."""
  call = config.plan_run(loaded)
  lines = '\n'.join(config.settings(call))
  return (
    '## Keys\n\nAll keys without an argument of the config; `...` is yours to '
    'set. Set them on the command line as `--KEY=VALUE`.\n\n'
    f'{_fenced(lines, "python")}'
  )


def _targets(value):
  """Yield the dotted paths that a config names as `run` or `target`."""
  if hasattr(value, 'items') and not isinstance(value, type):
    try:
      items = dict(value.items(preserve_field_references=True))
    except TypeError:
      items = dict(value)
    for key, inner in items.items():
      if key in ('run', 'target') and isinstance(inner, str):
        yield inner
      yield from _targets(inner)
  elif isinstance(value, list | tuple):
    for inner in value:
      yield from _targets(inner)


def _target_page(targets):
  """Return Markdown with the signature and docstring of each target.

  The dataclasses that the three functions of `run` take come first: they have
  no target in a config.
  """
  runs = {name: where for name, where in targets.items() if _is_run(name)}
  ours = [name for name in sorted(targets) if name.startswith('vit_jax.')]
  ours = [name for name in ours if name not in runs]
  other = sorted(set(targets) - set(ours) - set(runs))
  parts = [
    '# Functions and classes that configs name\n\n'
    'A dict with a `target` names one of these, or any other that can be '
    'imported, and gives its arguments. Durations take a unit: `every` is '
    '`every_steps`, `every_epochs`, `every_examples` or `every_fraction`.\n',
    '## run\n',
    *(_member(name) for name in sorted(runs)),
    '## Their parts, without a target\n',
    *(_member(name) for name in _dataclasses(runs)),
    '## target\n',
    *(_member(name) for name in ours),
    '## Of other packages\n',
    *(f'- `{name}`' for name in other),
  ]
  return '\n'.join(parts) + '\n'


def _is_run(name):
  from vit_jax import config

  first = next(iter(config.parameters_of(config.locate(name))), '')
  return first == 'workdir'


def _dataclasses(runs):
  """Return the paths of the dataclasses of this package in the signatures."""
  import dataclasses
  import typing

  from vit_jax import config

  found, functions = {}, [config.locate(name) for name in runs]
  for fn in (*functions, *filter(None, map(config.schema_of, functions))):
    hints = list(typing.get_type_hints(fn).values())
    hints += [type(p.default) for p in config.parameters_of(fn).values()]
    while hints:
      hint = hints.pop()
      hints += typing.get_args(hint)
      if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        found[f'{hint.__module__}.{hint.__qualname__}'] = None
  return sorted(name for name in found if name.startswith('vit_jax.'))


def _member(name):
  options = 'heading_level: 3, show_root_toc_entry: true, members: false'
  options += ', show_root_full_path: true, skip_local_inventory: true'
  return f'::: {name}\n    options: {{{options}}}\n'


def _commands():
  """Return Markdown: examples of each command from the pages, and its help."""
  rows, parts = [], []
  for path in sorted((ROOT / 'vit_jax').rglob('*.py')):
    name = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    is_command = "if __name__ == '__main__'" in path.read_text()
    is_worker = path.parent.parent.name == 'tools' and path.stem != '__main__'
    if is_command and not is_worker:
      command = f'python -m {name.removesuffix(".__main__")}'
      doc = ast.get_docstring(ast.parse(path.read_text()))
      what = _first_line(re.sub(r'^python .*\n\n', '', doc)).partition('. ')[0]
      rows.append(f'| `{command}` | {what} |')
      parts += [f'## {command}', *_examples(command), _fenced(_help(name))]
  head = '# Commands\n\n| command | what it does |\n|---|---|'
  return '\n'.join([head, *rows, '', *(f'{part}\n' for part in parts)])


def _examples(command):
  """Return Markdown with the lines of pages that run a command."""
  sources = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
  lines, links = {}, []
  for path in sources:
    blocks = '\n'.join(re.findall(r'```bash\n(.*?)```', path.read_text(), re.S))
    blocks = _joined(blocks)
    found = re.findall(rf'^{re.escape(command)}(?: .*)?$', blocks, re.M)
    if found:
      lines |= dict.fromkeys(found)
      page = COPIED.get(path.name, path.name)
      title = path.read_text().partition('\n')[0].lstrip('# ')
      links.append(f'[{title}]({page})')
  if lines:
    shown = '\n'.join(_broken(line) for line in list(lines)[:6])
    yield _fenced(shown, 'bash')
    yield f'Explained in {", ".join(links)}.'


def _help(name):
  """Return what --help prints, or the docstring if there is no parser."""
  from absl import flags

  module = importlib.import_module(name)
  if hasattr(module, 'parser'):
    file = io.StringIO()
    module.parser().print_help(file)
    return file.getvalue()
  defined = flags.FLAGS.flags_by_module_dict().get(name, [])
  options = [
    textwrap.fill(f'--{f.name}: {f.help}', 80, subsequent_indent='    ')
    for f in defined
  ]
  return '\n'.join([module.__doc__, *options])


def api_pages():
  """Return {page: Markdown} of the API reference."""
  pages = {}
  for path in sorted((ROOT / 'vit_jax').rglob('*.py')):
    parts = path.relative_to(ROOT).with_suffix('').parts
    if parts[-1] == '__main__':
      continue
    name = '.'.join(parts).removesuffix('.__init__')
    options = 'options: {show_root_heading: false}'
    pages[f'api/{name}.md'] = f'# {name}\n\n::: {name}\n    {options}\n'
  return pages


def _first_line(doc):
  return doc.split('\n\n')[0].replace('\n', ' ').replace('|', '\\|')


def _fenced(text, language='text'):
  return f'```{language}\n{text}\n```\n'
