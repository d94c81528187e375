"""A headless Chromium, to test pages as their users see them."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def driver(profile: pathlib.Path, *, log: str) -> Iterator[Any]:
  """Yield a selenium driver; skip the test if there is no browser.

  Args:
    profile: empty folder for the browser.
    log: which of its logs to keep, such as 'browser' or 'performance'.
  """
  webdriver = pytest.importorskip('selenium.webdriver')
  program = shutil.which('chromium') or shutil.which('google-chrome')
  chromedriver = shutil.which('chromedriver')
  if not (program and chromedriver):
    pytest.skip('chromium and chromedriver are not installed')
  options = webdriver.ChromeOptions()
  options.binary_location = program
  for flag in (
    *('headless', 'no-sandbox', 'disable-gpu', 'disable-quic', 'no-first-run'),
    *('disable-background-networking', 'disable-component-update'),
    *('disable-sync', 'window-size=1280,900', f'user-data-dir={profile}'),
  ):
    options.add_argument(f'--{flag}')
  options.set_capability('goog:loggingPrefs', {log: 'ALL'})
  made = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
  try:
    yield made
  finally:
    made.quit()
