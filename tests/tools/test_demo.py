"""The demo: its numbers, and its page in a headless Chromium."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from unittest import mock

import chromium
import numpy as np
import pytest
from PIL import Image

from vit_jax.tools import demo
from vit_jax.tools.look import arrays
from vit_jax.tools.predict import predict
from vit_jax.zoo import names

NAMES = ['cat', 'crane', 'owl', 'crane', 'a', 'b']  # a name occurs twice


@pytest.fixture(scope='module')
def photo(tmp_path_factory):
  """A photo that lies on its side, as its EXIF orientation says."""
  path = tmp_path_factory.mktemp('photos') / 'photo.jpg'
  rows, columns = np.mgrid[:120, :90]
  pixels = np.stack([rows, 2 * columns, rows ^ columns], -1).astype(np.uint8)
  image = Image.fromarray(pixels)
  exif = image.getexif()
  exif[274] = 6
  image.save(path, exif=exif)
  return str(path)


def test_explainer_agrees_with_predict_and_look(photo, weights):
  weights = dataclasses.replace(weights, class_names=NAMES)
  explainer = demo.Explainer(weights)
  assert (explainer.layers, explainer.heads) == (2, 2)
  found = explainer(photo)
  (predicted,) = predict(weights, [photo])
  (looked,) = arrays.look_at(weights, [photo])
  np.testing.assert_allclose(
    found['probabilities'], predicted['probabilities'], rtol=1e-5
  )
  np.testing.assert_allclose(found['maps'], looked['maps'], rtol=1e-4)
  np.testing.assert_allclose(
    found['heads'][-1].mean(axis=0), looked['rollout'], rtol=1e-4, atol=1e-7
  )
  assert found['picture'].shape == (14 * 32, 14 * 48, 3)
  assert found['input'].shape == (32, 48, 3)
  classes = explainer.top(found, 6)
  assert set(classes) == {'cat', 'crane (1)', 'owl', 'crane (3)', 'a', 'b'}
  assert list(classes.values()) == sorted(classes.values(), reverse=True)
  drawn = [
    explainer.draw(found, shown, layer, head).tobytes()
    for shown in demo.SHOWN
    for layer in (1, 2)
    for head in (demo.ALL, '1', '2')
  ]
  assert len(set(drawn)) == 12 - 3  # layer 1 has no layers before it
  assert explainer.draw(found).tobytes() == drawn[3]  # the last layer's rollout
  assert explainer.draw(found, style='heat').tobytes() != drawn[3]


def test_models_without_attention_or_classes(photo, make_weights, model):
  mixer = names.create('Mixer-S/16', num_classes=4).clone(depth=1)
  explainer = demo.Explainer(make_weights(mixer))
  assert 'no attention' in explainer.no_attention
  classes = explainer.top(explainer(photo), 4)
  assert set(classes) == {f'class {i}' for i in range(4)}
  headless = make_weights(model.clone(num_classes=None))
  assert not demo.Explainer(headless).has_classes


def test_missing_gradio_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gradio', None)
  with pytest.raises(SystemExit) as error:
    demo.main(['--weights=none.npz'])
  assert "pip install -e '.[demo]'" in str(error.value)


def test_all_options_of_the_command_arrive(file, monkeypatch):
  gradio, page = mock.Mock(), mock.Mock()
  page.return_value.launch.return_value = (None, 'http://here', None)
  monkeypatch.setattr(demo, '_gradio', gradio)
  monkeypatch.setattr(demo, 'page', page)
  monkeypatch.setattr(demo.signal, 'signal', mock.Mock())
  flags = ['--top_k=3', '--port=7999', '--share', '--max_image_bytes=9']
  demo.main([f'--weights={file}', *flags])
  explainer, top_k = page.call_args.args
  assert top_k == 3
  assert 'max_image_bytes=9. Set' in explainer(demo._EXAMPLE)['error']
  launched = page.return_value.launch.call_args.kwargs
  options = {'server_port': 7999, 'share': True, 'max_file_size': '50mb'}
  assert launched | options == launched


@contextlib.contextmanager
def serving(*arguments):
  """Context manager: the address of a demo in another process."""
  command = [sys.executable, '-m', 'vit_jax.tools.demo', *arguments]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  try:
    line = process.stdout.readline()
    yield re.search(r'http://127\.0\.0\.1:\d+', line)[0]
  finally:
    process.terminate()
    process.wait()
    process.stdout.close()


class Page:
  """The page of a demo, as its user sees it."""

  def __init__(self, driver):
    self._driver = driver

  def upload(self, path):
    self.wait('#image input[type=file]').send_keys(path)

  def wait(self, selector, ready=lambda element: True):
    """Return the element when it is there and `ready`."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
      found = self._driver.find_elements('css selector', selector)
      with contextlib.suppress(Exception):  # it is replaced at this moment
        if found and ready(found[0]):
          return found[0]
      time.sleep(0.05)
    raise AssertionError(f'{selector} is not there.')

  def attention(self, other_than=None):
    """Return the pixels that show the attention."""
    old = [other_than]

    def changed(element):
      old[0] = element.get_attribute('src')
      return old[0] and old[0] != other_than

    self.wait('#attention img', changed)
    data = urllib.request.urlopen(old[0]).read()
    return old[0], np.asarray(Image.open(io.BytesIO(data)).convert('RGB'))

  def addresses(self):
    """Return the servers that the page has asked for something."""
    found = set()
    for entry in self._driver.get_log('performance'):
      event = json.loads(entry['message'])['message']
      if event['method'] == 'Network.requestWillBeSent':
        url, page = event['params']['request']['url'], event['params']
        if page['documentURL'].startswith(self._driver.current_url):
          found.update(re.findall(r'^\w+://[^/]+', url))
    return found


