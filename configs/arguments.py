"""Parser of a config's argument: the words after `FILE.py:`, e.g. L/16,tiny."""

import difflib
import math
import types


def parse(argument, *, may_be_zero=(), **options):
  """Return the values of a config's options, as attributes.

  Args:
    argument: words separated by commas; '' for the defaults.
    may_be_zero: options whose number may be 0; all others must be positive.
    **options: {name: default}. A tuple of words takes one of them (the first is
      the default); False is a switch that its name turns on; a str or a number
      takes name=VALUE; the types int and float take a number and default to
      None.

  Raises:
    ValueError: an unknown word, a bad number, or two values of one option; one
      line that lists what is allowed.
  """
  values = {name: _default(option) for name, option in options.items()}
  given = {}
  for word in filter(None, (x.strip() for x in (argument or '').split(','))):
    name, value = _interpret(word, options, may_be_zero)
    if name in given:
      raise ValueError(
        f'{given[name]!r} and {word!r} both set {name!r}. Keep one of them.'
      )
    given[name], values[name] = word, value
  return types.SimpleNamespace(**values)


def switches(words):
  """Return options for `parse` that the words turn on."""
  return dict.fromkeys(words, False)


def chosen(args, words):
  """Return the words whose switches are on; all words if none is."""
  return tuple(x for x in words if getattr(args, x)) or tuple(words)


def _default(option):
  if isinstance(option, tuple):
    return option[0]
  return None if isinstance(option, type) else option


def _interpret(word, options, may_be_zero):
  """Return (name, value) of one word."""
  words = {}  # those without a value, and what they set
  for name, option in options.items():
    if isinstance(option, tuple):
      words |= {choice: (name, choice) for choice in option}
    elif option is False:
      words[name] = name, True
  if word in words:
    return words[word]
  name, _, text = (x.strip() for x in word.partition('='))
  if name not in options or isinstance(options[name], tuple | bool):
    raise ValueError(_unknown(word, name, text, words, options))
  option = options[name]
  example = _describe(name, option)
  if isinstance(option, str):
    if not text:
      raise ValueError(f'{word!r} lacks a name. Write e.g. {example}.')
    return name, text
  kind = option if isinstance(option, type) else type(option)
  try:
    value = kind(text)
  except ValueError:
    value = math.nan
  zero_fits = name in may_be_zero and value == 0
  if not math.isfinite(value) or not (value > 0 or zero_fits):
    what = 'a whole number' if kind is int else 'a number'
    least = 'of 0 or more' if name in may_be_zero else 'above 0'
    like = '' if kind is option else f', as in {example}'
    raise ValueError(f'{word!r}: expected {what} {least}{like}.')
  return name, value


def _unknown(word, name, text, words, options):
  """Return the message for a word that no option takes."""
  if name in words:
    return f'{word!r}: {name!r} takes no value. Write {name!r} only.'
  named = (x for x in options if not isinstance(options[x], tuple))
  known = {x.lower(): x for x in (*words, *named)}
  meant = text if text in words else name  # model=B/16 is written B/16
  near = difflib.get_close_matches(meant.lower(), known, n=1)
  hint = f' (did you mean {known[near[0]]!r}?)' if near else ''
  allowed = ', '.join(_describe(*item) for item in options.items())
  return (
    f'The config does not take the argument {word!r}{hint}. It takes, '
    f'separated by commas: {allowed}.'
  )


def _describe(name, option):
  """Return what users write; the default, if there is one, is the example."""
  if isinstance(option, tuple):
    return '|'.join(option)
  if option is False:
    return name
  if isinstance(option, type):
    return f'{name}=N' if option is int else f'{name}=X'
  shown = option if isinstance(option, str) else f'{option:.12g}'
  return f'{name}={shown}'
