"""Parser of a config's argument: the words after `FILE.py:`, e.g. L/16,tiny."""

import types


def parse(argument, **options):
  """Return the values of a config's options, as attributes.

  Args:
    argument: words separated by commas; '' for the defaults.
    **options: {name: default}. A tuple of words takes one of them (the first is
      the default); False is a switch that its name turns on; a str or a number
      takes name=VALUE; the type float takes name=NUMBER and defaults to None.

  Raises:
    ValueError: an unknown word or two values of one option; the message lists
      what is allowed.
  """
  values = {name: _default(option) for name, option in options.items()}
  given = {}
  for word in filter(None, (x.strip() for x in (argument or '').split(','))):
    name, value = _interpret(word, options)
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
  return None if option is float else option


def _interpret(word, options):
  """Return (name, value) of one word."""
  name, is_assignment, text = word.partition('=')
  if not is_assignment:
    for option_name, option in options.items():
      if isinstance(option, tuple) and word in option:
        return option_name, word
      if option is False and word == option_name:
        return option_name, True
  elif name in options and not isinstance(options[name], tuple | bool):
    option = options[name]
    kind = option if isinstance(option, type) else type(option)
    try:
      return name, kind(text)
    except ValueError:
      pass
  allowed = [_describe(*item) for item in options.items()]
  raise ValueError(
    f'The config does not take the argument {word!r}. It takes the following, '
    'separated by commas:\n  ' + '\n  '.join(allowed)
  )


def _describe(name, option):
  if isinstance(option, tuple):
    return f'one of {", ".join(option)}'
  if option is False:
    return name
  if isinstance(option, str):
    return f'{name}=NAME (default {option})'
  kind = 'WHOLE_NUMBER' if isinstance(option, int) else 'NUMBER'
  return f'{name}={kind}' + ('' if option is float else f' (default {option})')
