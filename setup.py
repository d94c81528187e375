"""Packaging of vit_jax; the settings of tools are in pyproject.toml."""

import setuptools

setuptools.setup(
  name='vit_jax',
  version='0.1.0',
  license='Apache-2.0',
  # _OWNER_: the account that publishes it; the notebooks link there, too.
  url='https://github.com/_OWNER_/vit_jax',
  description='Vision Transformers in JAX: pre-train, transfer, analyse.',
  python_requires='>=3.11',
  packages=setuptools.find_packages(include=['vit_jax', 'vit_jax.*']),
  install_requires=[
    'absl-py',
    'aiohttp',  # weights from http:// and https:// by fsspec
    'etils[epath]',
    'flax>=0.12',
    'flatbuffers',  # of StableHLO files
    'fsspec',
    'grain>=0.2.15',
    'jax>=0.10',
    'matplotlib',  # figures, and the fonts that the glyphs are drawn from
    'ml-collections',
    'ml-dtypes',
    'numpy',
    'opencv-python-headless>=4.11',
    'optax>=0.2.6',
    'orbax-checkpoint>=0.11.30',
    'pillow',  # palette, CMYK and other images OpenCV does not decode
    'rich',
    'safetensors',
    'scikit-learn',  # the embedded digits
    'scipy',
    'tensorboardX',
    'tensorflow-datasets>=4.9.8',
  ],
  extras_require={
    'test': ['pytest', 'pytest-xdist', 'ruff'],
    'tpu': ['jax[tpu]'],
    'cuda': ['jax[cuda12]'],
    'gcs': ['gcsfs'],
    'parity': ['torch', 'torchvision', 'timm', 'transformers'],
  },
)
