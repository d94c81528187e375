"""Conversion of config files to objects, and of objects to JSON.

    config.model = dict(target='vit_jax.models.vit.VisionTransformer', width=64)

A `target` is the dotted path of a class or function; the keys next to it are
its keyword arguments. There is no registry: a config can name anything that
can be imported, from any package. Five rules turn a config into objects:

- Nested targets are called first. If required arguments are still missing,
  the result is a partial: the code that receives it supplies the rest, such as
  `objective(model, preprocess=...)`. So an objective can wrap an objective.
- Annotations are the schema. A dict without a target becomes the dataclass
  that is the default of the parameter, or its annotation.
- A dataclass may have one field with metadata {'rest': True}: then its own
  fields and a target with its keywords stand in one flat dict, as in
  `evals.test = dict(target=..., data=..., every_steps=1000)`.
- `every_steps=1000` sets a parameter `every` to Duration(1000, 'steps'); the
  units are those of durations.py.

All keys are checked before anything is called, so that a typo costs nothing.
"""

from vit_jax.config.calls import Call as Call
from vit_jax.config.calls import Partial as Partial
from vit_jax.config.calls import check_set as check_set
from vit_jax.config.calls import full_name as full_name
from vit_jax.config.calls import locate as locate
from vit_jax.config.calls import make as make
from vit_jax.config.calls import parameters_of as parameters_of
from vit_jax.config.calls import plan_run as plan_run
from vit_jax.config.calls import resolve as resolve
from vit_jax.config.calls import schema_of as schema_of
from vit_jax.config.calls import supply as supply
from vit_jax.config.loading import about as about
from vit_jax.config.loading import import_configs as import_configs
from vit_jax.config.loading import load as load
from vit_jax.config.loading import shipped_configs as shipped_configs
from vit_jax.config.records import Entry as Entry
from vit_jax.config.records import Provenance as Provenance
from vit_jax.config.records import build as build
from vit_jax.config.records import describe as describe
from vit_jax.config.records import entries as entries
from vit_jax.config.records import plain as plain
from vit_jax.config.records import run as run
from vit_jax.config.records import settings as settings
from vit_jax.config.values import ConfigDict as ConfigDict
from vit_jax.config.values import ConfigError as ConfigError
from vit_jax.config.values import override as override
from vit_jax.config.values import suggest as suggest
from vit_jax.config.values import walk as walk
