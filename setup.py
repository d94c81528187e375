"""Packaging of vit_jax. Tool settings are in pyproject.toml."""

import setuptools

setuptools.setup(
  name='vit_jax',
  version='0.1.0',
  license='Apache-2.0',
  description='Vision Transformers in JAX: pre-training, transfer, analysis.',
  python_requires='>=3.11',
  # An installed package brings the configs along: --config=vit_jax:quickstart.
  packages=[
    *setuptools.find_packages(include=['vit_jax', 'vit_jax.*']),
    'vit_jax.configs',
  ],
  package_dir={'vit_jax.configs': 'configs'},
  package_data={'vit_jax': ['py.typed', 'reports/page.css', 'reports/page.js']},
  install_requires=[
    'absl-py',
    'aiohttp',  # fsspec uses it to read weights from http:// and https://
    'etils[epath]',
    'flax>=0.12',
    'flatbuffers',  # StableHLO export
    'fsspec',
    'grain>=0.2.15',
    'jax>=0.10',
    'matplotlib',  # figures, and the fonts of the glyphs
    'ml-collections',
    'ml-dtypes',
    'numpy',
    'opencv-python-headless>=4.11',
    'optax>=0.2.6',
    'orbax-checkpoint>=0.11.30',
    'pillow',  # decodes palette and CMYK images, which OpenCV does not
    'rich',
    'safetensors',
    'scikit-learn',  # embedded digits
    'scipy',
    'tensorboardX',
    'tensorflow-datasets>=4.9.8',
  ],
  extras_require={
    'test': ['mypy==2.4.1', 'pytest', 'pytest-xdist', 'ruff'],
    'tpu': ['jax[tpu]'],
    'cuda': ['jax[cuda12]'],
    'gcs': ['gcsfs'],
    'wandb': ['wandb'],
    'mlflow': ['mlflow-skinny'],
    'demo': ['gradio>=6'],
    'docs': ['mkdocs-material', 'mkdocstrings[python]'],
    'parity': ['torch', 'torchvision', 'timm', 'transformers'],
  },
)
