"""The tests against recordings of timm and torchvision, with them live.

The images are larger than the recorded one. timm and torchvision are compared
with Pillow's operations, so that no operator of torchvision is needed.
"""

import pathlib
import sys

import pytest
from live import needs

sys.path.append(str(pathlib.Path(__file__).parents[1] / 'data'))

from test_augment import (  # noqa: F401
  test_hue_is_torchvisions,
  test_operations_are_timms,
  test_simple_random_crop_is_torchvisions,
  test_trivial_augment_is_torchvisions,
)

pytestmark = needs('timm', 'torchvision')


@pytest.fixture(scope='module', params=[(96, 128), (61, 47)])
def recorded(request):
  """Return the results of timm and torchvision for an image of another size."""
  import record_augment

  return record_augment.made(*request.param)
