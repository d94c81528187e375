"""From a config to the call of the function that its `run` names."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.calls import check_set, plan_run
from vit_jax.config.records import Entry, entries
from vit_jax.types import PathLike


@dataclasses.dataclass(frozen=True)
class Provenance:
  """The config that a run is called with.

  Attributes:
    config: the config as JSON values, saved as config.json.
    preset: its file and what the command line changed, saved as preset.json.
    entries: every argument by key, defaults included. A run that resumes is
      compared with them, see runs/changes.py.
    allow_changes: keys that may differ from those that the run started with.
  """

  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  entries: Sequence[Entry] = ()
  allow_changes: Sequence[str] = ()


def run(
  config: Any,
  workdir: PathLike,
  *,
  preset: Mapping[str, Any] | None = None,
  allow_changes: Sequence[str] = (),
  **supplied: Any,
) -> Any:
  """Call the function that config.run names with the objects of the config.

  Args:
    config: ConfigDict.
    workdir: the first argument of the function.
    preset: JSON values that say where the config is from: 'config' (the config
      file and its argument) and 'changed' (see `override`). 'defaults' is
      added: {key: text} of what the config does not set.
    allow_changes: see Provenance.
    **supplied: more arguments of the function, see `plan_run`.

  Raises:
    ConfigError: as of `plan_run`, or a value is None that must be set.
  """
  found, taken = plan_run(config, **supplied)
  check_set(found, config)
  listed = tuple(entries(found))
  defaults = {each.key: str(each.value) for each in listed if not each.is_set}
  provenance = Provenance(
    config=json.loads(config.to_json_best_effort()),
    preset={**(preset or {}), 'defaults': defaults},
    entries=listed,
    allow_changes=allow_changes,
  )
  return found.make(workdir, provenance=provenance, **taken)