@pytest.mark.slow
@pytest.mark.skipif(
  not importlib.util.find_spec('gradio'), reason='gradio is not installed'
)
def test_page_in_a_browser(photo, file, weights, bad, tmp_path):
  with contextlib.ExitStack() as stack:
    profile = tmp_path / 'chromium'
    driver = stack.enter_context(chromium.driver(profile, log='performance'))
    address = stack.enter_context(serving(f'--weights={file}'))
    driver.get(address)
    page = Page(driver)

    large = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"'
    large += b'\r\n\r\n' + bytes(51 << 20) + b'\r\n--x--\r\n'
    kind = {'Content-Type': 'multipart/form-data; boundary=x'}
    url = f'{address}/gradio_api/upload'
    with pytest.raises(urllib.error.HTTPError, match='413'):
      urllib.request.urlopen(urllib.request.Request(url, large, kind))

    page.upload(bad)
    message = page.wait('#message', lambda message: message.text).text
    assert message.startswith('bad.png: cannot decode an image')
    page.wait('#image button[aria-label="Remove Image"]').click()

    page.upload(photo)
    text = page.wait('#probabilities', lambda label: '%' in label.text).text
    ((probabilities),) = [r['probabilities'] for r in predict(weights, [photo])]
    best = weights.class_names[int(np.argmax(probabilities))]
    assert best in text.splitlines()[1]

    explainer = demo.Explainer(weights)
    found = explainer(photo)
    src = None
    for head in (demo.ALL, '1', '2'):
      if src:
        page.wait(f'#head input[value="{head}"]').click()
      src, pixels = page.attention(other_than=src)
      expected = explainer.draw(found, head=head)
      # Rounding of two compiled programs.
      assert np.abs(pixels.astype(int) - expected).max() <= 2, head
    if folder := os.environ.get('VIT_JAX_SCREENSHOTS'):
      driver.save_screenshot(f'{folder}/demo.png')
    page.wait('#example').click()
    assert not np.array_equal(page.attention(other_than=src)[1], pixels)
    info = json.load(urllib.request.urlopen(f'{address}/gradio_api/info'))
    assert list(info['named_endpoints']) == ['/explain', '/draw']
    # Nothing comes from elsewhere, such as fonts or analytics.
    assert page.addresses() == {address}
