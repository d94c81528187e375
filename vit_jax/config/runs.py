"""From a config to the call of the function that its `run` names."""

import json
from collections.abc import Mapping
from typing import Any

from vit_jax.config.calls import check_set, plan_run
from vit_jax.config.records import Entry, entries
from vit_jax.types import PathLike


def run(
  config: Any,
  workdir: PathLike,
  *,
  preset: Mapping[str, Any] | None = None,
  **supplied: Any,
) -> Any:
  """Call the function that config.run names with the objects of the config.

  Args:
    config: ConfigDict.
    workdir: the first argument of the function.
    preset: JSON values that say where the config is from: 'config' (the config
      file and its argument) and 'changed' (see `override`). 'defaults' is
      added: {key: text} of what the config does not set.
    **supplied: more arguments of the function, see `plan_run`.

  Raises:
    ConfigError: as of `plan_run`, or a value is None that must be set.
  """
  record = json.loads(config.to_json_best_effort())
  preset = dict(preset or {})
  listed: list[Entry] = []
  found, taken = plan_run(
    config, record=record, preset=preset, entries=listed, **supplied
  )
  check_set(found, config)
  listed += entries(found)
  preset['defaults'] = {
    each.key: str(each.value) for each in listed if not each.is_set
  }
  return found.make(workdir, **taken)
