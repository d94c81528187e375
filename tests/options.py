"""Objects all of whose options differ from their defaults."""

import inspect

from vit_jax.models.pallas.choice import Chooser


def all_set(make, without=(), **options):
  """Call a class or function with each of its options, none at its default."""
  known = inspect.signature(make).parameters
  assert {*options, *without} == {*known}
  for name, value in options.items():
    assert value != known[name].default, f'{name} is at its default'
  return make(**options)


def note_choices(monkeypatch):
  """Return a list of what each choice of attention is made for."""
  found = []

  def choose(self, model, images, *, backward=True):
    of_mesh = self.batch_size, self.mesh.size, self.record
    found.append((*of_mesh, model, images.shape, backward))
    return model

  monkeypatch.setattr(Chooser, '__call__', choose)
  return found
