"""The argument of a config: what follows `FILE.py:` on the command line.

It is words between commas: `L/16,epochs=30,tiny`.
"""

import types


def parse(argument, **options):
  """The values of a config's options, as attributes.

  Args:
    argument: the words; '' for the defaults.
    **options: name and default of each. A tuple of words takes one of them,
      given by itself (the first is the default); False is a switch, given by
      its name; a str or a number takes name=value; the type float takes
      name=NUMBER and is None by default.

  Raises:
    ValueError: a word that is none of these, or a second value for the same
      option; lists what is allowed.
  """
  values = {name: _default(option) for name, option in options.items()}
  given = {}
  for word in filter(None, (x.strip() for x in (argument or '').split(','))):
    name, value = _interpret(word, options)
    if name in given:
      raise ValueError(
        f'{given[name]!r} and {word!r} both set {name!r}; keep one.'
      )
    given[name], values[name] = word, value
  return types.SimpleNamespace(**values)


def _default(option):
  if isinstance(option, tuple):
    return option[0]
  return None if option is float else option


def _interpret(word, options):
  """(name, value) of one word."""
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
    f'The config does not take the argument {word!r}. It takes, with commas '
    f'between them:\n  ' + '\n  '.join(allowed)
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
