"""HTML from Python values. Everything that is not `Html` is escaped."""

import base64
import html
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

MAX_BYTES = 8_000_000  # of a file that becomes part of a page


class Html(str):
  """Text that is HTML already."""


def tag(name: str, *children: Any, **attributes: Any) -> Html:
  """Return an element.

  Args:
    name: of the element.
    *children: Html, or values whose text is escaped. None is left out.
    **attributes: by name; class_ is class, data_x is data-x. None is left out.
  """
  return Html(f'<{name}{_attributes(attributes)}>{join(*children)}</{name}>')


def _attributes(found):
  names = {key: key.strip('_').replace('_', '-') for key in found}
  return ''.join(
    f' {names[key]}="{html.escape(str(value))}"'
    for key, value in found.items()
    if value is not None
  )


def join(*children: Any) -> Html:
  """Return the children as one Html; see `tag`."""
  return Html(
    ''.join(
      child if isinstance(child, Html) else html.escape(str(child))
      for child in children
      if child is not None
    )
  )


def image(data: bytes, kind: str, **attributes: str) -> Html:
  """Return an image whose bytes are part of the page; kind is its format."""
  source = f'data:image/{kind};base64,{base64.b64encode(data).decode()}'
  return Html(f'<img{_attributes(attributes | {"src": source})}>')


def table(
  head: Sequence[str] | None,
  rows: Iterable[Sequence[Any]],
  *,
  numbers: Collection[int] = (),
  sortable: bool = False,
  **attributes: Any,
) -> Html:
  """Return a table that scrolls sideways where it is too wide.

  Args:
    head: texts of the columns; None for no head.
    rows: lists of cells, the first of which names the row. A cell can be a
      tuple (what is shown, value to sort by).
    numbers: columns that are aligned to the right.
    sortable: whether a click on a heading sorts the rows.
    **attributes: of the table.
  """

  def kind(column):
    return 'number' if column in numbers else None

  heading = None
  if head:
    cells = [
      tag('th', x, scope='col', class_=kind(i)) for i, x in enumerate(head)
    ]
    heading = tag('thead', tag('tr', *cells))
  lines = []
  for row in rows:
    cells = [tag('th', row[0], scope='row')]
    for i, cell in enumerate(row[1:], 1):
      text, value = cell if isinstance(cell, tuple) else (cell, None)
      cells.append(tag('td', text, class_=kind(i), data_value=value))
    lines.append(tag('tr', *cells))
  if sortable:
    attributes['class_'] = 'sortable'
  made = tag('table', heading, tag('tbody', *lines), **attributes)
  return tag('div', made, class_='scroll')


def fold(title: str, *children: Any, **attributes: Any) -> Html:
  """Return content that a click on the title shows."""
  return tag('details', tag('summary', title), *children, **attributes)


def section(title: str, *children: Html | None) -> Html | None:
  """Return a section with a heading; None if it has no content."""
  children = tuple(child for child in children if child)
  return tag('section', tag('h2', title), *children) if children else None


def script(values: Any) -> Html:
  """Return JSON values for the page's script, safe inside of HTML."""
  text = json.dumps(values, separators=(',', ':'), allow_nan=False)
  for character in '<>&':
    text = text.replace(character, f'\\u{ord(character):04x}')
  return Html(f'<script type="application/json" id="data">{text}</script>')
