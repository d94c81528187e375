"""Parser of a config's argument: the words after `FILE.py:`, e.g. L/16,tiny."""

import difflib
import math
import types

_MAY_BE_ZERO = ('classes', 'reg')  # all other numbers must be positive


def parse(argument, switches=(), **options):
  """Return the values of a config's options, as attributes.

  Args:
    argument: words separated by commas; '' for the defaults.
    switches: words that set an attribute of their name to True.
    **options: {name: default}. A tuple of words takes one of them (the first is
      the default, which may be None); a str or a number takes name=VALUE; the
      types int, float and str take a value and default to None.
  """
  words = {word: (word, True) for word in switches}  # those without a value
  values = dict.fromkeys(switches, False)
  for name, option in options.items():
    if isinstance(option, tuple):
      words |= {choice: (name, choice) for choice in option if choice}
      option = option[0]
    values[name] = None if isinstance(option, type) else option
  given = {}
  for word in filter(None, (x.strip() for x in (argument or '').split(','))):
    name, value = words.get(word) or _assignment(word, words, options)
    if name in given:
      raise ValueError(
        f'{given[name]!r} and {word!r} both set {name!r}. Keep one of them.'
      )
    given[name], values[name] = word, value
  return types.SimpleNamespace(**values)


def chosen(args, words, refused=()):
  """Return the words whose switches are on; all if none is.

  Switches of `refused` that are not among `words` are an error.
  """
  for x in refused:
    if getattr(args, x) and x not in words:
      raise ValueError(f'{x!r} is not in this study. Use {", ".join(words)}.')
  return tuple(x for x in words if getattr(args, x)) or tuple(words)


def _assignment(word, words, options):
  """Return (name, value) of a word name=VALUE."""
  name, _, text = (x.strip() for x in word.partition('='))
  option = options.get(name, ())
  if isinstance(option, tuple):
    named = [f'{x}=' for x, y in options.items() if not isinstance(y, tuple)]
    known = {x.lower(): x for x in (*words, *named)}
    meant = text if text in words else name  # model=B/16 is written B/16
    near = difflib.get_close_matches(meant.lower(), known, n=1)
    hint = f' (did you mean {known[near[0]]!r}?)' if near else ''
    raise ValueError(
      f'The config does not take the argument {word!r}{hint}. It takes, '
      f'separated by commas: {", ".join(known.values())}.'
    )
  kind = option if isinstance(option, type) else type(option)
  try:
    value = kind(text)
    valid = bool(text) if kind is str else 0 <= value < math.inf
  except ValueError:
    valid = False
  if not valid or (value == 0 and name not in _MAY_BE_ZERO):
    what = {str: 'a name', int: 'a whole number', float: 'a number'}[kind]
    least = 'of 0 or more' if name in _MAY_BE_ZERO else 'above 0'
    least = '' if kind is str else f' {least}'
    raise ValueError(f'{word!r}: expected {what}{least} after {name}=.')
  return name, value
