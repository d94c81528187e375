from vit_jax.data.pipeline import Unlabelled as Unlabelled
