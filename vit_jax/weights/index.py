"""JSON files, and those that say which files sharded weights are made of."""

import json
import pathlib


def read_json(path):
  """The dict in a JSON file.

  Raises:
    ValueError: with line and column, if it is none.
  """
  try:
    found = json.loads(pathlib.Path(path).read_bytes())
  except OSError as e:
    raise ValueError(f'{path} cannot be opened: {e.strerror}.') from e
  except (ValueError, RecursionError) as e:  # no UTF-8 is a ValueError, too
    raise ValueError(f'{path} is no JSON: {e}.') from e
  if not isinstance(found, dict):
    what = type(found).__name__
    raise ValueError(f'{path}: expected {{...}}, found a {what}.')
  return found


def shards(path):
  """{file name: names of its arrays} of an index of sharded safetensors.

  Raises:
    ValueError: it is none, or names a file in another folder.
  """
  index = read_json(path).get('weight_map')
  if not isinstance(index, dict) or not index:
    raise ValueError(f"{path} has no 'weight_map', so it is no index.")
  out = {}
  for array, name in index.items():
    plain = isinstance(name, str) and name not in ('', '.', '..')
    if not plain or set(name) & set('/\\\0'):
      raise ValueError(
        f'{path} names the file {name!r}. It may only name files beside it.'
      )
    out.setdefault(name, set()).add(array)
  return out
